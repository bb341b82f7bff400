"""Dry run: one call of a layer on the meta device, before it has memory and values.

Finds output shapes, the largest known values, and mistakes that would otherwise show in training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from traceback import walk_tb

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from megasnn.common.bundle import Bundle, entries_of, shapes_text
from megasnn.layers import ParallelConv, ParallelLinear
from megasnn.layers.apply import apply_layer, forget_state
from megasnn.layers.facts import facts
from megasnn.layers.plain.by_channel import ChannelWatch, is_of_libraries
from megasnn.layers.shape_inference import BoundsInference, RefuseRandom, mark_both, said_of_values
from megasnn.layers.vocabulary import NextTokenLoss
from megasnn.models.description import DRY_SAMPLES

_LIBRARIES = (Path(__file__).parents[1], Path(torch.__file__).parent)


def dry_run(
    name: str,
    layer: nn.Module,
    inputs: Sequence[Bundle],
    watch: ChannelWatch | None = None,
    counted: list[int] | None = None,
) -> Bundle:
    """A layer's output in training, on the meta device. The layer learns its inputs' content.

    Args:
        watch: entered around each forward. Training and evaluation must then return equal shapes.
        counted: receives one sample's multiply-adds in training.
    Raises:
        ValueError: the named layer cannot take its inputs, changes them or a buffer, or returns no tensors.
    """
    for module in layer.modules():
        # True in a copy of a layer that was run before.
        facts(module).knows_input = False
    evaluated: Bundle | None = None
    try:
        # User code may take another branch in evaluation.
        if not is_of_libraries(layer):
            evaluated = _evaluated(layer, inputs, watch)
        layer.train()
        with nullcontext() if counted is None else _counting(layer, counted):
            output = _forward(layer, inputs, watch)
        if evaluated is not None:
            _join(output, evaluated, watch is not None)
    except Exception as error:
        raise ValueError(f"{name}, given {shapes_text(*inputs)}: {_explained(error, layer)}") from error
    return output


def _evaluated(layer: nn.Module, inputs: Sequence[Bundle], watch: ChannelWatch | None) -> Bundle | None:
    """Output in evaluation; None if it reads tensor values and no ChannelWatch is active."""
    layer.eval()
    try:
        with torch.no_grad():
            return _forward(layer, inputs, watch)
    except (RuntimeError, TypeError):
        # Evaluation may read values, which meta tensors lack. A layer that is whole on every rank is allowed to.
        if watch is not None:
            raise
        return None


def _forward(layer: nn.Module, inputs: Sequence[Bundle], watch: ChannelWatch | None) -> Bundle:
    for module in layer.modules():
        facts(module).begin_forward()
    versions = _versions(inputs)
    buffers = _buffers(layer)
    with BoundsInference(), RefuseRandom(), watch or nullcontext():
        output = apply_layer(layer, inputs[0], range(DRY_SAMPLES), *inputs[1:])
    for entry in entries_of(output).values():
        if entry.shape[1:2] != (DRY_SAMPLES,):
            raise ValueError(f"its output {list(entry.shape)} is not [T, N, ...] of {DRY_SAMPLES} samples")
    if _versions(inputs) != versions:
        raise ValueError("it changes its input in place, which other layers read too: let it work on a clone")
    for name, version in _buffers(layer).items():
        if buffers.get(name) != version:
            raise ValueError(f"it changes its buffer {name!r}, differently on each replica: let it keep no state")
    forget_state(layer)
    return output


def _join(output: Bundle, evaluated: Bundle, same_shapes: bool) -> None:
    """Marks training's output with evaluation's content. Raises ValueError for other entries or shapes."""
    trained = entries_of(output)
    others = entries_of(evaluated)
    if trained.keys() != others.keys() or (same_shapes and shapes_text(output) != shapes_text(evaluated)):
        text = f"{shapes_text(output)} in training, and {shapes_text(evaluated)} in evaluation"
        raise ValueError(f"it returns {text}: let it return the same in both")
    for key, entry in trained.items():
        mark_both(entry, others[key])


@contextmanager
def _counting(layer: nn.Module, found: list[int]) -> Iterator[None]:

    def add(module: ParallelConv | ParallelLinear, inputs: object, output: Tensor) -> None:
        found.append(output.numel() * module.weight[0].numel() // DRY_SAMPLES)

    def add_head(module: NextTokenLoss, inputs: tuple[Tensor, ...], output: object) -> None:
        # One product for each token: the mean over time is taken before it.
        _, samples, _, length = inputs[0].shape
        found.append(samples * length * module.weight.numel() // DRY_SAMPLES)

    # torch's counter sees plain code's operators. MegaSNN's layers only return shapes in a dry run, so hooks count
    # them.
    hooks = []
    for module in layer.modules():
        if isinstance(module, (ParallelConv, ParallelLinear)):
            hooks.append(module.register_forward_hook(add))
        elif isinstance(module, NextTokenLoss):
            hooks.append(module.register_forward_hook(add_head))
    try:
        with FlopCounterMode(display=False) as counter:
            yield
        # torch counts a multiply-add as two operations.
        found.append(counter.get_total_flops() // 2 // DRY_SAMPLES)
    finally:
        for hook in hooks:
            hook.remove()


def _buffers(layer: nn.Module) -> dict[str, tuple[int, int]]:
    """Identity and version by buffer outside MegaSNN's modules, which may change theirs."""
    found = {}
    for path, module in layer.named_modules():
        if type(module).__module__.startswith("megasnn."):
            continue
        for name, buffer in module.named_buffers(prefix=path, recurse=False):
            found[name] = (id(buffer), buffer._version)
    return found


def _versions(bundles: Sequence[Bundle]) -> list[int]:
    """By tensor, the number of changes in place."""
    versions = []
    for bundle in bundles:
        versions += [entry._version for entry in entries_of(bundle).values()]
    return versions


def _explained(error: Exception, layer: nn.Module) -> str:
    """Error text with the innermost failing module and user code's last line."""
    paths = {id(module): f"in {path}: " for path, module in layer.named_modules() if path}
    where = ""
    line = ""
    for frame, number in walk_tb(error.__traceback__):
        # The last frame wins: it is the innermost.
        where = paths.get(id(frame.f_locals.get("self")), where)
        file = Path(frame.f_code.co_filename)
        if not any(file.is_relative_to(folder) for folder in _LIBRARIES):
            line = f" ({file}, line {number})"
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return f"{where}{said_of_values(error) or f'{kind}{error}'}{line}"
