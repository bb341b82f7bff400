"""What would make the host wait for a GPU, found on the CPU: reads of the device, and copies from pageable memory.

The compiled loops of the CPU and the sockets of its ranks are put aside, so that the operations are those of a device.
Tensors that a GPU's step keeps on the host, as the numbers of steps that torch's optimizers count, are named by `host`.

On a GPU a tensor is on the host where it was made of values, made without a device, or computed from such tensors. It
reaches the device by `megasnn.common.memory` only. A tensor without dimensions may meet the device's: torch passes it
as a number.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megasnn.common import memory
from megasnn.config import parse
from megasnn.config.training import Length
from megasnn.data import RankBatch
from megasnn.engine import Engine
from megasnn.engine.batch import CheckedBatch
from megasnn.kernels import layout
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.training.metrics import Metrics
from tests.recorded_graphs import READS, as_on_a_gpu, recorded_graphs

PACKAGE = str(Path(__file__).parent.parent / "megasnn")
COPIES = {"tolist", "numpy", "cpu", "__array__"}  # to the host; not seen as operations of tensors on the CPU
FROM_VALUES = {"new_tensor", "tensor", "as_tensor"}  # to a device, from the host's memory that is not pinned
BETWEEN_HOSTS = {"all_gather_object", "gather_object", "broadcast_object_list"}
MODEL_FLAGS = {
    "spikformer": "--image-size 8 --in-channels 1 --num-classes 10 --patch-size 4 --embed-dim 32 --depth 2 "
    "--num-heads 4 --time-steps 2 --mlp-ratio 2",
    "vgg_dvs": "--channels 4,P,8,8,P --image-size 16 --time-steps 3 --num-classes 10 --dropout 0.4",
}
TRAINING_FLAGS = "--micro-batch-size 2 --global-batch-size 8 --train-iters 9 --lr 1e-3 --clip-grad 0.1 --ema-decay 0.9"
MAKERS = {
    *("tensor", "as_tensor", "arange", "linspace", "eye", "empty", "empty_strided", "zeros", "ones", "full"),
    *("rand", "randn", "randint", "randperm", "scalar_tensor"),
}
BY_PINNED_MEMORY = {memory.copy_without_waiting.__code__}


class _Operations(TorchDispatchMode):
    def __init__(self, found: list[str], host: Callable[[], set[int]]) -> None:
        super().__init__()
        self._found, self._host = found, host

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, options = function.overloadpacket.__name__, kwargs or {}
        if _reads(name, args, options) and not _is_of_host(args, self._host()):
            self._found.append(f"{place_in_package()}: {name}")
        return function(*args, **options)


class _Functions(TorchFunctionMode):
    def __init__(self, found: list[str], host: Callable[[], set[int]]) -> None:
        super().__init__()
        self._found, self._host = found, host

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, options = getattr(function, "__name__", ""), kwargs or {}
        copies = name in COPIES and not _is_of_host(args, self._host())
        pageable = name == "new_tensor" or name in FROM_VALUES and options.get("device") is not None
        if copies or pageable:
            self._found.append(f"{place_in_package()}: {name}")
        return function(*args, **options)


def _reads(name: str, args: Sequence[Any], options: Mapping[str, Any]) -> bool:
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    if name == "repeat_interleave":
        return options.get("output_size") is None
    return name in READS


def _is_of_host(args: Sequence[Any], host: set[int]) -> bool:
    """Whether a tensor is the host's: one of `host`, or of those that hosts tell each other."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in BETWEEN_HOSTS:
            return True
        frame = frame.f_back
    return bool(args) and isinstance(args[0], Tensor) and args[0].untyped_storage().data_ptr() in host


def place_in_package() -> str:
    """The innermost function of the package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    if frame is None:
        return "outside of the package"
    file = Path(frame.f_code.co_filename).relative_to(Path(PACKAGE).parent)
    return f"{file}, {frame.f_code.co_name}"


@contextmanager
def host_waits(host: Callable[[], set[int]] = set) -> Iterator[list[str]]:
    """Inside, the list gets a line for each time that the host would wait for a GPU: where, and for what.

    Args:
        host: the addresses of tensors that are the host's.
    """
    found: list[str] = []
    waits = mock.patch("torch.cuda.synchronize", lambda *_: found.append(f"{place_in_package()}: synchronize"))
    with as_on_a_gpu(), waits, _Operations(found, host), _Functions(found, host):
        yield found


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


# --- steps


@contextmanager
def stepping(model: str, flags: str) -> Iterator[tuple[Engine, Callable[..., RankBatch]]]:
    """Makes an Engine, and `batch(samples, start)` of its samples."""
    given = f"{MODEL_FLAGS[model]} {TRAINING_FLAGS} --neuron-backend torch {flags}".split()
    config = parse(run_config(MODELS[model]), given)
    size = config.training.global_batch_size
    images = torch.rand(size, *config.model.input_shape, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(size) % config.model.num_classes
    with (
        mock.patch.object(dist, "get_backend", lambda group=None: "another"),  # one operation gathers
        Engine(config, length=Length(config.training.train_iters or 0)) as engine,
    ):

        def batch(samples: int, start: int, **options: bool) -> RankBatch:
            whole = CheckedBatch({"images": images[:samples]}, labels[:samples], samples)
            return engine.batches.rank_batch(whole, start, **options)

        yield engine, batch


class Found(NamedTuple):
    """What waits on this rank in the first step of a model and in the second one, in a step of another number of
    samples and in an evaluation of that, and where a log line is measured; and copies of a further step."""

    first: list[str]
    second: list[str]
    smaller: list[str]
    evaluation: list[str]
    log: list[str]
    copies: list[str]


def found_in_steps(model: str, flags: str = "", fewer: int = 7) -> Found:
    """
    Args:
        fewer: samples of the step that has not as many as the others.
    """
    with stepping(model, flags) as (engine, batch):
        watch = Metrics(engine)

        def host() -> set[int]:
            states = engine.trainer.optimizer.state.values()
            return {state["step"].untyped_storage().data_ptr() for state in states if "step" in state}

        found = []
        for samples, start in ((8, 0), (8, 8), (fewer, 16)):
            given = batch(samples, start)
            watch.spikes.enabled = watch.rasters.enabled = start > 0
            with host_waits(host) as in_step:
                result = engine.train_on(given)
            assert math.isfinite(result.loss) and not result.skipped
            found.append(in_step)
        evaluated = batch(fewer, 0, evaluates=True)
        with host_waits() as in_evaluation:
            engine.evaluate_on([evaluated])
        with host_waits() as in_log:
            watch.since_last(3)
        watch.spikes.enabled = watch.rasters.enabled = False
        copies = _copies(engine, batch(8, 24))
    return Found(*found, in_evaluation, in_log, copies)


def copies_of_a_step(model: str, flags: str = "") -> list[str]:
    """Of the second step of a model, on this rank."""
    with stepping(model, flags) as (engine, batch):
        engine.train_on(batch(8, 0))
        return _copies(engine, batch(8, 8))


def copies_of_a_replayed_step(model: str) -> list[str]:
    """Of the second step of a model whose layers have CUDA graphs."""
    with recorded_graphs() as graphs:
        found = copies_of_a_step(model, "--cuda-graphs on")
    assert graphs.replays > 0
    return found


def _copies(engine: Engine, batch: RankBatch) -> list[str]:
    given = [each for micro in batch.micro_batches for each in (*(micro.inputs or {}).values(), micro.targets)]
    of_host = [each for each in given if each is not None]
    with pageable_copies(of_host) as found:
        engine.train_on(batch)
    return found
