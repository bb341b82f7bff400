"""What only reports never ends a run: it is tried, warned about once, and tried again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Tried:
    """Contexts around everything that only reports: TensorBoard, pictures, files beside the run.

    An error in such a context goes no further. `tell` gets one warning when a thing begins to fail, and a line when it
    works again. Nothing in which ranks wait for each other may stand in such a context: a rank would be missed there.

    Args:
        tell: takes a line for the log.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._failing: set[str] = set()
        self._due: dict[str, Callable[[], object]] = {}

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """A context; `what` names the thing in the warning, such as "TensorBoard"."""
        try:
            yield
        except Exception as error:
            if what not in self._failing:
                self._failing.add(what)
                self._tell(
                    f"WARNING: {what} failed ({type(error).__name__}: {error}); training goes on, and it is tried again"
                )
        else:
            if what in self._failing:
                self._failing.discard(what)
                self._tell(f"{what} works again")

    def until_done(self, what: str, work: Callable[[], object]) -> None:
        """Runs `work`; where it fails, each `again` does so until it succeeds, and only that."""
        if what not in self._due:
            self._due[what] = work
            self._run(what)

    def again(self) -> None:
        """Tries what is still to be done."""
        for what in list(self._due):
            self._run(what)

    def _run(self, what: str) -> None:
        with self(what):
            self._due[what]()
            del self._due[what]
