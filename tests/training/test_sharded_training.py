"""Replicas that own rows of the optimizer's state or of the weights train alike, and one that differs is found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from megasnn.checkpoint.folder import list_checkpoints
from megasnn.config import parse
from megasnn.config.training import Length
from megasnn.data import RankBatch
from megasnn.engine import Engine
from megasnn.kernels.layout import flat_in_memory
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.optim.build import resident_state_bytes
from megasnn.parallel import fsdp, zero
from megasnn.parallel.collectives import Exchange, start_exchange
from megasnn.parallel.fsdp import FlatParameter, GatheredWeights
from megasnn.parallel.replica_check import ReplicaError
from megasnn.parallel.traffic import traffic
from megasnn.parallel_state import Group
from megasnn.schedule import Kind
from megasnn.schedule.costs import resident_weights
from megasnn.schedule.named import SCHEDULES
from megasnn.telemetry.records import StepResult
from tests.training.runs import TINY, train

SHARDED = "--use-distributed-optimizer"
BY_TWO = ("--weight-parallel-size", "2")
BY_FOUR = ("--weight-parallel-size", "4")
SCATTERED = ("--weight-gradients", "scattered")
THREE = "--train-iters 3 --clip-grad 0.05 --eval-iters 0 --micro-batch-size 2 --global-batch-size 8".split()


def engine(*flags: str) -> Engine:
    return Engine(parse(run_config(MODELS["spikformer"]), [*TINY, *THREE, *flags]), length=Length(3))


def step(made: Engine) -> Any:
    images = torch.rand(8, *made.config.model.input_shape, generator=torch.Generator().manual_seed(0))
    return made.train_step(images, torch.arange(8) % 10)


def state_accounts() -> tuple[int, int, int, int, int]:
    """Bytes that the second step has received, of all trained parameters, of this rank's state; at most of the state by
    rows; and of all state on one rank."""
    with engine("--neuron", "plif", SHARDED) as made:
        step(made)
        received = []

        def noted(outgoing: Tensor, to_ranks: list[int], from_ranks: list[int], group: Group) -> Exchange:
            received.append(outgoing.itemsize * (sum(from_ranks) - from_ranks[group.rank]))
            return start_exchange(outgoing, to_ranks, from_ranks, group)

        with mock.patch.object(zero, "start_exchange", noted):
            step(made)
        parameters = [e.tensor for e in made.distributed.tensors if e.is_parameter]
        most = 0
        for parameter in parameters:
            rows = len(parameter) if parameter.ndim else 1
            most += 2 * (parameter.nbytes // made.state.dp.size + parameter.nbytes // rows) + 4
        size = 4 * made.distributed.trained_parameters
        return sum(received), size, resident_state_bytes(made.trainer.optimizer), most, 2 * size + 4 * len(parameters)


def test_what_a_step_receives_and_a_rank_holds_of_the_optimizers_state(ranks) -> None:
    found = ranks(3, state_accounts)
    assert sum(received for received, *_ in found) == 2 * 2 * found[0][1]
    for _, _, held, most, all_state in found:
        assert held <= most < all_state


# --- weights by rows


def weight_accounts(*flags: str) -> dict[str, float]:
    """Bytes of this rank: received in a step's gathers, and as the schedule plans them; rows of weights kept, and what
    of them is allowed; of gathered weights the most at once, what may be, and what is left behind the step."""
    pieces, live = list[FlatParameter](), [0]
    wait_unshard = GatheredWeights.wait_unshard

    class Listed(FlatParameter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pieces.append(self)

    def watched(self: GatheredWeights, segment: int) -> None:
        wait_unshard(self, segment)
        live.append(sum(piece.values[0].untyped_storage().nbytes() for piece in pieces))

    exact = mock.patch.object(fsdp, "aligned", int)  # no bytes that nobody sends
    with exact, mock.patch.object(fsdp, "FlatParameter", Listed), engine("--neuron", "plif", *flags) as made:
        distributed, weights = made.distributed, made.plan.schedules.weights
        step(made)
        traffic.reset()
        with traffic.counting(), mock.patch.object(GatheredWeights, "wait_unshard", watched):
            step(made)
        gathered = traffic.by_group["dp_shard"].bytes
        traffic.reset()
        schedule = made.plan.schedules.training(4 // made.state.dp.size)
        of_layers = [each for chunk in distributed.chunks.values() for each in chunk.parameters()]
        kept = [e.tensor for e in distributed.tensors if e.is_parameter]
        shares = made.state.dp_shard.size
        assert weights is not None
        gathers = [action.segment for action in schedule.actions[0] if action.kind is Kind.UNSHARD]
        return dict(
            gathered=gathered,
            planned=sum(weights.segment_bytes[segment] for segment in gathers),
            parameters=4 * distributed.parameters,
            kept=sum(each.nbytes for each in kept),
            allowed=sum(each.nbytes / shares + each.nbytes / (len(each) if each.ndim else 1) for each in of_layers),
            live=max(live),
            left=sum(each.untyped_storage().nbytes() for each in of_layers),
            limit=max(resident_weights(schedule, made.state.pp.rank, weights.segment_bytes)),
        )


@pytest.mark.parametrize(
    ("size", "flags"),
    [(4, (*BY_TWO, SHARDED)), (4, (*BY_FOUR, *SCATTERED)), (2, (*BY_TWO, "--precision", "bf16"))],
    ids=["sharded", "scattered", "bf16"],
)
def test_what_a_step_receives_and_a_rank_holds_of_the_weights(ranks, size: int, flags: tuple[str, ...]) -> None:
    """Gathers receive what the schedule says: of a segment, each rank the rows of the others."""
    found, shared = ranks(size, weight_accounts, *flags), int(flags[1])
    times = size // shared * (shared - 1)
    assert sum(each["gathered"] for each in found) == times * found[0]["planned"]
    for each in found:
        assert each["kept"] <= each["allowed"] < each["parameters"]
        assert 0 < each["live"] <= each["limit"] < each["parameters"] and not each["left"]


def losses_and_gathered(*flags: str) -> tuple[list[float], int]:
    """Of two steps, and the bytes that this rank received in their gathers."""
    traffic.reset()
    with traffic.counting(), engine("--depth", "3", *flags) as made:
        losses = [step(made).loss for _ in range(2)]
    gathered = traffic.by_group["dp_shard"].bytes
    traffic.reset()
    return losses, gathered


def with_and_without_reshards(*flags: str) -> tuple[tuple[list[float], int], tuple[list[float], int]]:
    return losses_and_gathered(*flags), losses_and_gathered(*flags, "--no-reshard-after-forward")


@pytest.mark.parametrize("schedule", ["", *SCHEDULES])
def test_weights_that_stay_gathered_train_alike_with_half_the_traffic(ranks, schedule: str) -> None:
    flags = [*BY_TWO, *SCATTERED]
    if schedule:
        flags += ["--pipeline-model-parallel-size", "2", "--pipeline-schedule", schedule]
    found = ranks(4 if schedule else 2, with_and_without_reshards, *flags)
    freed = 0
    kept = 0
    for (losses, of_freed), (kept_losses, of_kept) in found:
        assert losses == kept_losses
        freed += of_freed
        kept += of_kept
    assert 0 < kept <= freed / 2


def built_by_layers() -> list[tuple[int, int]]:
    """The memory of this rank's whole parameters whenever a layer has got its values, and the layer's own."""
    held, seen = list[tuple[int, int]](), list[nn.Module]()
    keep = GatheredWeights.shard

    def watched(self: GatheredWeights, segment: int, layers: Sequence[nn.Module]) -> None:
        seen.extend(layers)
        whole = sum(each.untyped_storage().nbytes() for layer in seen for each in layer.parameters())
        held.append((whole, sum(each.nbytes for layer in layers for each in layer.parameters())))
        keep(self, segment, layers)

    with mock.patch.object(GatheredWeights, "shard", watched), engine(*BY_TWO):
        return held


def test_a_rank_builds_one_layer_at_a_time(ranks) -> None:
    for held in ranks(2, built_by_layers):
        assert len(held) > 1 and all(whole == own for whole, own in held)


WEIGHT = "blocks.0.mlp.fc1.conv.weight"
HALVES = ("--weight-parallel-size", "2", "--micro-batch-size", "2", "--global-batch-size", "8")
FLAGS = ("--train-iters", "6", "--eval-iters", "0", "--neuron-backend", "torch")
SAVES = ("--save-interval", "1", "--check-replicas-interval", "2", "--save")


def train_with_flip(faulty: int, name: str, cache: str, *flags: str) -> str:
    """The largest bit of the mantissa of a number flips before the fourth step. "" where nobody noticed."""
    step = Engine.train_on
    here = torch.distributed.get_rank() == faulty

    def flipped(self: Engine, batch: RankBatch) -> StepResult:
        if self.iteration == 3 and here:
            (entry,) = [entry for entry in self.checkpoints.whole_entries() if entry.name == name]
            flat_in_memory(entry.tensor).view(torch.int32)[-1] ^= 1 << 22
        return step(self, batch)

    with mock.patch.object(Engine, "train_on", flipped):
        try:
            train(cache, *FLAGS, *flags)
        except ReplicaError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("flags", "size", "faulty", "name", "part"),
    [
        ((), 2, 0, f"optimizer.exp_avg_sq.{WEIGHT}", ""),
        (("--precision", "bf16", SHARDED), 2, 1, "blocks.0.mlp.fc1.norm.running_var", ""),
        ((*HALVES, "--async-save"), 4, 3, WEIGHT, " from ["),
    ],
    ids=["moment", "statistic-beside-owned-rows", "halves-of-weights"],
)
def test_the_next_comparison_finds_it(ranks, cache, tmp_path, flags, size, faulty, name, part) -> None:
    save = (*SAVES, str(tmp_path / "run"))
    texts = ranks(size, train_with_flip, faulty, name, cache, *flags, *save)
    assert len(set(texts)) == 1
    assert "replicas differ at iteration 4" in texts[0] and f"- {name}{part}" in texts[0]
    assert list_checkpoints(tmp_path / "run") == [1, 2, 3] and not list((tmp_path / "run").glob("*.tmp"))


def test_it_is_found_at_the_end_without_a_folder_to_save_in(ranks, cache) -> None:
    texts = ranks(2, train_with_flip, 1, WEIGHT, cache)
    assert all("at iteration 6" in text for text in texts)
