#!/usr/bin/env bash
# datatrove 0.10.1: after one empty document, positions of later documents in a window do not begin at 0 any more. They
# go on from where the document before the empty one ended, also in the documents behind the next one. An empty
# document is a valid entry of the .index file (its end is the end of the one before), and has no tokens. Rotary or
# learned positions, and masks made of them, then join documents. An empty first document is harmless.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 datatrove==0.10.1 numpy==2.4.6
program <<'PY'
import numpy as np
from datatrove.utils.dataset import DatatroveFileDataset

for lengths in ((3, 2, 3, 2), (3, 0, 2, 3, 2), (0, 3, 2, 3, 2)):
    np.arange(sum(lengths), dtype=np.uint16).tofile("tokens.ds")
    np.cumsum(lengths).astype(np.uint64).tofile("tokens.ds.index")
    data = DatatroveFileDataset("tokens.ds", seq_len=9, token_size=2, return_positions=True)
    print(f"documents of {lengths} tokens: positions {data[0]['positions'].tolist()}")
PY
expected <<'OUT'
OUT
