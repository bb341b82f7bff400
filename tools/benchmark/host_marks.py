"""Marks at a step's parts, and a meter for each part's processor time and function calls."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

_OWN = str(Path(__file__).with_name("host_"))  # files whose frames are the benchmark's
_CALIBRATED = 2000  # sections

Label = tuple[str, bool]
"""Name of a part, and whether its backward is meant."""
Forward = Callable[[Any, Tensor], Tensor]


class Recorder(Protocol):
    """Attributes: label: the part at work."""

    label: Label

    def pause(self) -> None:
        """The benchmark's own work begins."""

    def enter(self, label: Label) -> None:
        """A part's work begins or continues."""


class Marks:
    """Tells a recorder where modules begin and end, in forward and backward.

    Backward enters a module with its output's gradient, and leaves it with its input's.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: list[tuple[Tensor, Label]] = []  # inputs of modules within each other, and what is behind them

    def marked(self, forward: Forward, name_of: Callable[[nn.Module], str]) -> Forward:
        """A forward for modules from one tensor to one. Args: name_of: returns the part's name."""
        recorder = self._recorder

        def marked(module: nn.Module, x: Tensor) -> Tensor:
            recorder.pause()
            outer, own = recorder.label, name_of(module)
            behind = (outer[0], True)
            if self._open and self._open[-1][0] is x:  # it comes first in the module around it
                behind = self._open[-1][1]
            if x.requires_grad:
                x.register_hook(lambda gradient: recorder.enter(behind))
            self._open.append((x, behind))
            recorder.enter((own, False))
            y = forward(module, x)
            recorder.pause()
            self._open.pop()
            if y.grad_fn is not None:
                # Behind the hooks of y, which may be the input of another module.
                y.grad_fn.register_prehook(lambda gradients: recorder.enter((own, True)))
            recorder.enter(outer)
            return y

        return marked

    def around(self, function: Callable[..., Any], label: Label) -> Callable[..., Any]:
        """A function that counts as a part's work."""
        recorder = self._recorder

        def around(*args: Any, **options: Any) -> Any:
            outer = recorder.label
            recorder.enter(label)
            result = function(*args, **options)
            recorder.enter(outer)
            return result

        return around


class Meter:
    """Each part's processor time, or with `counting` its function calls.

    Attributes:
        seconds: by part.
        own: the benchmark's seconds: marks and substitutes.
        calls, c_calls: by part: Python functions, and C functions that Python called.
        substituted: calls by kind of substitute.
    """

    def __init__(self, label: Label) -> None:
        self.label = label
        self.counting = False
        self.leak = 0.0  # seconds of a pause that its part is charged with
        self.reset()

    def reset(self) -> None:
        self.seconds: dict[Label, float] = defaultdict(float)
        self.calls: Counter[Label] = Counter()
        self.c_calls: Counter[Label] = Counter()
        self.substituted: Counter[str] = Counter()
        self.own = 0.0
        self._paused = True
        self._since = time.process_time()

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            now = time.process_time()
            self.seconds[self.label] += now - self._since - self.leak
            self.own += self.leak
            self._since = now

    def enter(self, label: Label) -> None:
        self.pause()
        self.label = label
        self._paused = False
        now = time.process_time()
        self.own += now - self._since
        self._since = now

    def calibrate(self) -> None:
        """Measures a pause's cost to its part: half of each look at the clock, and the call."""
        self.leak = 0.0
        self.reset()
        self.enter(self.label)
        for _ in range(_CALIBRATED):
            self.pause()
            self.enter(self.label)
        self.pause()
        self.leak = self.seconds[self.label] / _CALIBRATED
        self.reset()

    def count_calls(self, frame: Any, event: str, argument: Any) -> None:
        """For `sys.setprofile`."""
        if self._paused or frame.f_code.co_filename.startswith(_OWN):
            return
        if event == "call":
            self.calls[self.label] += 1
        elif event == "c_call":
            self.c_calls[self.label] += 1

    def measured(self, work: Callable[[], object]) -> None:
        """Runs `work` and adds to the figures."""
        sys.setprofile(self.count_calls if self.counting else None)
        self.enter(self.label)
        work()
        self.pause()
        sys.setprofile(None)
