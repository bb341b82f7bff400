"""The command `text`: tokens of each split, their facts, and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megasnn.commands import preprocess_data
from megasnn.config.data import DataConfig
from megasnn.data.tokens.dataset import TokenShape, open_token_datasets
from megasnn.data.tokens.prepared import open_tokens
from megasnn.data.tokens.tokenizer import ByteTokenizer
from tests.data.tokens.test_text import tokenizer_file

TEXT = "".join(f"line {number}\n" for number in range(100))


def run(folder: Path, *flags: object, source: str = "in") -> int:
    paths = ["--input", str(folder / source), "--output", str(folder / "out")]
    return preprocess_data.main(["text", *paths, *map(str, flags)])


def tokens_of(prefix: Path) -> list[int]:
    tokens = open_tokens(str(prefix), "--data-path", ByteTokenizer()).tokens
    return tokens.read(0, len(tokens)).tolist()


def test_a_text_becomes_two_splits_that_train(tmp_path: Path, capsys) -> None:
    (tmp_path / "in.txt").write_text(TEXT)
    assert run(tmp_path, "--valid-share", 0.25, source="in.txt") == 0
    train = tokens_of(tmp_path / "out" / "train")
    valid = tokens_of(tmp_path / "out" / "val")
    assert train[-1] == valid[-1] == 256
    assert bytes(train[:-1]) + bytes(valid[:-1]) == TEXT.encode()
    assert bytes(train[-4:-1]).endswith(b"\n")
    assert 0.74 < len(train) / len(TEXT) < 0.77
    facts = json.loads((tmp_path / "out" / "val.json").read_text())
    assert facts["tokens"] == len(valid)
    assert facts["text_bytes"] == len(valid) - 1
    assert (facts["largest"], facts["vocab_size"], facts["tokenizer"]) == (256, 257, "bytes")
    out = capsys.readouterr().out
    assert f"{len(train):,} tokens of {len(train) - 1:,} bytes: {tmp_path / 'out' / 'train'}.bin, .idx and .json" in out
    assert "train with --vocab-size 257 or more" in out
    paths = {"data_path": f"{tmp_path}/out/train", "valid_data_path": f"{tmp_path}/out/val.idx"}
    found = open_token_datasets(DataConfig(**paths), TokenShape(16, 257))
    assert found.valid is not None
    assert len(found.valid) == (len(valid) - 1) // 16


def test_folders_are_splits_and_other_files_are_counted(tmp_path: Path, capsys) -> None:
    for name in ("train/2.txt", "train/10.txt", "valid/a.jsonl", "test/b.md"):
        file = tmp_path / "in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"text": name}) if name.endswith("l") else name)
    (tmp_path / "in" / "train" / "picture.png").write_bytes(b"")
    assert run(tmp_path) == 0
    assert tokens_of(tmp_path / "out" / "train") == [*b"train/2.txt", 256, *b"train/10.txt", 256]
    assert tokens_of(tmp_path / "out" / "val") == [*b"valid/a.jsonl", 256]
    assert tokens_of(tmp_path / "out" / "test") == [*b"test/b.md", 256]
    assert "are no samples (1 .png)" in capsys.readouterr().out
    assert run(tmp_path, "--valid-share", 0.5) == 1
    assert "--valid-share 0.5: " in capsys.readouterr().err


def test_a_tokenizer_file_names_the_end(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "in.txt").write_text("a b a a b")
    assert run(tmp_path, "--tokenizer", tokenizer_file(tmp_path), "--end-of-document", "[UNK]", source="in.txt") == 0
    assert tokens_of(tmp_path / "out" / "train") == [0, 1, 0, 0, 1, 3]


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        (b"\xff", "", "in.txt, train: .*in.txt is no UTF-8 text"),
        (b"", "", "in.txt, train: there is no text"),
        (b"one line", "--valid-share 0.5", "in.txt, val: there is no text"),
        (b"a", "--end-of-document x", "--end-of-document names a token of --tokenizer"),
    ],
)
def test_text_that_cannot_be_prepared_leaves_nothing(tmp_path: Path, capsys, content, flags: str, message: str) -> None:
    (tmp_path / "in.txt").write_bytes(content)
    assert run(tmp_path, *flags.split(), source="in.txt") == 1
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_a_share_is_below_one(tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        run(tmp_path, "--valid-share", 1)
    assert "--valid-share must be at least 0 and below 1, got 1" in capsys.readouterr().err
