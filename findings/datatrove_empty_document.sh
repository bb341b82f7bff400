#!/usr/bin/env bash
# datatrove 0.10.1: after one empty document, positions of later documents in a window do not begin at 0 any more. They
# go on from where the document before the empty one ended, also in the documents behind the next one. datatrove's
# own writer stores an empty document as the end of the one before, once more. Rotary or learned positions, and masks
# made of them, then join documents. An empty first document is harmless.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages torch==2.13.0 datatrove==0.10.1 tokenizers==0.22.1 numpy==2.4.6
program <<'PY'
from datatrove.pipeline.tokens.tokenizer import TokenizedFile
from datatrove.utils.dataset import DatatroveFileDataset

for number, lengths in enumerate(((3, 2, 3, 2), (3, 0, 2, 3, 2), (0, 3, 2, 3, 2))):
    file = TokenizedFile(".", f"tokens{number}.ds")
    for length in lengths:
        file.write(list(range(length)), None)
    file.close()
    data = DatatroveFileDataset(f"tokens{number}.ds", seq_len=9, token_size=2, return_positions=True)
    print(f"documents of {lengths} tokens: positions {data[0]['positions'].tolist()}")
PY
expected <<'OUT'
documents of (3, 2, 3, 2) tokens: positions [0, 1, 2, 0, 1, 0, 1, 2, 0, 1]
documents of (3, 0, 2, 3, 2) tokens: positions [0, 1, 2, 3, 4, 3, 4, 5, 3, 4]
documents of (0, 3, 2, 3, 2) tokens: positions [0, 1, 2, 0, 1, 0, 1, 2, 0, 1]
OUT
