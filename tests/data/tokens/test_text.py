"""Documents of files, their tokens, and the part that is held out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.data.tokens.text import documents_of, split_texts, text_files
from megasnn.data.tokens.tokenizer import ByteTokenizer, FileTokenizer, open_tokenizer
from tests.forking import run_program

WORDS = {"a": 0, "b": 1, "<|endoftext|>": 5, "[PAD]": 2, "[UNK]": 3}


def tokenizer_file(folder: Path, words: dict[str, int] = WORDS) -> Path:
    """Words by number, of which a text keeps three, filled up to eight; a special one is put before it."""
    bos = {"id": "[PAD]", "ids": [2], "tokens": ["[PAD]"]}
    content = {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            **{"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None},
            **{"pad_id": 2, "pad_type_id": 0, "pad_token": "[PAD]"},
        },
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": {
            **{"type": "TemplateProcessing", "special_tokens": {"[PAD]": bos}},
            "single": [{"SpecialToken": {"id": "[PAD]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        },
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
    }
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(content))
    return file


def test_bytes_become_tokens_and_text_again() -> None:
    text = "Schön 🜁\r\n\0"
    tokenizer = open_tokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == [*text.encode()]
    assert tokenizer.decode([*tokens, 256, 65]) == text + "A"
    assert tokenizer.decode(tokens.tolist()[2:4] + [200]) == "h\ufffd\ufffd"
    assert tokenizer.vocab_size == 257
    with pytest.raises(ValueError, match="--end-of-document names a token of --tokenizer"):
        open_tokenizer(None, "</s>")


def test_a_tokenizer_file_cuts_and_fills_no_text(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokenizer = open_tokenizer(str(tokenizer_file(tmp_path)))
    assert tokenizer.encode("a b a c b").tolist() == [0, 1, 0, 3, 1]
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.vocab_size == 6, "4 is a gap"
    assert tokenizer.end_of_document == 5
    assert tokenizer.decode([0, 1]) == "a b"
    assert open_tokenizer(str(tmp_path / "tokenizer.json"), "[PAD]").end_of_document == 2
    assert open_tokenizer(str(tmp_path / "tokenizer.json"), "[PAD]").identity != tokenizer.identity


def test_unfit_tokenizer_files_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    file = tokenizer_file(tmp_path, {"a": 0, "[PAD]": 1, "[UNK]": 2})
    with pytest.raises(ValueError, match=r"has no token <\|endoftext\|>.*--end-of-document"):
        FileTokenizer(file)
    with pytest.raises(ValueError, match="--end-of-document x is no token of"):
        FileTokenizer(file, "x")
    file.write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizer.json that can be read"):
        FileTokenizer(file)
    with pytest.raises(ValueError, match="absent.json is no tokenizer.json that can be read"):
        FileTokenizer(tmp_path / "absent.json")


def test_without_the_package_the_command_to_install_it_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"--tokenizer t.json requires .*pip install megasnn\[text\]"):
        FileTokenizer(Path("t.json"))


def test_a_run_without_the_package_says_so_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text " * 100)
    (tmp_path / "start.py").write_text(
        "import sys\nimport megasnn\nsys.modules['tokenizers'] = None\nmegasnn.pretrain(megasnn.MODELS['spike_lm'])\n"
    )
    flags = ["--data-path", "text.txt", "--tokenizer", "t.json", "--train-iters", "1", "--num-workers", "0"]
    ended = run_program(tmp_path, "start.py", *flags)
    assert ended.returncode == 1
    assert "pip install megasnn[text]" in ended.stderr and "Traceback" not in ended.stderr


def test_files_folders_and_json_lines_are_documents(tmp_path: Path) -> None:
    (tmp_path / "part 10.txt").write_bytes(b"ten\r\n")
    (tmp_path / "part 2.txt").write_bytes("zwei ö".encode())
    (tmp_path / "sub").mkdir()
    lines = [json.dumps({"text": "one\n", "id": 7}), "", json.dumps({"text": ""}), json.dumps({"text": "ä"})]
    (tmp_path / "sub" / "more.jsonl").write_text("\n".join(lines))
    (tmp_path / "picture.png").write_bytes(b"\xff")
    files = text_files(tmp_path)
    assert [file.name for file in files] == ["part 2.txt", "part 10.txt", "more.jsonl"]
    assert [*documents_of(files)] == ["zwei ö", "ten\r\n", "one\n", "", "ä"]
    assert [*documents_of(text_files(tmp_path / "part 10.txt"))] == ["ten\r\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ab\xe4", "a.txt is no UTF-8 text: byte 2 is 0xe4"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b\n', "a.jsonl, line 2 is no JSON"),
        ("a.jsonl", b'{"text": 1}', 'a.jsonl, line 1 is no object with a text in the field "text"'),
        ("a.jsonl", b"[1]", "line 1 is no object"),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1 has half of a surrogate pair, letter 0"),
        ("a.jsonl", b"[" * 100_000, "line 1 is no JSON that can be read"),
        ("a.jsonl", b'{"text": "\xff"}', "a.jsonl, line 1 is no UTF-8 text: byte 10 is 0xff"),
    ],
)
def test_text_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(documents_of([tmp_path / name]))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "train.tar").write_bytes(b"")
    with pytest.raises(ValueError, match="train.tar is no text by its ending; texts are .txt, .md, .rst, .jsonl"):
        text_files(tmp_path / "train.tar")
    with pytest.raises(ValueError, match="absent.txt does not exist"):
        text_files(tmp_path / "absent.txt")
    with pytest.raises(ValueError, match="has no files of type .txt"):
        text_files(tmp_path)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("aö\n", max_size=6), max_size=6), st.sampled_from([0.0, 0.1, 0.5, 0.9]))
def test_the_last_part_is_held_out(texts: list[str], held_out: float) -> None:
    parts = [*split_texts(lambda: iter(texts), held_out)]
    assert "".join(part.text for part in parts) == "".join(texts)
    flags = [part.is_held_out for part in parts]
    assert flags == sorted(flags)
    size = len("".join(texts).encode())
    trained = sum(len(part.text.encode()) for part in parts if not part.is_held_out)
    longest = max((len(text.encode()) for text in texts), default=0)
    assert round(size * (1 - held_out)) <= trained <= size * (1 - held_out) + longest + 1
    if not held_out:
        assert [part.text for part in parts] == texts


def test_a_document_at_the_border_is_cut_behind_a_line() -> None:
    text = "one\ntwo\nthree\nfour\n"
    parts = [*split_texts(lambda: iter([text]), 0.5)]
    assert [(part.is_held_out, part.text) for part in parts] == [(False, "one\ntwo\nthree\n"), (True, "four\n")]
    assert np.array_equal(ByteTokenizer().encode(parts[1].text), [*b"four\n"])
