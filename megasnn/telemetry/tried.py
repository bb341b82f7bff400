"""What only reports never ends a run: it is tried, warned about once and tried again. Its files outlive a full disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


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


MOST_WAITING_BYTES = 64 << 20


class AppendedFile:
    """Records wait in memory until `flush`, which alone touches the disk, in the calling thread.

    Where it fails, the file ends with its last whole record, as before, and what waits is written by the next `flush`
    that succeeds.

    Args:
        head: what an empty file begins with.
        most_waiting_bytes: beyond these the oldest records that wait are dropped.

    Attributes:
        path: of the file.
    """

    def __init__(self, path: Path, head: bytes = b"", most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        self.path, self._head, self._most = path, head, most_waiting_bytes
        self._waiting, self._bytes = deque[bytes](), 0

    def add(self, record: bytes) -> None:
        self._waiting.append(record)
        self._bytes += len(record)
        while self._bytes > self._most and len(self._waiting) > 1:
            self._bytes -= len(self._waiting.popleft())

    def flush(self) -> None:
        """Writes what waits. Raises OSError when that is not possible now; then nothing of it is in the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab", buffering=0) as file:  # opened each time: it may have been removed
            end = file.tell()
            records = memoryview(b"".join(self._waiting if end else (self._head, *self._waiting)))
            try:
                while records:  # a disk takes its last bytes first, and then says that it is full
                    records = records[file.write(records) :]
            except OSError:
                file.truncate(end)
                raise
        self._waiting.clear()
        self._bytes = 0
