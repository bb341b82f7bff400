"""What would make the host wait for a GPU: found on the CPU, by watching what is done with tensors.

The compiled loops of the CPU and the sockets of its ranks are put aside, so that the operations are those of a device.
Tensors that a GPU's step keeps on the host, as the numbers of steps that torch's optimizers count, are named by `host`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megasnn import device_checks
from megasnn.config import parse
from megasnn.config.training import Length
from megasnn.engine import Engine
from megasnn.kernels import philox
from megasnn.kernels import spike_codec as codec
from megasnn.kernels.numba import spike_sums as sparse_products
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.training.metrics import Metrics

PACKAGE = str(Path(__file__).parent.parent / "megasnn")
READS = {  # operations whose result the host has to know, be it only its size
    *("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}
COPIES = {"tolist", "numpy", "cpu", "__array__"}  # to the host; not seen as operations of tensors on the CPU
FROM_VALUES = {"new_tensor", "tensor", "as_tensor"}  # to a device, from the host's memory that is not pinned
BETWEEN_HOSTS = {"all_gather_object", "gather_object", "broadcast_object_list"}
MODEL_FLAGS = {
    "spikformer": "--image-size 8 --in-channels 1 --num-classes 10 --patch-size 4 --embed-dim 32 --depth 2 "
    "--num-heads 4 --time-steps 2 --mlp-ratio 2",
    "vgg_dvs": "--channels 4,P,8,8,P --image-size 16 --time-steps 3 --num-classes 10 --dropout 0.4",
}
TRAINING_FLAGS = "--micro-batch-size 2 --global-batch-size 8 --train-iters 9 --lr 1e-3 --clip-grad 0.1 --ema-decay 0.9"


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
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(codec, "_by_numpy", return_value=False))
        stack.enter_context(mock.patch.object(philox, "_kept_by_loops", philox.kept_by_tensors))
        stack.enter_context(mock.patch.object(sparse_products, "_work", return_value=None))
        stack.enter_context(mock.patch.object(device_checks, "runs_ahead", lambda device: True))
        stack.enter_context(
            mock.patch("torch.cuda.synchronize", lambda *_: found.append(f"{place_in_package()}: synchronize"))
        )
        stack.enter_context(_Operations(found, host))
        stack.enter_context(_Functions(found, host))
        yield found


class Waits(NamedTuple):
    """What waits on this rank in the first step of a model and in the second one, in a step of another number of
    samples and in an evaluation of that, and where a log line is measured."""

    first: list[str]
    second: list[str]
    smaller: list[str]
    evaluation: list[str]
    log: list[str]


def waits_of_steps(model: str, flags: str = "", fewer: int = 7) -> Waits:
    """
    Args:
        fewer: samples of the step that has not as many as the others.
    """
    given = f"{MODEL_FLAGS[model]} {TRAINING_FLAGS} --neuron-backend torch {flags}".split()
    config = parse(run_config(MODELS[model]), given)
    size = config.training.global_batch_size
    with (
        mock.patch.object(dist, "get_backend", lambda group=None: "another"),  # one operation gathers
        Engine(config, length=Length(config.training.train_iters or 0)) as engine,
    ):
        watch = Metrics(engine)
        random = torch.Generator().manual_seed(0)
        images = torch.rand(size, *config.model.input_shape, generator=random)
        labels = torch.arange(size) % config.model.num_classes
        first, second = (engine.batches.share(images, labels, size, start) for start in (0, size))
        smaller = engine.batches.share(images[:fewer], labels[:fewer], fewer, 2 * size)
        evaluated = engine.batches.share(images[:fewer], labels[:fewer], fewer, 0, evaluates=True)

        def host() -> set[int]:
            states = engine.step.optimizer.state.values()
            return {state["step"].untyped_storage().data_ptr() for state in states if "step" in state}

        found = []
        for batch in (first, second, smaller):
            watch.spikes.enabled = watch.rasters.enabled = batch is not first
            with host_waits(host) as in_step:
                result = engine.train_on(batch)
            assert math.isfinite(result.loss) and not result.skipped
            found.append(in_step)
        with host_waits() as in_evaluation:
            engine.evaluate_on([evaluated])
        with host_waits() as in_log:
            watch.since_last(3)
    return Waits(*found, in_evaluation, in_log)
