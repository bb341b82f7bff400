"""Error context, and checks of values on a device that are read with the step's loss.

Inside `DeviceChecks.collecting` a finding ends the step, with weights and state unchanged. Outside, it raises.
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
"""Puts words around an error message."""


def runs_ahead(device: torch.device) -> bool:
    return device.type == "cuda"


@dataclass(frozen=True)
class Finding:
    """A failed check: a sentence, and the work that was checked."""

    text: str
    context: str


class DeviceChecks:
    """A step's findings on this rank. The words of `words` are put around each message, the last first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.words: list[explained] = []
        self._certain: list[Finding] = []
        self._open: list[tuple[Tensor, Callable[[], Finding]]] = []  # findings if the tensor is not 0

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collects findings inside, and drops earlier ones."""
        self.words = []
        self._certain = []
        self._open = []
        token = _collecting.set(self)
        try:
            yield
        finally:
            _collecting.reset(token)

    def count(self) -> Tensor:
        """Number of findings, float64 `[1]`, on the device. No wait."""
        found = torch.full((1,), float(len(self._certain)), dtype=torch.float64, device=self._device)
        if self._open:
            found += self._flags().ne(0).sum()
        return found

    def findings(self) -> list[Finding]:
        """All findings. Waits for the device."""
        flags = self._flags().tolist() if self._open else []
        return self._certain + [describe() for (_, describe), flag in zip(self._open, flags, strict=True) if flag]

    def note(self, wrong: Tensor | bool, complaint: str) -> None:
        # Described only if it is wrong, which is known at the step's end.
        words = [each.words for each in self.words]
        context = _context.get()
        describe = partial(_described, complaint, words, str if context is None else context.describe)
        if isinstance(wrong, Tensor):
            self._open.append((wrong.reshape(1), describe))
        elif wrong:
            self._certain.append(describe())

    def noted(self) -> list[tuple[Tensor, str]]:
        """Tensors that must be 0, with messages. Raises ValueError for a certain finding."""
        if self._certain:
            raise ValueError(self._certain[0].text)
        return [(flag, describe().text) for flag, describe in self._open]

    def _flags(self) -> Tensor:
        return torch.cat([flag for flag, _ in self._open])


def _described(complaint: str, words: list[Words], context: Callable[[], str]) -> Finding:
    for each in reversed(words):
        complaint = each(complaint)
    return Finding(complaint, context())


_collecting: ContextVar[DeviceChecks | None] = ContextVar("DeviceChecks", default=None)


def check_value(wrong: Tensor | bool, complaint: str, seen: Callable[[], str] | None = None) -> None:
    """Raises ValueError for a wrong value (True or not 0), or notes it for the step's end.

    Args:
        complaint: the expectation, without values.
        seen: text with values, used if the host has them.
    """
    checks = _collecting.get()
    if checks is not None and isinstance(wrong, Tensor) and runs_ahead(wrong.device):
        # Reading the value would make the host wait for the GPU.
        checks.note(wrong, complaint)
    elif wrong:
        if seen is not None:
            complaint = f"{complaint}, {seen()}"
        if checks is None:
            raise ValueError(complaint)
        checks.note(True, complaint)


# Other notes, such as a data worker's traceback, belong to the error.
class _ContextNote(str):
    """Note with an error's context."""


@dataclass
class ErrorContext:
    """Context of errors and findings in a block.

    Attributes:
        describe: returns its words; may be replaced inside, for later errors and findings.
    """

    describe: Callable[[], str]


_context: ContextVar[ErrorContext | None] = ContextVar("context", default=None)


@contextmanager
def error_context(where: str | Callable[[], str]) -> Iterator[ErrorContext]:
    """Names the context of errors and findings inside the block or function."""
    context = ErrorContext(partial(str, where) if isinstance(where, str) else where)
    token = _context.set(context)
    try:
        yield context
    except Exception as error:
        error.add_note(_ContextNote(context.describe()))
        raise
    finally:
        _context.reset(token)


def context_of_error(error: BaseException) -> str:
    """Innermost first; "" if unknown."""
    return ", ".join(note for note in getattr(error, "__notes__", []) if isinstance(note, _ContextNote))


def other_notes(error: BaseException) -> list[str]:
    return [note for note in getattr(error, "__notes__", []) if not isinstance(note, _ContextNote)]


class explained:
    """Puts words around errors inside, the innermost first. May be entered again and again.

    Attributes:
        words: may be replaced inside, for later errors and findings.
    """

    # A class, because blocks of every layer enter one: a generator takes twice the calls.

    def __init__(self, words: Words) -> None:
        self.words = words

    def __enter__(self) -> None:
        checks = _collecting.get()
        if checks is not None:
            checks.words.append(self)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        checks = _collecting.get()
        if checks is not None:
            checks.words.pop()
        if isinstance(error, ValueError):
            raise ValueError(self.words(str(error))) from error
