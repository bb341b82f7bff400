"""Command line of text: documents become an indexed data set of tokens for each split."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megasnn.data.preprocess.folders import describe_left_out, split_folders
from megasnn.data.preprocess.writing import new_folder
from megasnn.data.tokens.prepared import FACTS, write_facts, write_tokens
from megasnn.data.tokens.text import Documents, documents_of, text_files, texts_of_part
from megasnn.data.tokens.tokenizer import open_tokenizer


@dataclass(frozen=True, kw_only=True)
class Text:
    """Text files, JSON lines with a field "text", or a folder of them, also with train, val and test: as .bin and .idx
    of tokens, Megatron's indexed data sets."""

    input: Path
    """A file (.txt, .md, .rst, .jsonl) or a folder."""
    output: Path
    """Folder for train.bin, train.idx, train.json, and those of other splits; must not exist, or be empty."""
    tokenizer: str | None = None
    """A tokenizer.json; by default each byte is a token."""
    end_of_document: str | None = None
    """Token of --tokenizer behind each document; by default <|endoftext|>, </s> or the like, whichever it has."""
    valid_share: float = 0.0
    """Share of the text, from its end, that becomes val.bin and val.idx."""

    def __post_init__(self) -> None:
        if not 0 <= self.valid_share < 1:
            raise ValueError(f"--valid-share must be at least 0 and below 1, got {self.valid_share}")

    def run(self) -> str:
        """Writes the tokens; returns a summary. Raises ValueError for text that cannot be read or written."""
        tokenizer = open_tokenizer(self.tokenizer, self.end_of_document)
        files = self._files()
        splits = self._splits(files)
        lines = []
        with new_folder(self.output) as aside:
            for split, texts in splits.items():
                try:
                    facts = write_tokens(aside / split, texts(), tokenizer)
                except ValueError as error:
                    raise ValueError(f"--input {self.input}, {split}: {error}") from error
                write_facts(aside / f"{split}{FACTS}", facts)
                size = f"{facts.tokens:,} tokens of {facts.text_bytes:,} bytes"
                lines.append(f"{size}: {self.output / split}.bin, .idx and .json")
        lines.append(f"train with --vocab-size {tokenizer.vocab_size} or more")
        if self.input.is_dir():
            lines.append(describe_left_out(self.input, {file for each in files.values() for file in each}))
        return "\n".join(filter(None, lines))

    def _files(self) -> dict[str, list[Path]]:
        """Text files by split: all train, unless there is a folder `train`."""
        folders = split_folders(self.input) if self.input.is_dir() else {}
        if "train" not in folders:
            folders = {"train": self.input}
        return {split: text_files(folder) for split, folder in folders.items()}

    def _splits(self, files: dict[str, list[Path]]) -> dict[str, Documents]:
        found: dict[str, Documents] = {split: partial(documents_of, each) for split, each in files.items()}
        if not self.valid_share:
            return found
        if "val" in found:
            raise ValueError(f"--valid-share {self.valid_share:g}: {self.input} has texts for validation; leave it out")
        whole = found["train"]
        found["train"] = partial(texts_of_part, whole, self.valid_share, False)
        found["val"] = partial(texts_of_part, whole, self.valid_share, True)
        return found
