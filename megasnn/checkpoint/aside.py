"""How a checkpoint is written beside training: from a snapshot, by a process that does not share the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from megasnn.checkpoint.complete import Content, file_name
from megasnn.checkpoint.description import BESIDE
from megasnn.checkpoint.saving import Group, agree, written_here
from megasnn.checkpoint.snapshot import Snapshot
from megasnn.comm.agreement import gather, is_first, rank_in
from megasnn.sharded_tensors import ShardedTensor

P = ParamSpec("P")
T = TypeVar("T")


class Aside:
    """`megasnn.checkpoint.saving.Writing` beside training.

    What holds the interpreter delays training, so that is kept short: the process computes checksums, writes and
    describes, and what the files hold is agreed on again only when the tensors have changed.
    """

    def __init__(self, process_group: Group) -> None:
        self._group = process_group
        self._snapshot = Snapshot()
        self._entries: Sequence[ShardedTensor] = ()
        self._agreed_on: object = None
        self._content = Content((), b"")
        self.settle, self.wait, self.close = self._snapshot.settle, self._snapshot.wait, self._snapshot.close

    def prepare(self, entries: Sequence[ShardedTensor]) -> None:
        """Gets ready for saves of these tensors."""
        if (mine := written_here(entries)) or is_first(self._group):
            self._snapshot.prepare(mine)

    def take(self, entries: Sequence[ShardedTensor]) -> None:
        """Copies what a forward pass can change; the rest is copied when `settle` returns."""
        self._entries = entries
        if (mine := written_here(entries)) or is_first(self._group):
            self._snapshot.take(mine, _stays_until_update)

    def agree(self) -> Content:
        image = self._snapshot.image
        tensors = None if image is None else image.kinds
        if any(gather(self._group, tensors is not self._agreed_on)):
            self._content = agree(self._entries, self._group)
            self._agreed_on = tensors
        return self._content

    def write(self, aside: Path) -> list[str]:
        image = self._snapshot.image
        if image is None or not image.spans:
            return []
        return image.writer.write(aside / file_name(rank_in(self._group)), image.spans)

    def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        image = self._snapshot.image
        assert image is not None  # the first rank always has one
        return image.writer.call(function, *arguments, **named)


def _stays_until_update(entry: ShardedTensor) -> bool:
    """Running statistics do not: the forward pass changes them."""
    return entry.is_parameter or entry.name.startswith(BESIDE)
