"""Where a value that is not finite appeared first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class NonFinite:
    """A tensor with values that are not finite: how many nan and how many infinite among `total`."""

    name: str
    nan: int
    infinite: int
    total: int

    def __str__(self) -> str:
        return f"{self.name}: {self.nan} nan and {self.infinite} infinite of {self.total} values"


def first_non_finite(named: Iterable[tuple[str, Tensor]]) -> NonFinite | None:
    """The first of the named tensors that holds nan or an infinity; None when all are finite."""
    for name, tensor in named:
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
            continue
        nan = int(torch.isnan(tensor).sum())
        infinite = int(torch.isinf(tensor).sum())
        return NonFinite(name, nan, infinite, tensor.numel())
    return None


class NonFiniteWatch:
    """Checks the output of every watched module inside its `with` statement; `found` is the first bad one.

    Each check waits for the device, so this is for a second run of a forward pass whose loss was not finite.
    A neuron hides nan, since nan reaches no threshold: watch what comes before the neurons too.

    Args:
        modules: (name, module) pairs, such as those of `nn.Module.named_modules`.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.found: NonFinite | None = None
        self._modules = list(modules)
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> NonFiniteWatch:
        for name, module in self._modules:
            self._hooks.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _hook(self, name: str) -> Any:
        def check(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.found is None:
                self.found = first_non_finite((name, tensor) for tensor in _tensors(output))

        return check


def earliest(
    found: NonFinite | None, stage: int | tuple[int, int], group: dist.ProcessGroup | None
) -> NonFinite | None:
    """The finding of the lowest stage over all ranks of `group`, the same on every rank.

    A collective over `group`; None is a group of this rank alone.

    Args:
        stage: the chunk of the pipeline in which `found` appeared, or the place within it too.
    """
    if group is None:
        return found
    findings: list[tuple[Any, NonFinite | None]] = [(stage, None)] * group.size()
    dist.all_gather_object(findings, (stage, found), group=group)
    bad = [(place, finding) for place, finding in findings if finding is not None]
    return min(bad, key=lambda pair: pair[0])[1] if bad else None


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of a module's output: a tensor, or tuples, lists and mappings of them."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, tuple | list):
        for value in output:
            yield from _tensors(value)
