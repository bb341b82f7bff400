"""The gradient norm counts every parameter once on any layout; clipping, weight decay, learning rates."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from megasnn.config.optimizer import OPTIMIZERS, OptimizerConfig
from megasnn.kernels import NeuronSpec
from megasnn.layers import BuildContext, ConvNormNeuron, Numerics, ParallelLinear
from megasnn.optim.build import build_optimizer, resident_state_bytes
from megasnn.optim.norms import GradientNorm
from megasnn.optim.rates import learning_rate, require_schedule
from megasnn.parallel.collectives import all_reduce_sum
from megasnn.parallel.sharding import ShardedTensor
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.pipeline.memory_forecast import optimizer_bytes
from tests.distributed.whole import build, nothing, random
from tests.parts import assemble, gradients


def _layers(inner: BuildContext) -> dict[str, nn.Module]:
    """Cut by column with blocks, cut by row, norms, a scalar and a bias that every rank holds whole."""

    def unit(style: str, blocks: int) -> ConvNormNeuron:
        neuron = NeuronSpec(kind="plif")
        return ConvNormNeuron(8, 24, 3, inner, padding=0, neuron=neuron, initialise=nothing, style=style, blocks=blocks)

    return {
        "stem": unit("column", 3),
        "block": unit("row", 1),
        "head": ParallelLinear(24, 5, inner, initialise=nothing),
    }


def _gradient(name: str, shape: tuple[int, ...]) -> Tensor:
    return random(*shape, seed=sum(map(ord, name)))


def _all_names() -> list[str]:
    tensors = build(_layers(BuildContext(numerics=Numerics(torch.float64))), {})
    return [e.name for e in tensors if e.is_parameter]


def _norm_and_clip(tensor: int, pipeline: int) -> tuple:
    state = initialize_model_parallel(tp=tensor, pp=pipeline)
    try:
        first, last = state.pp.rank == 0, state.pp.rank == pipeline - 1
        home = {"stem": first, "block": first if pipeline < 3 else state.pp.rank == 1, "head": last}
        own = BuildContext(state, Numerics(torch.float64, torch.float64))
        layers = {name: layer for name, layer in _layers(own).items() if home[name]}
        tensors = build(layers, {})
        frozen = [e for e in tensors if e.name == "stem.conv.weight"]
        for entry in tensors:
            if entry.is_parameter and entry not in frozen:
                entry.tensor.grad = entry.shard.cut(_gradient(entry.name, entry.shard.global_shape))
        norm = GradientNorm(_all_names(), tensors, state.device)

        def of_all() -> float:
            return math.sqrt(math.fsum(all_reduce_sum(norm.squares(), state.world).tolist()))

        value = of_all()
        norm.clip(value, 0.0)
        norm.clip(value, value * 1.01)
        norm.clip(float("nan"), 1.0)
        assert of_all() == value  # none clips
        norm.clip(value, 0.5)
        clipped = gradients(tensors)
        after = of_all()
        _poison(tensors, state.rank)
        return value, after, clipped, of_all()
    finally:
        destroy_model_parallel()


def _poison(tensors: list[ShardedTensor], rank: int) -> None:
    """One nan on the last rank that holds anything of the head."""
    for entry in tensors:
        if entry.name == "head.weight":
            entry.tensor.grad.view(-1)[-1] = float("nan") if rank else float("inf")


@pytest.mark.parametrize("tensor, pipeline, size", [(1, 1, 1), (2, 1, 4), (1, 3, 3), (2, 2, 4)])
def test_every_parameter_counts_once(ranks, tensor, pipeline, size) -> None:
    trained = [name for name in _all_names() if name != "stem.conv.weight"]
    whole = {e.name: e.shard.global_shape for e in build(_layers(BuildContext(numerics=Numerics(torch.float64))), {})}
    gradients = {name: _gradient(name, whole[name]) for name in trained}
    expected = torch.cat([g.flatten() for g in gradients.values()]).norm().item()
    scale = 0.5 / (expected + 1e-6)  # as torch and Megatron-LM clip
    everyone = ranks(size, _norm_and_clip, tensor, pipeline)
    for value, after, _, poisoned in everyone:
        assert value == pytest.approx(expected, rel=1e-12) and after == pytest.approx(expected * scale, rel=1e-12)
        assert value == everyone[0][0], "ranks must agree on it to the last bit"
        assert not math.isfinite(poisoned)
    clipped = assemble([held for _, _, held, _ in everyone])
    assert clipped.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(clipped[name], gradient * scale, rtol=1e-12, atol=1e-14)


def test_only_kernels_and_matrices_decay() -> None:
    tensors = build(_layers(BuildContext(numerics=Numerics(torch.float64))), {})
    tensors[0].tensor.requires_grad_(False)
    decayed, others = build_optimizer(tensors, OptimizerConfig(weight_decay=0.3)).param_groups
    names = {id(e.tensor): e.name for e in tensors}
    assert {names[id(p)] for p in decayed["params"]} == {"block.conv.weight", "head.weight"}
    kept = {f"{unit}.{name}" for unit in ("stem", "block") for name in ("norm.weight", "norm.bias", "neuron.w")}
    assert {names[id(p)] for p in others["params"]} == kept | {"head.bias"}
    assert decayed["weight_decay"] == 0.3 and others["weight_decay"] == 0.0


def rates(iterations: int, **options: object) -> list[float]:
    config = OptimizerConfig(**{"lr": 1.0, "min_lr": 0.2, **options})
    return [learning_rate(config, iteration, iterations) for iteration in range(iterations + 2)]


def test_learning_rates() -> None:
    constant = rates(10, lr_decay_style="constant", min_lr=0.0, lr_warmup_iters=4)
    assert constant == [0.25, 0.5, 0.75] + [1.0] * 9
    linear = rates(10, lr_decay_style="linear", lr_warmup_iters=2)
    assert linear == pytest.approx([0.5, 1.0, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2])
    cosine = rates(8, lr_decay_style="cosine")
    expected = [0.2 + 0.8 * (1 + math.cos(math.pi * min(i / 8, 1))) / 2 for i in range(10)]
    assert cosine == pytest.approx(expected) and cosine[0] == 1.0 and cosine[4] == pytest.approx(0.6)
    assert cosine[8] == cosine[9] == pytest.approx(0.2)
    assert all(a >= b for a, b in zip(cosine, cosine[1:], strict=False))
    everything_is_warm_up = rates(4, lr_decay_style="cosine", lr_warmup_iters=4)
    assert everything_is_warm_up[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates(1, lr_decay_style="linear")[0] == 1.0


def test_warm_up_and_cool_down_in_epochs() -> None:
    config = OptimizerConfig(lr=1.0, min_lr=0.2, lr_decay_style="linear", lr_warmup_epochs=1, lr_cooldown_epochs=2)
    found = [learning_rate(config, iteration, 10, Fraction(2)) for iteration in range(10)]
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2])
    slow = OptimizerConfig(lr=1.0, lr_warmup_epochs=2, lr_interval="epoch", lr_decay_style="constant")
    found = [learning_rate(slow, iteration, 6, Fraction(3, 2)) for iteration in range(6)]
    assert found == pytest.approx([0.5, 0.5, 1.0, 1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=r"--lr-cooldown-epochs 2\) take more than .* 5 iter.*--train-iters"):
        require_schedule(config, 5, Fraction(2))


@pytest.mark.parametrize(
    "config", [*map(OptimizerConfig, OPTIMIZERS), OptimizerConfig("sgd", sgd_momentum=0.0)], ids=str
)
def test_the_table_says_what_state_an_optimizer_keeps(config: OptimizerConfig) -> None:
    tensors = build(_layers(BuildContext(numerics=Numerics(torch.float64))), {})
    trained = [entry.tensor for entry in tensors if entry.is_parameter]
    built = build_optimizer(tensors, config)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    built.step()
    kept = {kind for state in built.state.values() for kind, value in state.items() if value is not None}
    assert kept == set(config.state_kinds)
    state, _ = optimizer_bytes([each.nbytes for each in trained], config)
    assert resident_state_bytes(built) == state
    build_optimizer([], config).step()  # a stage without layers
