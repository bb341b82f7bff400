"""Copies from the host's pageable memory to a GPU, for which the host waits: found on the CPU, by following what a step
makes in the host's memory.

On a GPU a tensor is on the host where it was made of values, made without a device, or computed from such tensors. It
reaches the device by `megasnn.host_memory` only. A tensor without dimensions may meet the device's: torch passes it as
a number.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from megasnn import host_memory
from megasnn.config import parse
from megasnn.config.training import Length
from megasnn.data import GlobalBatch
from megasnn.engine import Engine
from megasnn.kernels import layout
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from tests.host_waits import MODEL_FLAGS, TRAINING_FLAGS, host_waits, place_in_package
from tests.recorded_graphs import recorded_graphs

MAKERS = {
    *("tensor", "as_tensor", "arange", "linspace", "eye", "empty", "empty_strided", "zeros", "ones", "full"),
    *("rand", "randn", "randint", "randperm", "scalar_tensor"),
}
BY_PINNED_MEMORY = {host_memory.without_waiting.__code__}


class _Followed(TorchFunctionMode):
    def __init__(self, found: list[str], host: Iterable[Tensor]) -> None:
        super().__init__()
        self._found = found
        self._host = dict[int, Tensor]()  # by where its memory is, which is kept, that it is not another one's
        for tensor in host:
            self.note(tensor)

    def note(self, made: Any) -> Any:
        """What was made is on the host."""
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and (place := each.untyped_storage().data_ptr()):
                self._host[place] = each
        return made

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, options = getattr(function, "__name__", ""), kwargs or {}
        given = [each for each in tree_leaves((args, options)) if isinstance(each, Tensor)]
        on_host = [each for each in given if each.untyped_storage().data_ptr() in self._host]
        result = function(*args, **options)
        if not given:
            return self.note(result) if name in MAKERS and options.get("device") is None else result
        if not on_host:
            return result
        if _is_by_pinned_memory():
            return result.clone() if name == "to" else result  # another memory, as on a GPU
        moves = name == "cuda" or name == "to" and _names_a_device(args[1:], options)
        mixes = len(on_host) < len(given) and any(each.dim() for each in on_host)
        if moves or mixes:
            self._found.append(f"{place_in_package()}: {name}")
            return result.clone() if moves else result
        return self.note(result) if len(on_host) == len(given) else result


def _names_a_device(args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    return any(isinstance(each, str | torch.device) for each in (*args, *options.values()))


def _is_by_pinned_memory() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in BY_PINNED_MEMORY:
        frame = frame.f_back
    return frame is not None


@contextmanager
def pageable_copies(host: Iterable[Tensor] = ()) -> Iterator[list[str]]:
    """Inside, the list gets a line for each copy from pageable memory: where, and by what.

    Args:
        host: tensors that are the host's before.
    """
    found: list[str] = []
    mode = _Followed(found, host)
    from_numpy, frombuffer = torch.from_numpy, torch.frombuffer  # which no mode sees

    def noted(array: Any) -> Tensor:
        made = from_numpy(array)  # memory that kernels ask numpy for stands for the device's
        return made if sys._getframe(1).f_code is layout.empty.__code__ else mode.note(made)

    with (
        host_waits(),  # the operations of a device, and not the compiled loops
        mock.patch("torch.from_numpy", noted),
        mock.patch("torch.frombuffer", lambda *args, **options: mode.note(frombuffer(*args, **options))),
        mode,
    ):
        yield found


def copies_of_a_replayed_step(model: str) -> list[str]:
    """Of the second step of a model whose layers have CUDA graphs."""
    with recorded_graphs() as graphs:
        found = copies_of_a_step(model, "--cuda-graphs on")
    assert graphs.replays > 0
    return found


def copies_of_a_step(model: str, flags: str = "") -> list[str]:
    """Of the second step of a model, on this rank."""
    config = parse(
        run_config(MODELS[model]), f"{MODEL_FLAGS[model]} {TRAINING_FLAGS} --neuron-backend torch {flags}".split()
    )
    size = config.training.global_batch_size
    with (
        mock.patch.object(dist, "get_backend", lambda group=None: "another"),  # one operation gathers
        Engine(config, length=Length(config.training.train_iters or 0)) as engine,
    ):
        images = torch.rand(size, *config.model.input_shape, generator=torch.Generator().manual_seed(0))
        labels = torch.arange(size) % config.model.num_classes
        first, second = (engine.batches.share(images, labels, size, start) for start in (0, size))
        engine.train_on(first)
        with pageable_copies(_tensors_of(second)) as found:
            engine.train_on(second)
    return found


def _tensors_of(batch: GlobalBatch) -> list[Tensor]:
    return [each for micro in batch.micro_batches for each in (micro.images, micro.labels) if each is not None]
