#!/usr/bin/env bash
# webdataset 1.0.2: samples that TarWriter wrote under the keys gain_0.5 and gain_0.7 are read as one sample, gain_0.
# The reader ends a key at its first dot, and the writer writes any key. Neighbours that differ only behind the dot
# become fields of one sample; the second label stands under another name, and the number of samples halves silently.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages webdataset==1.0.2 numpy==2.4.6
program <<'PY'
import webdataset

KEYS = ("gain_0.5", "gain_0.7", "gain_1")
with webdataset.TarWriter("shard.tar") as writer:
    for label, key in enumerate(KEYS):
        writer.write({"__key__": key, "cls": label})
print("written:", KEYS)
for sample in webdataset.WebDataset("shard.tar", shardshuffle=False).decode():
    fields = {name: value for name, value in sample.items() if not name.startswith("__")}
    print("read:", sample["__key__"], fields)
PY
expected <<'OUT'
written: ('gain_0.5', 'gain_0.7', 'gain_1')
read: gain_0 {'5.cls': 0, '7.cls': 1}
read: gain_1 {'cls': 2}
OUT
