"""Indexed data sets: files of other programs, our own, and damaged ones."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.data.tokens.indexed import IndexedTokens, IndexedWriter, read_token_index

# Written by megatron-core 0.16.1 (IndexedDatasetBuilder) and datatrove 0.10.1 (MegatronTokenizedFile) from the
# tokens beside them, in so many sequences and documents.
WHOLES = ([5, 6, 65535], [], [1, 2, 3, 4])
FILES = {
    "megatron, u16": (
        "4d4d4944494458000001000000000000000802000000000000000400000000000000030000000400000000000000000000000600000000"
        "0000000000000000000000010000000000000001000000000000000200000000000000",
        "05000600ffff0100020003000400",
        [*WHOLES[0], *WHOLES[2]],
        (2, 3),
    ),
    "megatron, sentences and an empty document": (
        "4d4d4944494458000001000000000000000804000000000000000500000000000000030000000100000003000000010000000000000000"
        "000000060000000000000008000000000000000e00000000000000000000000000000001000000000000000100000000000000030000000000"
        "00000400000000000000",
        "05000600ffff01000200030004000900",
        [5, 6, 65535, 1, 2, 3, 4, 9],
        (4, 4),
    ),
    "megatron, merged, with a sequence of no tokens": (
        "4d4d4944494458000001000000000000000806000000000000000700000000000000030000000100000003000000010000000000000001"
        "0000000000000000000000060000000000000008000000000000000e0000000000000010000000000000001000000000000000000000000000"
        "0000010000000000000001000000000000000300000000000000040000000000000005000000000000000600000000000000",
        "05000600ffff010002000300040009000300",
        [5, 6, 65535, 1, 2, 3, 4, 9, 3],
        (6, 6),
    ),
    "datatrove, u16": (
        "4d4d4944494458000001000000000000000803000000000000000400000000000000030000000000000004000000000000000000000006"
        "0000000000000006000000000000000000000000000000010000000000000002000000000000000300000000000000",
        "05000600ffff0100020003000400",
        [5, 6, 65535, 1, 2, 3, 4],
        (3, 3),
    ),
    "datatrove, i32": (
        "4d4d4944494458000001000000000000000402000000000000000300000000000000020000000100000000000000000000000800000000"
        "000000000000000000000001000000000000000200000000000000",
        "070000007011010008000000",
        [7, 70000, 8],
        (2, 2),
    ),
}


def stored(folder: Path, name: str) -> Path:
    index, data, *_ = FILES[name]
    prefix = folder / "other.program"
    Path(f"{prefix}.idx").write_bytes(bytes.fromhex(index))
    Path(f"{prefix}.bin").write_bytes(bytes.fromhex(data))
    return prefix


def written(prefix: Path, documents, vocab_size: int = 1000) -> IndexedTokens:
    with IndexedWriter(prefix, vocab_size) as writer:
        for document in documents:
            writer.add(np.array(document, np.int64))
    return IndexedTokens(prefix)


@pytest.mark.parametrize("name", FILES)
def test_files_of_other_programs_are_read(tmp_path: Path, name: str) -> None:
    _, _, tokens, (sequences, documents) = FILES[name]
    prefix = stored(tmp_path, name)
    found = IndexedTokens(prefix)
    assert found.read(0, len(found)).tolist() == tokens
    assert found.read(1, 2).tolist() == tokens[1:3]
    assert found.read(0, 1).dtype == np.int64
    assert found.range() == (0, max(tokens))
    assert found.documents == documents
    index = read_token_index(tmp_path / "other.program.idx")
    assert len(index.lengths) == sequences
    assert pickle.loads(pickle.dumps(found)).read(2, 1).tolist() == tokens[2:3]


def test_the_bytes_are_those_of_megatron(tmp_path: Path) -> None:
    written(tmp_path / "ours", WHOLES)
    index, data, *_ = FILES["megatron, u16"]
    assert (tmp_path / "ours.idx").read_bytes().hex() == index
    assert (tmp_path / "ours.bin").read_bytes().hex() == data


@pytest.mark.parametrize(("vocab_size", "kind"), [(65499, "<u2"), (65500, "<i4")])
def test_the_type_follows_the_vocabulary(tmp_path: Path, vocab_size: int, kind: str) -> None:
    written(tmp_path / "a", [[1, vocab_size - 1]], vocab_size)
    index = read_token_index(tmp_path / "a.idx")
    assert index.dtype == np.dtype(kind)
    assert IndexedTokens(tmp_path / "a").range() == (0, vocab_size - 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 70_000), max_size=5), max_size=8), st.randoms())
def test_sequences_in_any_order_of_the_file_are_read(tmp_path_factory, documents, draws) -> None:
    """The format allows any order, gaps excepted at the end; common programs write one after the other."""
    folder = tmp_path_factory.mktemp("order")
    order = [*range(len(documents))]
    draws.shuffle(order)
    offsets = [0] * len(documents)
    data = b""
    for number in order:
        offsets[number] = len(data)
        data += np.array(documents[number], "<i4").tobytes()
    (folder / "a.bin").write_bytes(data)
    count = len(documents)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, count, count + 1)
    lengths = np.array([len(each) for each in documents], "<i4").tobytes()
    bounds = np.arange(count + 1).astype("<i8").tobytes()
    (folder / "a.idx").write_bytes(header + lengths + np.array(offsets, "<i8").tobytes() + bounds)
    found = IndexedTokens(folder / "a")
    expected = [token for document in documents for token in document]
    assert len(found) == len(expected)
    for start in range(len(expected)):
        for count in range(1, len(expected) - start + 1):
            assert found.read(start, count).tolist() == expected[start : start + count]


def replaced(content: bytes, start: int, value: bytes) -> bytes:
    return content[:start] + value + content[start + len(value) :]


DAMAGE = {
    "no index": (lambda index: b"PK" + index[2:], "no index of tokens"),
    "short": (lambda index: index[:20], "no index of tokens"),
    "version": (lambda index: replaced(index, 9, b"\2"), "version 2, and version 1 is read"),
    "floating point": (lambda index: replaced(index, 17, b"\6"), "type 6, and tokens are whole numbers"),
    "cut": (lambda index: index[:-1], "cut or damaged: 2 sequences and 4 document bounds take 90 bytes, and it has 89"),
    "more": (lambda index: replaced(index, 18, b"\3"), "cut or damaged"),
    "modes": (lambda index: index + b"\0\1", "a mode for each sequence"),
    "negative": (lambda index: replaced(index, 34, b"\xff\xff\xff\xff"), "sequence 0 has the length -1"),
    "bounds": (lambda index: replaced(index, len(index) - 8, b"\1"), "document bounds must rise from 0 to 2"),
    "falling": (lambda index: replaced(index, 66, b"\2"), "document bounds must rise"),
    "length": (lambda index: replaced(index, 38, b"\5"), r"does not fit .*ends at byte 16, and the file has 14 bytes"),
    "offset": (lambda index: replaced(index, 42, b"\xfc" + b"\xff" * 6 + b"\x7f"), "does not fit"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused(tmp_path: Path, damage: str) -> None:
    prefix = stored(tmp_path, "megatron, u16")
    file = tmp_path / "other.program.idx"
    change, message = DAMAGE[damage]
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=message) as caught:
        IndexedTokens(prefix)
    assert str(file) in str(caught.value)


def test_data_that_changed_in_use_are_not_read(tmp_path: Path) -> None:
    found = written(tmp_path / "a", [[1, 2, 3]])
    (tmp_path / "a.bin").write_bytes(b"\0" * 4)
    with pytest.raises(OSError, match="a.bin was changed while in use"):
        found.read(0, 1)


def test_a_writer_that_fails_leaves_no_index(tmp_path: Path) -> None:
    with pytest.raises(KeyError), IndexedWriter(tmp_path / "a", 10) as writer:
        writer.add(np.array([1]))
        raise KeyError
    assert not (tmp_path / "a.idx").exists()
