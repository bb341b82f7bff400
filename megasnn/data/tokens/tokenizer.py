"""Tokenizers: bytes, which need no file, or a tokenizer.json for the package `tokenizers`."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasnn.common.files import MissingPackageError, in_message, read_regular

BYTE_VOCABULARY = 257
"""256 bytes, and the document end."""
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<EOD>", "[EOS]")
"""Usual names for the document end; the first one in a tokenizer.json is taken."""


class Tokenizer(ABC):
    """Turns text into tokens and back.

    Attributes:
        identity: name and version, kept with tokens; equal ones give equal tokens.
        vocab_size: all tokens are below it.
        end_of_document: token behind each document.
    """

    identity: str
    vocab_size: int
    end_of_document: int

    @abstractmethod
    def encode(self, text: str) -> NDArray[Any]:
        """A text's tokens, without special ones, whole numbers `[n]`."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Text from tokens, without special ones. Incomplete letters become U+FFFD."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, 0 to 255; 256 ends a document."""

    identity = "bytes"
    vocab_size = BYTE_VOCABULARY
    end_of_document = 256

    def encode(self, text: str) -> NDArray[Any]:
        # The document end, 256, does not fit in a byte.
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(self, tokens: Sequence[int]) -> str:
        # Special tokens have no text.
        content = bytes(int(token) for token in tokens if token < self.end_of_document)
        return content.decode(errors="replace")


class FileTokenizer(Tokenizer):
    """A tokenizer.json, read by the package `tokenizers` (``pip install megasnn[text]``).

    Args:
        end_of_document: the token's text; by default from `END_NAMES`.
    Raises:
        ValueError: the file is missing or damaged, or has no such token.
        MissingPackageError: the package is missing.
    """

    def __init__(self, file: Path, end_of_document: str | None = None) -> None:
        try:
            from tokenizers import Tokenizer as Loaded
        except ModuleNotFoundError as error:
            message = f"--tokenizer {file} requires the package tokenizers: pip install megasnn[text]"
            raise MissingPackageError(message) from error
        try:
            content = read_regular(file)
            self._loaded: Any = Loaded.from_str(content.decode())
        except Exception as error:  # tokenizers raises Exception itself
            raise ValueError(f"--tokenizer {file} is no tokenizer.json that can be read: {error}") from error
        # A file may cut texts to a model's length, or fill them up to it. Most of a document would be lost
        # (findings/datatrove_truncated_documents.sh).
        self._loaded.no_truncation()
        self._loaded.no_padding()
        vocabulary: dict[str, int] = self._loaded.get_vocab()
        # Numbers may have gaps: the largest one counts.
        self.vocab_size = 1 + max(vocabulary.values(), default=0)
        self.end_of_document = self._end_token(file, vocabulary, end_of_document)
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        self.identity = f"tokenizer.json {digest}, document end {self.end_of_document}"

    @staticmethod
    def _end_token(file: Path, vocabulary: dict[str, int], name: str | None) -> int:
        if name is not None and name not in vocabulary:
            raise ValueError(f"--end-of-document {in_message(name)} is no token of {file}; give one of its tokens")
        names = END_NAMES if name is None else (name,)
        for each in names:
            if each in vocabulary:
                return vocabulary[each]
        raise ValueError(
            f"--tokenizer {file} has no token {', '.join(END_NAMES)} for the end of a document: name it with "
            "--end-of-document in tools/preprocess_data.py text, and train on the tokens"
        )

    def encode(self, text: str) -> NDArray[Any]:
        # `write_tokens` adds the document end itself.
        return np.array(self._loaded.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        decoded: str = self._loaded.decode([int(token) for token in tokens])
        return decoded


def open_tokenizer(file: str | None = None, end_of_document: str | None = None) -> Tokenizer:
    """Tokenizer in a tokenizer.json, or for bytes without a file. Raises ValueError as `FileTokenizer`."""
    if file is not None:
        return FileTokenizer(Path(file), end_of_document)
    if end_of_document is not None:
        raise ValueError("--end-of-document names a token of --tokenizer: the bytes have their own; leave it out")
    return ByteTokenizer()
