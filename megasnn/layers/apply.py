"""One call of a model's layer on a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from megasnn.common.bundle import Bundle, entries_of, map_entries, plain_bundle
from megasnn.layers.dropout import drawing_for
from megasnn.layers.facts import facts
from megasnn.layers.neuron import NeuronLayer
from megasnn.layers.plain_call import PlainCall
from megasnn.parallel_state import Group


def apply_layer(layer: nn.Module, x: Bundle, samples: range | None, *more: Bundle, goes_on: bool = False) -> Bundle:
    """Calls a model's layer on a micro-batch `[T, N, ...]`.

    Args:
        samples: positions in the whole training, for random draws; None in evaluation.
        goes_on: a later window of the last call's samples; keeps the state.
    """
    call = facts(layer).call
    if call is not None:
        return _apply_plain(layer, call, (x, *more), samples, goes_on)
    with drawing_for(samples):
        y: Bundle = layer(x, *more)
    return y if isinstance(y, Tensor) else plain_bundle(y)


def _apply_plain(
    layer: nn.Module, call: PlainCall, bundles: Sequence[Bundle], samples: range | None, goes_on: bool
) -> Bundle:
    # An input with a single time step stands for all of them.
    first = next(iter(entries_of(bundles[0]).values()))
    steps = call.time_steps if len(first) == 1 else len(first)
    frames = (steps, *first.shape[1:2])
    for each in layer.modules():
        if is_stateful(each) and goes_on:
            # A later window goes on with the same samples' state, without its graph.
            each.detach()  # type: ignore[operator]
        elif is_stateful(each):
            each.reset()  # type: ignore[operator]
    # One entry of `cuts` for each tensor of the inputs, in order.
    cuts = iter(call.cuts)
    inputs = [map_entries(lambda entry: call.prepare_input(entry, next(cuts, False)), each) for each in bundles]
    with drawing_for(samples, frames):
        output = plain_bundle(layer(*inputs))
    return map_entries(lambda y: call.restore_output(y, frames), output)


def is_stateful(module: nn.Module) -> bool:
    """Whether a foreign module keeps state between calls, such as SpikingJelly's neurons."""
    return callable(getattr(module, "reset", None)) and not isinstance(module, NeuronLayer)


def forget_state(layer: nn.Module) -> None:
    for module in layer.modules():
        if is_stateful(module):
            module.reset()  # type: ignore[operator]


def make_whole(layer: nn.Module, group: Group, cuts: Sequence[bool], is_last: bool) -> None:
    """Makes a group compute a layer built for one rank. Args: see `PlainCall`."""
    found = facts(layer)
    found.call = replace(found.call or PlainCall(), group=group, cuts=cuts, is_last=is_last)
