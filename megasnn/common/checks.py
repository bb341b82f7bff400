"""Places of errors, and checks of values that lie on a device, which are read with the loss of the step.

A host that looked at every one of them would wait for a GPU each time. So inside `DeviceChecks.collecting` it goes on
with values that may be wrong, and the step ends in an error where something was found: it must not have changed
anything that stays. Outside, a finding raises at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

Words = Callable[[str], str]


def runs_ahead(device: torch.device) -> bool:
    """True where the host goes on while a device computes, and would have to wait to see a value."""
    return device.type == "cuda"


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        text: a sentence. context: of the work in which it was found.
    """

    text: str
    context: str


class DeviceChecks:
    """Findings of the checks of a step, on this rank.

    Args:
        device: where the step computes.
    Attributes:
        words: of what is found now; see `explained`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.words: list[Words] = []  # the outermost first
        self._certain: list[Finding] = []
        self._open: list[tuple[Tensor, Finding]] = []  # found, where the tensor is not 0

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collects within the block in place of raising; earlier findings are dropped."""
        self.words, self._certain, self._open = [], [], []
        token = _collecting.set(self)
        try:
            yield
        finally:
            _collecting.reset(token)

    def count(self) -> Tensor:
        """Number of findings: float64 `[1]` on the device. Nothing waits for it."""
        found = torch.full((1,), float(len(self._certain)), dtype=torch.float64, device=self._device)
        if self._open:
            found += self._flags().ne(0).sum()
        return found

    def findings(self) -> list[Finding]:
        """Findings so far; waits for the device."""
        flags = self._flags().tolist() if self._open else []
        return self._certain + [finding for (_, finding), flag in zip(self._open, flags, strict=True) if flag]

    def note(self, wrong: Tensor | bool, complaint: str) -> None:
        """Keeps a finding, or of a tensor, what is one where the tensor is not 0."""
        for words in reversed(self.words):
            complaint = words(complaint)
        finding = Finding(complaint, _context.get()())
        if isinstance(wrong, Tensor):
            self._open.append((wrong.reshape(1), finding))
        elif wrong:
            self._certain.append(finding)

    def noted(self) -> list[tuple[Tensor, str]]:
        """Notes a tensor that must be 0, and a sentence for where not. Raises ValueError for what is certain."""
        if self._certain:
            raise ValueError(self._certain[0].text)
        return [(flag, finding.text) for flag, finding in self._open]

    def _flags(self) -> Tensor:
        return torch.cat([flag for flag, _ in self._open])


_collecting: ContextVar[DeviceChecks | None] = ContextVar("DeviceChecks", default=None)


def check_value(wrong: Tensor | bool, complaint: str, seen: Callable[[], str] | None = None) -> None:
    """Raises ValueError where something is wrong, or notes it for the end of the step.

    Args:
        wrong: a single value, not 0 or true where it is.
        complaint: what is expected, without values: nobody waits for them on a device.
        seen: with values, told where the host has them.
    """
    checks = _collecting.get()
    if checks is not None and isinstance(wrong, Tensor) and runs_ahead(wrong.device):
        checks.note(wrong, complaint)
    elif wrong:
        complaint = complaint if seen is None else f"{complaint}, {seen()}"
        if checks is None:
            raise ValueError(complaint)
        checks.note(True, complaint)


class _ErrorContext(str):
    """A note that says where an error arose. Other notes, such as a data worker's traceback, belong to the error."""


_context: ContextVar[Callable[[], str]] = ContextVar("context", default=str)


@contextmanager
def error_context(where: str | Callable[[], str]) -> Iterator[None]:
    """Gives this place to errors that leave the block, or the function that this decorates, and to findings within."""
    context = partial(str, where) if isinstance(where, str) else where
    token = _context.set(context)
    try:
        yield
    except Exception as error:
        error.add_note(_ErrorContext(context()))
        raise
    finally:
        _context.reset(token)


def context_of_error(error: BaseException) -> str:
    """Place of an error, the innermost first; "" where it is not known."""
    return ", ".join(note for note in getattr(error, "__notes__", []) if isinstance(note, _ErrorContext))


def other_notes(error: BaseException) -> list[str]:
    """Notes on an error that are no places."""
    return [note for note in getattr(error, "__notes__", []) if not isinstance(note, _ErrorContext)]


@contextmanager
def explained(words: Words) -> Iterator[None]:
    """Puts these words around errors within the block, raised or noted for the end of the step."""
    checks = _collecting.get()
    if checks is not None:
        checks.words.append(words)
    try:
        yield
    except ValueError as error:
        raise ValueError(words(str(error))) from error
    finally:
        if checks is not None:
            checks.words.pop()
