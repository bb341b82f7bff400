"""CUDA graphs on tensors without values: a replay starts one thing, and what is taken down starts nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

from torch import Tensor

from megasnn.pipeline.graph_room import GraphRoom
from tests.fake_gpu import Counted

GRAPH = "graph"


class CountedGraphs:
    """A `megasnn.pipeline.capture.Capture`.

    Attributes:
        counted: by `fake_gpu`, where a replay is one of the launches outside of units.
    """

    counted: Counted

    def make_room(self) -> None:
        """Tensors without values need none."""

    def pool(self) -> None:
        """Tensors without values need none."""

    def __call__(self, work: Callable[[], None], pool: None) -> Callable[[], None]:
        before = self.counted.forward, self.counted.backward
        self.counted.forward, self.counted.backward = Counted().forward, Counted().backward
        work()
        self.counted.forward, self.counted.backward = before
        return self._replay

    def join(self) -> None:
        raise AssertionError("every capture succeeds")

    def _replay(self) -> None:
        self.counted.forward[GRAPH].launches[GRAPH] += 1


@contextmanager
def counted_graphs() -> Iterator[CountedGraphs]:
    """Inside, Engines get these; tensors without values have no address, but memory of their own."""
    graphs, held = CountedGraphs(), set[int]()

    def memory(x: Tensor) -> int:
        return x.untyped_storage()._cdata

    with (
        mock.patch("megasnn.engine.build.capture_on", lambda device: graphs),
        mock.patch.object(GraphRoom, "is_fixed", lambda self, x: memory(x) in held),
        mock.patch.object(GraphRoom, "fix", lambda self, x: held.add(memory(x))),
        mock.patch.object(
            GraphRoom,
            "places",
            lambda self, given: tuple(
                None if x is None else (x.stride(), memory(x) in held and memory(x)) for x in given
            ),
        ),
    ):
        yield graphs
