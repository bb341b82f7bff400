"""The check of a GPU, parity: a step in float64 on ranks that share the GPUs over Gloo, against SpikingJelly's model.

The same runs in the tests, on ranks of the CPU (tests/parity/test_gpu_parity.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from spikingjelly.activation_based import functional, neuron
from torch import Tensor, nn

from megasnn.checkpoint import load_globals_into
from megasnn.config import ParallelConfig, TrainingConfig
from megasnn.models.building import describe
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.parallel_state import destroy_model_parallel, initialize_model_parallel
from megasnn.sharding import Piece
from tools.benchmark.gpu import Figure, Setting
from tools.benchmark.gpu_kernels import error_of
from tools.benchmark.models import configuration, spikingjelly_model
from tools.benchmark.ranks import RankTask, Worlds, set_up_rank, start_row
from tools.benchmark.training_steps import ENDLESS, OPTIMIZER, MegaSNNStep, random_batch

MODEL = Spikformer(
    embed_dim=32, depth=2, num_heads=4, mlp_ratio=2.0, patch_size=4, image_size=16, in_channels=3, time_steps=3,
    num_classes=5,
)  # fmt: skip
MICRO_BATCH, MICRO_BATCHES = 3, 4
SAMPLES = MICRO_BATCH * MICRO_BATCHES
CLOSE = 1e-9
ROW_S = 60.0


@dataclass(frozen=True)
class Layout:
    """Attributes: ranks along each axis, and the order of a pipeline."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    def __str__(self) -> str:
        sizes = {"dp": self.data, "tp": self.tensor, "pp": self.pipeline}
        axes = "".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1)
        return f"{axes} {self.schedule}" if self.pipeline > 1 else axes or "one rank"


LAYOUTS = (
    Layout(),
    Layout(data=2),
    Layout(tensor=2),
    Layout(pipeline=2),
    Layout(pipeline=2, schedule="zbv"),
    Layout(data=2, tensor=2),
    Layout(tensor=2, pipeline=2),
    Layout(tensor=2, pipeline=2, schedule="zbv"),
)


@dataclass
class Truth:
    """What SpikingJelly's model came to, by our names; `weights` are from before the step."""

    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    loss: float
    spikes: int


@dataclass
class Part:
    """A rank's part of a step: pieces of gradients, and how often its neurons fired."""

    loss: float
    spikes: int
    gradients: dict[str, list[tuple[Piece, Tensor]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Differences:
    """Attributes: relative errors of the loss and of the gradient that has the largest; spikes more or less."""

    loss: float
    gradients: float
    spikes: int


@cache
def truth() -> Truth:
    """A step of SpikingJelly's model on the CPU. Norms have parameters away from their initial values, so that neurons
    fire, and errors in them show."""
    torch.manual_seed(0)
    model = spikingjelly_model(MODEL).double()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.uniform_(module.weight, 0.8, 1.6)
            nn.init.uniform_(module.bias, 0.2, 1.2)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    fired: list[int] = []
    for module in model.modules():
        if isinstance(module, (neuron.BaseNode, neuron.SimpleBaseNode)):
            module.register_forward_hook(lambda _module, _inputs, spikes: fired.append(int(spikes.sum())))
    images, labels = random_batch(describe(MODEL), SAMPLES)
    loss = 0.0
    for x, y in zip(images.double().split(MICRO_BATCH), labels.split(MICRO_BATCH), strict=True):
        functional.reset_net(model)
        share = F.cross_entropy(model(x).mean(0), y, reduction="sum") / SAMPLES
        share.backward()
        loss += share.item()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    ours = MODEL.from_spikingjelly({**before, **gradients})
    return Truth(MODEL.from_spikingjelly(before), {name: ours[name] for name in _trained(ours)}, loss, sum(fired))


def _trained(values: Mapping[str, Tensor]) -> list[str]:
    return [name for name in values if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))]


def rank_step(layout: Layout, weights: dict[str, Tensor], device: torch.device) -> Part:
    """A step from these weights on, on every rank of a world of this size; alone without one."""
    state = initialize_model_parallel(layout.tensor, layout.pipeline, device)
    try:
        config = configuration(
            MODEL,
            training=TrainingConfig(MICRO_BATCH, SAMPLES, train_iters=ENDLESS, precision="fp64"),
            parallel=ParallelConfig(
                tensor_model_parallel_size=layout.tensor,
                pipeline_model_parallel_size=layout.pipeline,
                pipeline_schedule=layout.schedule,
            ),
            optimizer=OPTIMIZER,
        )
        step = MegaSNNStep(config)
        with closing(step.engine):
            distributed = step.engine.distributed
            load_globals_into(distributed.tensors, weights, state.world.handle)
            distributed.refresh_copies()
            fired: list[Tensor] = []
            for _, each in distributed.neurons():
                each.observer = lambda spikes: fired.append(spikes.sum(dtype=torch.float64))
            found = Part(step.forward_backward(), 0)
            found.spikes = int(sum(float(each) for each in fired))
            for entry in distributed.tensors:
                if entry.is_parameter and entry.tensor.grad is not None:
                    local = entry.tensor.grad.cpu()
                    pieces = [(piece, piece.of_local(local).clone()) for piece in entry.shard.pieces()]
                    found.gradients[entry.name] = pieces
            return found
    finally:
        destroy_model_parallel()


def differences(layout: Layout, parts: Sequence[Part], expected: Truth) -> Differences:
    """Of all ranks' parts together. Neurons count once, on whichever replica and tensor parallel rank they are.

    Raises:
        RuntimeError: a gradient that no rank has, or that has none there.
    """
    worst, had = 0.0, dict.fromkeys(expected.gradients, 0)
    for part in parts:
        for name, pieces in part.gradients.items():
            for piece, local in pieces:
                wanted = piece.of_global(expected.gradients[name])
                scale = expected.gradients[name].norm()
                worst = max(worst, _finite(float((local - wanted).norm() / scale)))
                had[name] += local.numel()
    lacking = [name for name, count in had.items() if count < expected.gradients[name].numel()]
    if lacking:
        raise RuntimeError(f"{layout}: no rank has all of the gradient of {', '.join(lacking)}")
    losses = [_finite(abs(part.loss - expected.loss) / abs(expected.loss)) for part in parts]
    return Differences(max(losses), worst, abs(sum(part.spikes for part in parts) - expected.spikes))


def _finite(error: float) -> float:
    return error_of(torch.tensor(error), torch.tensor(0.0))


class ParityRank:
    """A rank that takes steps on one layout after another."""

    def __init__(self, task: RankTask[Setting]) -> None:
        set_up_rank(task)
        self._worlds = Worlds(task)
        self._device = task.work.device
        if task.work.is_gpu:
            self._device = torch.device("cuda", task.rank % torch.cuda.device_count())
            torch.cuda.set_device(self._device)

    def step(self, layout: Layout, weights: dict[str, Tensor]) -> Part | None:
        """None on ranks that the layout has no use for."""
        with self._worlds.of_first(layout.ranks) as is_in:
            return rank_step(layout, weights, self._device) if is_in else None


def parity(setting: Setting, case: str = "") -> Iterator[Figure]:
    """Of every layout, with up to four ranks on one GPU."""
    layouts = LAYOUTS[1:2] if setting.is_tiny else LAYOUTS
    most = max(layout.ranks for layout in layouts)
    with start_row("of parity", ParityRank, setting, most) as ranks:
        expected = truth()
        ranks.ready(ROW_S)
        for layout in layouts:
            parts = ranks.call("step", layout, expected.weights, timeout=ROW_S)
            found = differences(layout, [part for part in parts if part is not None], expected)
            note = f"loss {found.loss:.1g}, gradients {found.gradients:.1g}; {layout.ranks} rank(s)"
            error = max(found.loss, found.gradients)
            yield Figure(f"{layout}: error against SpikingJelly, float64", error, most=CLOSE, note=note)
            yield Figure(f"{layout}: spikes that differ in number", found.spikes, most=0)
