"""Tokens of a data path, and samples of them."""

from __future__ import annotations

import json
import pickle
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megasnn.config.data import DataConfig
from megasnn.data.loader import BatchLoader, BatchShare, order_identity
from megasnn.data.tokens.dataset import TokenDataset, TokenShape, open_token_datasets, require_token_flags
from megasnn.data.tokens.indexed import IndexedWriter
from megasnn.data.tokens.prepared import open_tokens, sample_documents, write_facts, write_tokens
from megasnn.data.tokens.tokenizer import ByteTokenizer
from tests.data.tokens.test_text import tokenizer_file

TEXT = "one two\n" * 30
SHAPE = TokenShape(8, 257)


def opened(path: Path | str, flag: str = "--data-path"):
    return open_tokens(str(path), flag, ByteTokenizer())


def prefix_of(folder: Path, tokens, vocab_size: int = 257, name: str = "corpus.v1") -> Path:
    """An indexed data set of one document, as of another program."""
    with IndexedWriter(folder / name, vocab_size) as writer:
        writer.add(np.array(tokens))
    return folder / name


def without_index(folder: Path) -> Path:
    prefix = prefix_of(folder, range(20))
    (folder / "corpus.v1.idx").unlink()
    return prefix


def test_text_becomes_tokens_once(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    first = opened(tmp_path / "a.txt")
    assert first.tokens.read(0, len(first.tokens)).tolist() == [*TEXT.encode(), 256]
    assert first.token_range == (0, 256)
    assert first.bytes_per_token == pytest.approx(240 / 241)
    files = {file: file.stat().st_mtime_ns for file in (cache / "tokens").iterdir()}
    assert opened(tmp_path / "a.txt").tokens.identity == first.tokens.identity
    assert {file: file.stat().st_mtime_ns for file in (cache / "tokens").iterdir()} == files
    (tmp_path / "a.txt").write_text(TEXT[:80])
    assert len(opened(tmp_path / "a.txt").tokens) == 81
    (tmp_path / "b.txt").write_text("more")
    assert opened(tmp_path).tokens.documents == 2


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_an_indexed_data_set_is_named_by_its_prefix_or_a_file(tmp_path: Path, ending: str) -> None:
    prefix = prefix_of(tmp_path, range(50))
    found = opened(f"{prefix}{ending}")
    assert found.tokens.read(0, 50).tolist() == [*range(50)]
    assert found.facts is None
    assert found.bytes_per_token is None
    assert found.token_range == (0, 49)


def test_samples_are_the_tokens_in_order_and_the_next_ones(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", 257) as writer:
        for start, count in ((0, 3), (3, 0), (3, 11), (14, 5)):
            writer.add(np.arange(start, start + count))
    dataset = TokenDataset(opened(tmp_path / "a"), TokenShape(4, 19))
    assert len(dataset) == 4
    for index in range(4):
        sample = pickle.loads(pickle.dumps(dataset)).sample(index)
        assert sample["tokens"].tolist() == [*range(4 * index, 4 * index + 4)]
        assert sample["target"].tolist() == [*range(4 * index + 1, 4 * index + 5)]
        assert sample["tokens"].dtype == np.int64
    assert len(TokenDataset(opened(tmp_path / "a"), TokenShape(18, 19))) == 1
    assert order_identity(dataset, 2, "continue").startswith("4 samples of 4 tokens, from 19 tokens in 4 documents")


def test_batches_do_not_depend_on_workers_replicas_or_where_they_begin(tmp_path: Path) -> None:
    dataset = TokenDataset(opened(prefix_of(tmp_path, np.arange(100) % 257)), SHAPE)

    def batches(share: BatchShare, start: int = 0, count: int = 3, workers: int = 0):
        loader = BatchLoader(dataset, share, DataConfig(num_workers=workers), seed=3)
        found = []
        for batch in loader.batches(start, count):
            for micro in batch.micro_batches:
                inputs = None if micro.inputs is None else micro.inputs["tokens"]
                found.append((inputs, micro.targets))
        loader.close()
        return found

    def equal(found, expected) -> bool:
        pairs = zip(found, expected, strict=True)
        return all(torch.equal(one[0], other[0]) and torch.equal(one[1], other[1]) for one, other in pairs)

    whole = batches(BatchShare(8, 4))
    assert torch.equal(whole[0][0][:, 1:], whole[0][1][:, :-1])
    assert equal(batches(BatchShare(8, 4), workers=2), whole)
    assert equal(batches(BatchShare(8, 4), start=8, count=2), whole[2:])
    assert equal(batches(BatchShare(8, 4, dp_size=2, dp_rank=1)), whole[1::2])
    last_stage = batches(BatchShare(8, 4, inputs=False))
    assert all(inputs is None for inputs, _ in last_stage)
    assert all(torch.equal(one[1], other[1]) for one, other in zip(last_stage, whole, strict=True))


def test_the_sample_text_comes_with_python_and_its_end_is_for_validation() -> None:
    found = open_token_datasets(DataConfig(), TokenShape(64, 257))
    assert found.valid is not None
    train = opened("sample").tokens
    valid = open_tokens("sample", "--data-path", ByteTokenizer(), is_held_out=True).tokens
    texts = [*sample_documents()]
    whole = [*"".join(texts).encode()]
    read = [token for tokens in (train, valid) for token in tokens.read(0, len(tokens)).tolist()]
    assert [token for token in read if token < 256] == whole
    assert 0.89 < len(train) / len(whole) < 0.93
    assert len(found.train) == (len(train) - 1) // 64
    assert found.train_units is not None
    assert found.train_units.tokens == 64


def test_a_python_without_its_help_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="--data-path sample: this Python lacks pydoc_data"):
        opened("sample")


REFUSED = {
    "short": (lambda folder: prefix_of(folder, range(8)), "has 8 tokens, and one sample is 8 and the next one.*--seq"),
    "outside": (lambda folder: prefix_of(folder, [*range(20), 300]), "has the token 300,.*--vocab-size to 301"),
    "absent": (lambda folder: folder / "absent.txt", "absent.txt does not exist"),
    "no data": (lambda folder: folder / "absent.bin", "absent.bin"),
    "no index": (without_index, "corpus.v1.idx"),
    "empty": (lambda folder: prefix_of(folder, []), "has 0 tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_data_that_do_not_fit_are_refused(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    path = make(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        open_token_datasets(DataConfig(data_path=str(path)), SHAPE)
    assert str(caught.value).startswith(f"--data-path {path}")


def test_negative_tokens_are_refused(tmp_path: Path) -> None:
    prefix = prefix_of(tmp_path, range(20), 70_000)
    np.array([*range(19), -1], "<i4").tofile(f"{prefix}.bin")
    with pytest.raises(ValueError, match="has the token -1, and tokens are numbers from 0 on"):
        open_token_datasets(DataConfig(data_path=str(prefix)), SHAPE)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(ValueError, match="comes from a tokenizer of 257 tokens,.*below 256: raise --vocab-size to 257"):
        open_token_datasets(DataConfig(data_path=f"{tmp_path}/a.txt"), TokenShape(8, 256))


def test_facts_beside_other_tokens_are_refused(tmp_path: Path) -> None:
    prefix = tmp_path / "a"
    facts = write_tokens(prefix, [TEXT], ByteTokenizer())
    write_facts(tmp_path / "a.json", facts)
    assert opened(prefix).facts == facts
    prefix_of(tmp_path, range(20), name="a")
    with pytest.raises(ValueError, match="a.json says 241 tokens, and 20 are there; remove it"):
        opened(prefix)
    (tmp_path / "a.json").write_text(json.dumps({"tokens": 20}))
    with pytest.raises(ValueError, match="a.json: largest: Field required"):
        opened(prefix)


def test_a_token_that_its_facts_deny_is_refused_when_it_is_read(tmp_path: Path) -> None:
    write_facts(tmp_path / "a.json", write_tokens(tmp_path / "a", ["a" * 19], ByteTokenizer()))
    prefix_of(tmp_path, [*range(9), 400, *range(10)], name="a")
    with pytest.raises(ValueError, match="sample 1 of --data-path .*has tokens .* to 400, outside 0 to 256"):
        TokenDataset(opened(tmp_path / "a"), SHAPE).sample(1)


def test_training_and_validation_have_one_tokenizer(tmp_path: Path) -> None:
    write_facts(tmp_path / "a.json", write_tokens(tmp_path / "a", [TEXT], ByteTokenizer()))
    facts = write_tokens(tmp_path / "b", [TEXT], ByteTokenizer())
    write_facts(tmp_path / "b.json", type(facts)(**{**vars(facts), "tokenizer": "tokenizer.json 12"}))
    config = DataConfig(data_path=f"{tmp_path}/a", valid_data_path=f"{tmp_path}/b")
    with pytest.raises(ValueError, match="a comes from bytes and .*b comes from tokenizer.json 12: prepare both with"):
        open_token_datasets(config, SHAPE)
    same = DataConfig(data_path=f"{tmp_path}/a", valid_data_path=f"{tmp_path}/a")
    (warning,) = open_token_datasets(same, SHAPE).warnings
    assert warning == "WARNING: --data-path and --valid-data-path hold the same documents"


def test_an_evaluation_alone_opens_no_training_data(tmp_path: Path) -> None:
    prefix = prefix_of(tmp_path, range(20))
    config = DataConfig(data_path="absent.txt", valid_data_path=str(prefix))
    found = open_token_datasets(config, SHAPE, evaluates=True)
    assert found.train is found.valid


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"augment": "cifar", "max_sample_mb": 3}, "--augment, --max-sample-mb: for images and recordings"),
        ({"data_path": "corpus.bin", "tokenizer": "t.json"}, "--tokenizer t.json: the data are tokens already"),
    ],
)
def test_flags_without_an_effect_are_refused(flags, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        require_token_flags(DataConfig(**flags))


def test_a_tokenizer_file_makes_other_tokens_of_a_text(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("a b a " * 10)
    config = DataConfig(data_path=f"{tmp_path}/text", tokenizer=str(tokenizer_file(tmp_path)))
    found = open_token_datasets(config, TokenShape(8, 6))
    assert found.train.sample(0)["tokens"].tolist() == [0, 1, 0, 0, 1, 0, 0, 1]
    assert len(found.train) == 3
    assert found.train_units is not None
    assert found.train_units.bytes_per_token == pytest.approx(60 / 31)
