"""A language model's samples: fixed numbers of tokens, over document borders."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megasnn.augment import SampleKey
from megasnn.config.data import CHANGES, SAMPLE, DataConfig
from megasnn.data.arrays import ArrayFile
from megasnn.data.datasets import Datasets
from megasnn.data.map_dataset import ValueFormat
from megasnn.data.samples import SampleSource
from megasnn.data.tokens.prepared import PreparedTokens, is_text, open_tokens
from megasnn.data.tokens.tokenizer import open_tokenizer
from megasnn.telemetry.records import TextUnits

TOKENS = "tokens"
"""Input name by which a model says that it takes tokens."""
TARGET = "target"
"""Name for the next tokens in a sample."""


class TokenShape(NamedTuple):
    """Tokens in a sample, S, and the model's vocabulary, which all tokens are below."""

    length: int
    below: int


class TokenDataset(SampleSource):
    """Sample n: tokens n·S to (n+1)·S, and as target the tokens behind each of them, both int64 `[S]`.

    Every token but the first is a target once in an epoch. Tokens at the end that fill no sample are left out.

    Raises:
        ValueError: fewer than S + 1 tokens, or a token outside the model's vocabulary.
    """

    def __init__(self, prepared: PreparedTokens, shape: TokenShape) -> None:
        length, below = shape
        arrays = (ArrayFile(TOKENS, "", (length,), "int", below), ArrayFile(TARGET, "", (length,), "int", below))
        self.format: ValueFormat = ValueFormat(arrays, (TOKENS,), TARGET)
        self._tokens = prepared.tokens
        self._source = prepared.source
        self._length = length
        self._below = below
        if len(self._tokens) <= length:
            raise ValueError(
                f"{prepared.source} has {len(self._tokens):,} tokens, and one sample is {length:,} and the next one "
                "(--seq-length): give more text, or a smaller --seq-length"
            )
        self._require_vocabulary(prepared)

    def _require_vocabulary(self, prepared: PreparedTokens) -> None:
        lowest, highest = prepared.token_range
        if lowest < 0:
            raise ValueError(f"{self._source} has the token {lowest}, and tokens are numbers from 0 on; write it anew")
        # Other texts of the same tokenizer may have its other tokens.
        needed = highest + 1
        found = f"has the token {highest}"
        if prepared.facts is not None:
            needed = prepared.facts.vocab_size
            found = f"comes from a tokenizer of {needed:,} tokens"
        if needed > self._below:
            raise ValueError(
                f"{self._source} {found}, and the model takes tokens below {self._below:,}: raise --vocab-size to "
                f"{needed}"
            )

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def sample(self, index: int, key: SampleKey | None = None) -> dict[str, NDArray[np.int64]]:
        """Tokens and next tokens by name. Raises ValueError if the file has changed."""
        try:
            found = self._tokens.read(index * self._length, self._length + 1)
        except OSError as error:
            raise ValueError(f"sample {index} of {self._source} cannot be read: {error}; restart the run") from error
        # The file of facts may be of other tokens than the file beside it.
        if found.min() < 0 or found.max() >= self._below:
            raise ValueError(
                f"sample {index} of {self._source} has tokens {found.min()} to {found.max()}, outside 0 to "
                f"{self._below - 1} (--vocab-size); prepare the text again"
            )
        return {TOKENS: found[:-1], TARGET: found[1:]}

    def fingerprint(self) -> str:
        # Not from the tokens: a hash over them would read the whole file before the first step.
        return f"{len(self)} samples of {self._length} tokens, from {self._tokens.identity}"


def require_token_flags(config: DataConfig) -> None:
    """Raises ValueError for flags that have no effect on tokens."""
    if flags := config.changed("augment", "split_by", "max_sample_mb", *CHANGES):
        raise ValueError(f"{', '.join(flags)}: for images and recordings, and the model takes tokens; remove it")
    paths = [config.data_path, config.valid_data_path or config.data_path]
    if config.tokenizer is not None and not any(map(is_text, paths)):
        raise ValueError(f"--tokenizer {config.tokenizer}: the data are tokens already; remove it")


def open_token_datasets(config: DataConfig, shape: TokenShape, evaluates: bool = False) -> Datasets:
    """Opens ``--data-path`` and ``--valid-data-path`` as tokens, and checks them.

    Args:
        evaluates: with --evaluate-only, which opens no training data if there are others.
    Raises:
        ValueError: a file is missing, damaged or too short, or does not fit the model or the other one.
    """
    require_token_flags(config)
    tokenizer = open_tokenizer(config.tokenizer)
    # The sample text has a part for validation.
    valid_path = config.valid_data_path or (SAMPLE if config.data_path == SAMPLE else None)
    found: dict[str, PreparedTokens] = {}
    if not (evaluates and config.valid_data_path):
        found["train"] = open_tokens(config.data_path, "--data-path", tokenizer)
    if valid_path:
        found["valid"] = open_tokens(valid_path, "--valid-data-path", tokenizer, is_held_out=True)
    made_by = _tokenizer_of(list(found.values()))
    datasets = {name: TokenDataset(each, shape) for name, each in found.items()}
    units = {name: TextUnits(shape.length, each.bytes_per_token) for name, each in found.items()}
    train = "train" if "train" in found else "valid"
    warnings = []
    if len(found) == 2 and datasets["train"].fingerprint() == datasets["valid"].fingerprint():
        warnings.append("WARNING: --data-path and --valid-data-path hold the same documents")
    valid = datasets.get("valid")
    return Datasets(datasets[train], valid, (), tuple(warnings), units[train], units.get("valid"), made_by)


def _tokenizer_of(found: list[PreparedTokens]) -> str | None:
    """The data's tokenizer by identity; None if unknown. Raises ValueError for two."""
    known = {each.facts.tokenizer: each.source for each in found if each.facts is not None}
    if len(known) > 1:
        texts = " and ".join(f"{source} comes from {tokenizer}" for tokenizer, source in known.items())
        raise ValueError(f"{texts}: prepare both with one tokenizer")
    return next(iter(known), None)
