"""Data paths with tokens: an indexed data set, or text, which becomes one in the cache."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field, with_config
from pydantic_core import to_json

from megasnn.common.files import (
    STRICT,
    StoredCount,
    build_once,
    cache_folder,
    cached_name,
    described,
    name_in_cache,
    read_regular,
    sync,
)
from megasnn.config.data import SAMPLE
from megasnn.data.tokens.indexed import DATA, INDEX, IndexedTokens, IndexedWriter, with_ending
from megasnn.data.tokens.text import documents_of, text_files, texts_of_part
from megasnn.data.tokens.tokenizer import Tokenizer

FACTS = ".json"
"""File ending for `TokenFacts` beside an indexed data set."""
_CACHE = "tokens"
_VERSION = "1"  # of the tokens in the cache; raise it when they change
_HELD_OUT = 0.1
"""The sample text's share for validation."""
_ADVICE = "remove it, or prepare the text again"


@with_config(STRICT)
@dataclass(frozen=True)
class TokenFacts:
    """Facts about tokens made from text.

    Attributes:
        largest: largest token.
        vocab_size: the tokenizer's.
        text_bytes: in UTF-8, without document ends.
        tokenizer: `Tokenizer.identity`.
    """

    tokens: StoredCount
    largest: Annotated[int, Field(ge=0)]
    vocab_size: StoredCount
    text_bytes: StoredCount
    tokenizer: str
    version: Literal[1] = 1


@with_config(STRICT)
@dataclass(frozen=True)
class _Range:
    """Smallest and largest token."""

    lowest: int
    highest: int


class PreparedTokens(NamedTuple):
    """A data path's tokens.

    Attributes:
        source: flag and path, for messages.
        facts: None if another program wrote the tokens.
    """

    source: str
    tokens: IndexedTokens
    facts: TokenFacts | None

    @property
    def token_range(self) -> tuple[int, int]:
        """Smallest and largest token; without facts, by one scan, kept in the cache."""
        if self.facts is not None:
            return 0, self.facts.largest
        file = cache_folder(_CACHE) / cached_name(with_ending(self.tokens.prefix, DATA), FACTS, _VERSION)

        def write(target: Path) -> None:
            target.write_bytes(to_json(asdict(_Range(*self.tokens.range()))))

        found = described(_Range, build_once(file, write).read_bytes(), file)
        return found.lowest, found.highest

    @property
    def bytes_per_token(self) -> float | None:
        """Mean text bytes for each token; None if unknown."""
        return None if self.facts is None else self.facts.text_bytes / self.facts.tokens


def write_tokens(prefix: Path, texts: Iterable[str], tokenizer: Tokenizer) -> TokenFacts:
    """Writes documents with their ends as PREFIX.bin and PREFIX.idx. Raises ValueError without any text, OSError."""
    count = 0
    largest = 0
    size = 0
    with IndexedWriter(prefix, tokenizer.vocab_size) as writer:
        for text in texts:
            tokens = tokenizer.encode(text)
            end = np.array([tokenizer.end_of_document], tokens.dtype)
            tokens = np.concatenate([tokens, end])
            writer.add(tokens)
            count += len(tokens)
            largest = max(largest, int(tokens.max()))
            size += len(text.encode())
        # Document ends alone are no text.
        if not size:
            raise ValueError("there is no text")
    return TokenFacts(count, largest, tokenizer.vocab_size, size, tokenizer.identity)


def write_facts(file: Path, facts: TokenFacts) -> None:
    """Writes PREFIX.json. Raises OSError."""
    file.write_bytes(to_json(asdict(facts), indent=2))
    sync(file)


def is_text(data_path: str) -> bool:
    """Whether a data path is text, which a tokenizer reads."""
    if data_path == SAMPLE or Path(data_path).expanduser().is_dir():
        return True
    return not _prefix_of(data_path)


def open_tokens(data_path: str, flag: str, tokenizer: Tokenizer, is_held_out: bool = False) -> PreparedTokens:
    """Opens PREFIX, PREFIX.bin or PREFIX.idx; text becomes tokens in the cache, once a host.

    Args:
        flag: for messages.
        is_held_out: opens the sample text's last part.
    Raises:
        ValueError: a file is missing or damaged, or files do not fit each other.
    """
    try:
        if data_path == SAMPLE:
            prefix = _sample(tokenizer, is_held_out)
        elif is_text(data_path):
            prefix = _from_files(text_files(Path(data_path).expanduser()), tokenizer)
        else:
            prefix = Path(_prefix_of(data_path)).expanduser()
        return _opened(prefix, f"{flag} {data_path}")
    except (ValueError, OSError) as error:
        raise ValueError(f"{flag} {data_path}: {error}") from error


def _prefix_of(data_path: str) -> str:
    """An indexed data set's prefix; "" for another path."""
    path = Path(data_path)
    if path.suffix in (DATA, INDEX):
        return str(path.with_suffix(""))
    # One of the two files is enough: the other one is then missing, by its name.
    is_prefix = any(with_ending(path.expanduser(), ending).exists() for ending in (INDEX, DATA))
    return data_path if is_prefix else ""


def _opened(prefix: Path, source: str) -> PreparedTokens:
    tokens = IndexedTokens(prefix)
    file = with_ending(prefix, FACTS)
    facts = None
    if file.exists():
        facts = described(TokenFacts, read_regular(file), file, advice=_ADVICE)
        if facts.tokens != len(tokens):
            raise ValueError(f"{file} says {facts.tokens:,} tokens, and {len(tokens):,} are there; {_ADVICE}")
    return PreparedTokens(source, tokens, facts)


def _from_files(files: Sequence[Path], tokenizer: Tokenizer) -> Path:
    # Sizes and times decide, as for shards: texts are not read again to see that they are the same.
    states = [cached_name(file, "", _VERSION) for file in files]
    name = name_in_cache(files[0].stem, "", tokenizer.identity, *states)
    return _built(name, documents_of(list(files)), tokenizer)


def _sample(tokenizer: Tokenizer, is_held_out: bool) -> Path:
    # Each version of Python has its own help texts.
    split = "valid" if is_held_out else "train"
    name = name_in_cache(f"python-{split}", "", platform.python_version(), tokenizer.identity, split, _VERSION)
    return _built(name, texts_of_part(sample_documents, _HELD_OUT, is_held_out), tokenizer)


def sample_documents() -> Iterator[str]:
    """Yields Python's help texts by topic: 466,117 bytes in 79 documents for Python 3.11."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:  # some systems pack it apart
        raise ValueError("this Python lacks pydoc_data, its help: install all of Python, or give a text") from error
    for topic in sorted(topics):
        yield topics[topic]


def _built(name: str, texts: Iterable[str], tokenizer: Tokenizer) -> Path:
    """Prefix in the cache. The facts come last: beside them, the other two files are whole."""
    prefix = cache_folder(_CACHE) / name

    def write(target: Path) -> None:
        write_facts(target, write_tokens(prefix, texts, tokenizer))

    build_once(with_ending(prefix, FACTS), write)
    return prefix
