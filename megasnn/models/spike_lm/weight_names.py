"""SpikeLM's tensor names in the files that SpikingJelly exports from its benchmark.

`export_sglang` in benchmark/snn_llm/spikelm.py, commit eb3aec54 of github.com/fangwei123456/spikingjelly. Megatron Core
has q, k and v of one head after the other; the export has three blocks, as here. Its neurons always have amplitudes
for each time step, and a tied model's file has the output layer beside the embedding, with the same values.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import partial

from torch import Tensor

from megasnn.common.files import CheckpointError
from megasnn.models.weight_names import Dialect, Made, ModelValues, NameMap

_TITLE = "SpikingJelly's SpikeLM"
_AFFINE = ("weight", "bias")

# Ours are convolutions of one pixel, [out, in, 1].
_PRODUCTS = tuple(f"{module}.weight" for module in ("qkv", "projection", "fc1", "fc2"))

# Our module in a block -> theirs, and its tensors.
_IN_BLOCK = {
    "attention.norm": ("attn_norm.norm", _AFFINE),
    "attention.neuron": ("attn_norm", ("amplitude",)),
    "attention.qkv": ("attn.qkv", _AFFINE),
    "attention.projection": ("attn.proj", _AFFINE),
    "mlp.norm": ("mlp_norm.norm", _AFFINE),
    "mlp.neuron": ("mlp_norm", ("amplitude",)),
    "mlp.fc1": ("mlp.fc1", _AFFINE),
    "mlp.fc2": ("mlp.fc2", _AFFINE),
}
_OUTSIDE = {
    "embedding.weight": "model.embedding.weight",
    "norm.weight": "model.final_norm.weight",
    "norm.bias": "model.final_norm.bias",
    "head.weight": "lm_head.weight",
}
_TIES = {"head.weight": "embedding.weight"}


def _pairs(names: Collection[str], blocks: str) -> dict[str, str]:
    """Our tensor -> theirs, for as many blocks as `names` have with the prefix `blocks`."""
    pairs = dict(_OUTSIDE)
    numbers = {match[1] for name in names if (match := re.match(rf"{re.escape(blocks)}\.(\d+)\.", name))}
    # The number of blocks, because a foreign file may contain any numbers.
    for block in range(len(numbers)):
        for ours, (theirs, tensors) in _IN_BLOCK.items():
            for tensor in tensors:
                pairs[f"blocks.{block}.{ours}.{tensor}"] = f"model.layers.{block}.{theirs}.{tensor}"
    return pairs


def _incoming(names: Collection[str]) -> NameMap:
    recipe = {}
    for ours, theirs in _pairs(names, "model.layers").items():
        # A program that writes a shared tensor once leaves it out.
        if ours in _TIES and theirs not in names:
            continue
        recipe[ours] = Made((theirs,), _with_pixel if ours.endswith(_PRODUCTS) else None)
    return recipe


def _with_pixel(weight: Tensor) -> Tensor:
    return weight.unsqueeze(-1)


def _outgoing(names: Collection[str], model: ModelValues | None) -> NameMap:
    pairs = _pairs(names, "blocks")
    has_amplitudes = any(name.endswith(".amplitude") for name in names)
    if not has_amplitudes and (model is None or model.get("neuron") != "bispike"):
        raise CheckpointError(
            f"{_TITLE} has amplitudes of each time step: give a checkpoint of --neuron bispike, whose configuration or "
            "tensors have them"
        )
    recipe = {}
    for ours, theirs in pairs.items():
        if ours.endswith(".amplitude") and not has_amplitudes:
            assert model is not None
            # A fixed amplitude is no tensor here. Any tensor of the block gives the type.
            like = ours.replace("neuron.amplitude", "norm.weight")
            recipe[theirs] = Made((like,), partial(_fixed_amplitudes, model["time_steps"], model["v_threshold"]))
            continue
        source = ours
        if ours not in names:
            source = _TIES.get(ours, ours)
        recipe[theirs] = Made((source,), _without_pixel if ours.endswith(_PRODUCTS) else None)
    return recipe


def _fixed_amplitudes(time_steps: int, amplitude: float, like: Tensor) -> Tensor:
    return like.new_full((time_steps,), amplitude)


def _without_pixel(weight: Tensor) -> Tensor:
    return weight.squeeze(-1)


SPIKINGJELLY = Dialect(
    name="spikingjelly",
    title=_TITLE,
    marker="model.layers.0.attn_norm.amplitude",
    incoming=_incoming,
    outgoing=_outgoing,
    ties=_TIES,
)

DIALECTS = (SPIKINGJELLY,)
