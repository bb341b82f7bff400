#!/usr/bin/env bash
# datatrove 0.10.1: the writer of tokens for Megatron keeps the first tokens of each document only, if the tokenizer.json
# has a maximum length, as a file saved after enable_truncation has. There is no warning, and each document ends with its
# end token as a whole one does.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages datatrove==0.10.1 tokenizers==0.22.1 numpy==2.4.6
program <<'PY'
import numpy
from datatrove.data import Document
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

words = {"a": 0, "b": 1, "c": 2, "[UNK]": 3, "<|endoftext|>": 4}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
for longest in (None, 4):
    if longest is not None:
        tokenizer.enable_truncation(longest)
    tokenizer.save("tokenizer.json")
    documents = [Document(text="a b c a b c", id="0"), Document(text="c c", id="1")]
    writer = MegatronDocumentTokenizer("out", save_filename=f"to-{longest}", tokenizer_name_or_path="tokenizer.json")
    for _ in writer.run(iter(documents)) or ():
        pass
    tokens = numpy.fromfile(f"out/to-{longest}_00000_tokens.bin", numpy.uint16)
    print(f"maximum length {longest}: {tokens.tolist()}")
PY
expected <<'OUT'
maximum length None: [0, 1, 2, 0, 1, 2, 4, 2, 2, 4]
maximum length 4: [0, 1, 2, 4, 2, 2, 4]
OUT
