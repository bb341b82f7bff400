"""Text documents: files, folders and JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from megasnn.common.files import in_message, read_regular, require_regular
from megasnn.data.preprocess.folders import files_of

TEXT_ENDINGS = (".txt", ".md", ".rst")
"""File endings for one document each."""
LINES_ENDING = ".jsonl"
"""File ending for a document in each line, in the field `text`."""
ENDINGS = (*TEXT_ENDINGS, LINES_ENDING)
Documents = Callable[[], Iterator[str]]
"""Yields all documents' texts, from the first on at each call."""


class Part(NamedTuple):
    """A text for training, or one held out."""

    is_held_out: bool
    text: str


def text_files(path: Path) -> list[Path]:
    """A file itself, or all text files in a folder by name, 2 before 10.

    Raises:
        ValueError: no such file, another ending, or a folder without texts.
    """
    if path.is_dir():
        return files_of(path, ENDINGS)
    if not path.exists():
        raise ValueError(f"{path} does not exist")
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path} is no text by its ending; texts are {', '.join(ENDINGS)}: rename it")
    return [path]


def documents_of(files: list[Path]) -> Iterator[str]:
    """Yields the files' documents. Raises OSError, and ValueError unless all are UTF-8 and each line has a text."""
    for file in files:
        if file.suffix.lower() == LINES_ENDING:
            yield from _lines_of(file)
        else:
            yield _decoded(read_regular(file), str(file))


def _lines_of(file: Path) -> Iterator[str]:
    require_regular(file)
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file}, line {number}"
            try:
                value = json.loads(_decoded(line, where))
            # No ValueError: deep nesting exhausts the stack of the parser.
            except RecursionError:
                raise ValueError(f"{where} is no JSON that can be read: it is nested too deeply") from None
            except ValueError as error:
                raise ValueError(f"{where} is no JSON that can be read: {error}") from None
            text = value.get("text") if isinstance(value, dict) else None
            if not isinstance(text, str):
                raise ValueError(f'{where} is no object with a text in the field "text": {in_message(value)}')
            _require_encodable(text, where)
            yield text


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is no UTF-8 text: byte {error.start:,} is {content[error.start]:#x}") from None


def _require_encodable(text: str, where: str) -> None:
    # JSON may write half of a surrogate pair, which UTF-8 has no bytes for.
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has half of a surrogate pair, letter {error.start:,} of its text") from None


def split_texts(documents: Documents, held_out: float) -> Iterator[Part]:
    """Yields all texts; a share at the end, counted in bytes, is held out.

    A document at the border is cut behind the line there. Without a line end it stays whole, for training.

    Args:
        held_out: share from 0 to 1.
    """
    # Documents are read twice, so that only one of them is in memory.
    sizes = sum(len(text.encode()) for text in documents()) if held_out else 0
    remaining = round(sizes * (1 - held_out))
    for text in documents():
        content = text.encode()
        if not held_out or len(content) <= remaining:
            yield Part(False, text)
        elif remaining > 0:
            line_end = content.find(b"\n", remaining)
            cut = len(content) if line_end < 0 else line_end + 1
            yield Part(False, content[:cut].decode())
            if cut < len(content):
                yield Part(True, content[cut:].decode())
        else:
            yield Part(True, text)
        remaining -= len(content)


def texts_of_part(documents: Documents, held_out: float, is_held_out: bool) -> Iterator[str]:
    """Yields one part's texts from `split_texts`."""
    for part in split_texts(documents, held_out):
        if part.is_held_out == is_held_out:
            yield part.text
