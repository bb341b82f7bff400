"""Check MegaSNN on a GPU: are its kernels exact, is a step the CPU's, and where does the time of a step go?

    python tools/check_gpu.py
    python tools/check_gpu.py --parts versions kernels --limit-s 200

Each part is a process of its own: one that fails, dies or hangs is a row with its error, and what it had found stays.
After each part a JSON line is appended to --output, tracebacks included. It needs torch, triton, NumPy and einops; what
reads files and command lines has stand-ins where it is missing, and SpikingJelly's surrogates are written out. The exit
status is 0 where every target is met, 1 where one is missed or a part failed, 2 where nothing could be checked.

On an H200 all parts took 240 of the 570 seconds of --limit-s: 5 for versions, 100 for the kernels, each of which is
compiled once, 40 for parity, and 15 to 25 for each step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 570.0
CLOSE = 1e-9  # relative, float64
WARM_UP, TIMED = 4, 10
LISTED = 25  # rows of each ranking
NO_GPU = 2


@dataclass(frozen=True)
class Setting:
    """Device and sizes of a check; `tiny` ones, without targets of speed, are for tests on a CPU."""

    device: torch.device
    tiny: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def backend(self) -> str:
        """Neuron kernels that are checked against plain PyTorch's."""
        return "triton" if self.is_gpu else "auto"

    def wait(self) -> None:
        """Waits until the device has done what it was given."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class Figure:
    """A measured value. `most`: its target, an upper bound; None for information only."""

    name: str
    value: float
    unit: str = ""
    most: float | None = None
    note: str = ""

    @property
    def is_met(self) -> bool:
        return self.most is None or self.value <= self.most  # False for NaN


# --- parts


def versions(setting: Setting) -> Iterator[Figure]:
    """Yields what a figure depends on: the GPU, torch, CUDA, cuDNN, Triton, and the bandwidth of a copy."""
    yield Figure("torch", float(".".join(torch.__version__.split(".")[:2])), note=torch.__version__)
    if not setting.is_gpu:
        return
    import triton

    properties = torch.cuda.get_device_properties(setting.device)
    yield Figure("compute capability", properties.major + properties.minor / 10, note=properties.name)
    yield Figure("memory", properties.total_memory / 1e9, "GB", note=f"CUDA {torch.version.cuda}")
    yield Figure("cuDNN", torch.backends.cudnn.version() or 0, note=f"triton {triton.__version__}")
    source = torch.empty(2**28, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    seconds = _device_seconds(lambda: target.copy_(source), setting)
    yield Figure("copy", 2 * source.nbytes / seconds / 1e9, "GB/s", note="256 MiB, read and written")


def _device_seconds(run: Callable[[], object], setting: Setting, repeats: int = 20) -> float:
    """Median seconds of the device for one call, behind one that warms up."""
    run()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        setting.wait()
        times.append(1e-3 * begin.elapsed_time(end))
    return median(times)


@dataclass(frozen=True)
class NeuronCase:
    """A neuron by fields of NeuronSpec, and the shape `[T, N, C, H, W]` of its input."""

    values: dict[str, Any]
    shape: tuple[int, ...]
    pool: bool = False

    @property
    def spec(self) -> Any:
        from megasnn.kernels import NeuronSpec

        return NeuronSpec(**self.values)


def _spec(kind: str, surrogate: str, v_reset: float | None, detach: bool, **more: Any) -> dict[str, Any]:
    return dict(kind=kind, v_threshold=0.6, v_reset=v_reset, detach_reset=detach, surrogate=surrogate, **more)


NEURONS = (
    NeuronCase(_spec("if", "sigmoid", 0.0, True), (1, 2, 5, 6, 7)),
    NeuronCase(_spec("if", "atan", -0.3, False), (10, 1, 40, 5, 4), pool=True),
    NeuronCase(_spec("lif", "sigmoid", 0.0, True), (4, 2, 12, 5, 5), pool=True),  # a Spikformer's
    NeuronCase(_spec("lif", "atan", 0.0, True, tau=1.333, decay_input=False), (10, 2, 8, 4, 6)),  # the VGG's
    NeuronCase(_spec("lif", "sigmoid", -0.3, True, tau=3.0), (4, 1, 33, 3, 5)),
    NeuronCase(_spec("lif", "atan", 0.0, False, tau=1.7), (16, 1, 7, 3, 4), pool=True),
    NeuronCase(_spec("lif", "sigmoid", None, False, tau=1.7, decay_input=False), (17, 2, 3, 5, 1)),
    NeuronCase(_spec("plif", "sigmoid", None, True), (16, 1, 7, 5, 3)),
    NeuronCase(_spec("plif", "atan", -0.3, False, decay_input=False), (3, 2, 6, 5, 4), pool=True),
)


def kernels(setting: Setting) -> Iterator[Figure]:
    """Yields spikes and errors of every neuron, alone and behind a norm, against plain PyTorch on the CPU.

    torch divides by a number on a GPU by multiplying with its inverse, which is another rounding: so the reference
    computes on the CPU.
    """
    cases = NEURONS[2:4] if setting.tiny else NEURONS
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        name, flipped, worst = str(dtype).removeprefix("torch."), [0, 0], 0.0
        reference = torch.float32 if dtype == torch.bfloat16 else dtype
        for case in cases:
            for behind_a_norm in (False, True):
                wanted = _computed(case, behind_a_norm, "torch", dtype, reference, torch.device("cpu"))
                found = _computed(case, behind_a_norm, setting.backend, dtype, dtype, setting.device)
                flipped[behind_a_norm] += _differing(found[0], wanted[0])
                if dtype == torch.float64 or not behind_a_norm:
                    worst = max(worst, *map(_error, found[1:], wanted[1:]))
        yield Figure(f"{name}: spikes that differ", flipped[0], most=0, note=f"{len(cases)} neurons, without a norm")
        exact = 0 if dtype == torch.float64 else None
        yield Figure(f"{name}: spikes that differ behind a norm", flipped[1], most=exact, note="sums in another order")
        bound = {torch.float64: CLOSE, torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
        yield Figure(f"{name}: largest error of potentials and gradients", worst, most=bound)
    yield Figure("packed spikes and counts that are not exact", _inexact(setting), most=0)
    note = "" if setting.tiny else "of 2 million"
    yield Figure("quotients that are not rounded correctly", _inexact_quotients(setting), most=0, note=note)


def _inexact_quotients(setting: Setting) -> int:
    """Potentials of leaky neurons after one step that never fires: what comes in, divided by tau."""
    from megasnn.kernels import NeuronSpec
    from megasnn.kernels.neuron import neuron_multi_step

    wrong, generator = 0, torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        for tau in (1.333, 1.7, 3.0, 1.0000001):
            x = 100 * torch.randn(1, 1, 1, 10**3 if setting.tiny else 2**18, generator=generator, dtype=dtype)
            spec = NeuronSpec(kind="lif", tau=tau, v_threshold=1e6, v_reset=0.0)
            found = neuron_multi_step(x.to(setting.device), spec, backend=setting.backend)[1]
            wrong += _differing(found.cpu(), (x / torch.full((), tau, dtype=dtype))[0])
    return wrong


def _input(case: NeuronCase, rounded: torch.dtype, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal values with the channels last in memory, the same on every device and in every type that they fit."""
    steps, samples, channels, *space = case.shape
    generator = torch.Generator().manual_seed(steps)
    values = 2.5 * torch.randn(steps, samples, *space, channels, generator=generator)
    return values.to(rounded).to(device, dtype).movedim(-1, 2).requires_grad_()


def _computed(
    case: NeuronCase, behind_a_norm: bool, backend: str, rounded: torch.dtype, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Spikes, potential (or mean and variance) and gradients, on the CPU.

    Args:
        rounded: type that the input's values are rounded to before they are given as `dtype`.
    """
    from megasnn.kernels import neuron as kernels
    from megasnn.kernels.norm_neuron import BatchNorm, NormNeuron, norm_pool_neuron

    numbers = torch.float32 if dtype == torch.bfloat16 else dtype  # of parameters
    x = _input(case, rounded, dtype, device)
    options: dict[str, Any] = {"dtype": numbers, "device": device, "requires_grad": True}
    learned = [torch.tensor(-0.3, **options)] if case.values["kind"] == "plif" else []
    w = learned[0] if learned else None
    if not behind_a_norm:
        spikes, *others = kernels.neuron_multi_step(x, case.spec, w=w, backend=backend)
        inputs = [x, *learned]
    else:
        scale, shift = (torch.linspace(low, low + 1.0, case.shape[2], **options) for low in (0.5, 0.0))
        norm, norm_neuron = BatchNorm(scale, shift), NormNeuron(case.spec, 1e-5, case.pool, case.shape[0])
        spikes, *others = norm_pool_neuron(x, norm, norm_neuron, w, backend=backend)[:3]
        inputs = [x, scale, shift, *learned]
    return [each.detach().cpu() for each in (spikes, *others, *_gradients(spikes, inputs))]


def _gradients(spikes: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    order = torch.arange(spikes.numel(), dtype=torch.float64).view(spikes.shape)
    return torch.autograd.grad(spikes, inputs, (order * 0.7).sin().bfloat16().to(spikes))  # exact in every type


def _differing(found: Tensor, wanted: Tensor) -> int:
    return int((found.to(wanted.dtype) != wanted).sum())


def _error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference relative to the largest value; infinite where one is NaN, which no bound sees."""
    wanted = wanted.double()
    error = float((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1))
    return math.inf if math.isnan(error) else error


def _inexact(setting: Setting) -> int:
    """Values that change where spikes are packed as bits and counts as bytes, and unpacked again."""
    from megasnn.kernels.spike_codec import COUNTS, SPIKES, decode_into, encode

    wrong = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for size in (1, 2048, 4099):
            generator = torch.Generator().manual_seed(size)
            counts = torch.randint(0, 256, (size,), generator=generator).to(setting.device, dtype)
            spikes = (counts > 127).to(dtype)
            for values, content in ((spikes, SPIKES), (counts, COUNTS)):
                packed, back = encode(values, content), torch.empty_like(values)
                decode_into(packed, content, back.view(1, -1))
                wrong += _differing(back, values) + _differing(packed.cpu(), encode(values.cpu(), content))
    return wrong


def parity(setting: Setting) -> Iterator[Figure]:
    """Yields how far two float64 steps of both models with AdamW are from those of the CPU."""
    from megasnn.models.spikformer.model import Spikformer
    from megasnn.models.vgg_dvs.model import VggDvs

    transformer = Spikformer(embed_dim=32, depth=2, num_heads=4, patch_size=4, image_size=16, num_classes=5)
    vgg = VggDvs(channels="8,P,16,P", image_size=16, time_steps=4, num_classes=5)
    for model in (transformer, vgg):
        wanted, found = _trained(model, torch.device("cpu")), _trained(model, setting.device)
        losses = [abs(a - b) / abs(b) for a, b in zip(found[0], wanted[0], strict=True)]
        yield Figure(f"{model.name}: error of the loss", max(losses), most=CLOSE, note="relative, float64, two steps")
        worst = max((_error(found[1][name], each), name) for name, each in wanted[1].items())
        yield Figure(f"{model.name}: error of weights and buffers", worst[0], most=CLOSE, note=f"most in {worst[1]}")


def _trained(model: Any, device: torch.device) -> tuple[list[float], dict[str, Tensor]]:
    from megasnn.engine import Engine

    options: dict[str, Any] = dict(micro_batch_size=3, global_batch_size=6, precision="fp64", lr=1e-2, train_iters=2)
    with Engine(model, device=device.type, **options) as engine:
        losses = [engine.train_step(*_batch(model, 6)).loss for _ in range(2)]
        return losses, engine.state_dict()


def _batch(model: Any, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(samples, *model.input_shape, generator=generator)
    return images, torch.randint(0, model.num_classes, (samples,), generator=generator)


# --- a step


def step(setting: Setting, model: Any, samples: int, graphs: str) -> Iterator[Figure]:
    """Yields the time of a step of a model in bfloat16, one micro-batch, and where it goes."""
    from megasnn.engine import Engine

    options: dict[str, Any] = dict(
        micro_batch_size=samples, global_batch_size=samples, precision="bf16", train_iters=10**6
    )
    engine = Engine(model, device=setting.device.type, cuda_graphs=graphs, **options)
    with closing(engine):
        images, labels = _batch(model, samples)

        def run() -> None:
            engine.train_step(images, labels)
            setting.wait()

        for _ in range(WARM_UP):
            run()
        times = [timeit.timeit(run, number=1) for _ in range(TIMED)]
        note = f"bf16, {samples} samples, graphs {graphs}; fastest {1e3 * min(times):.1f} ms"
        yield Figure("step", 1e3 * median(times), "ms", note=note)
        yield Figure("throughput", samples / median(times), "samples/s")
        if setting.is_gpu:
            torch.cuda.reset_peak_memory_stats(setting.device)
            run()
            yield Figure("peak memory", torch.cuda.max_memory_allocated(setting.device) / 1e6, "MB")
            note = "one for the loss, two of this measurement: at the end of the step and of the profile"
            yield Figure("waits of the host", _waits(run), most=3, note=note)
        yield from _profiled(run, setting)


def _spikformer(setting: Setting) -> tuple[Any, int]:
    """Returns the published model for ImageNet, Spikformer-8-512 (224 pixels, T 4), and the batch of its recipe."""
    from megasnn.models.spikformer.model import Spikformer

    if setting.tiny:
        return Spikformer(embed_dim=32, depth=1, num_heads=2, patch_size=4, image_size=16), 2
    return Spikformer(embed_dim=512, depth=8, num_heads=8, patch_size=16, image_size=224, num_classes=1000), 24


def _vgg(setting: Setting) -> tuple[Any, int]:
    """Returns CIFAR10DVSVGG (48 pixels, T 10) and the batch with which its times are published."""
    from megasnn.models.vgg_dvs.model import VggDvs

    return (VggDvs(channels="8,P,16,P", image_size=16, time_steps=4), 2) if setting.tiny else (VggDvs(), 128)


def _waits(run: Callable[[], object]) -> int:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        run()
    return sum(event.name in WAITS for event in trace.events())


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def _profiled(run: Callable[[], object], setting: Setting) -> Iterator[Figure]:
    """Yields host time beside device time, kernels by device time, and operators with bytes and operations a second."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.is_gpu else [])]
    with profile(activities=activities, record_shapes=True) as trace:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    operators = {e["args"]["External id"]: e for e in events if e.get("cat") == "cpu_op"}
    device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if setting.is_gpu:
        runtime = [e for e in events if e.get("cat") == "cuda_runtime"]
        span = [e["ts"] for e in operators.values()], [e["ts"] + e["dur"] for e in operators.values()]
        waiting = sum(e["dur"] for e in runtime if e["name"] in WAITS)
        yield Figure("device busy", 1e-3 * _union(device), "ms", note=f"{len(device)} kernels and copies")
        yield Figure("host busy", 1e-3 * (max(span[1]) - min(span[0]) - waiting), "ms", note="under the profiler")
    else:
        device = list(operators.values())
    total = sum(e["dur"] for e in device) or 1.0
    for name, durations in _ranked((e["name"], e) for e in device):
        yield Figure(
            f"kernel {name[:90]}", 1e-3 * sum(durations), "ms", note=f"{len(durations)} x, {sum(durations) / total:.1%}"
        )
    of_operators: dict[int, float] = defaultdict(float)  # an operator may start several kernels
    for event in device:
        if (operator := event["args"].get("External id")) in operators:
            of_operators[operator] += event["dur"]
    shaped = ((_shape(operators[each]), {"dur": duration}) for each, duration in of_operators.items())
    for (name, what), durations in _ranked(shaped):
        yield _operator(name, json.loads(what), durations)


def _ranked(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, list[float]]]:
    """Durations in µs by key, those that take longest together first."""
    groups: dict[Any, list[float]] = defaultdict(list)
    for key, event in pairs:
        groups[key].append(event["dur"])
    return sorted(groups.items(), key=lambda pair: -sum(pair[1]))[:LISTED]


def _shape(event: Any) -> tuple[str, str]:
    arguments = event["args"]
    keys = ("Input Dims", "Input type", "Concrete Inputs")
    return event["name"], json.dumps([arguments.get(key, []) for key in keys])


def _operator(name: str, what: Sequence[Any], durations: Sequence[float]) -> Figure:
    dims, types, concrete = what
    seconds = 1e-6 * sum(durations) / len(durations)
    sizes = {"float": 4, "double": 8, "c10::BFloat16": 2, "long int": 8, "unsigned char": 1}
    tensors = [
        (d, sizes[t]) for d, t in zip(dims, types, strict=False) if t in sizes and all(isinstance(n, int) for n in d)
    ]
    moved = sum(math.prod(d) * size for d, size in tensors)
    note = f"{len(durations)} x {1e6 * seconds:.0f} us; reads {moved / max(seconds, 1e-12) / 1e9:.0f} GB/s"
    if operations := _operations(name, dims, concrete):
        note += f"; {operations / max(seconds, 1e-12) / 1e12:.2f} TFLOP/s"
    shapes = " ".join("x".join(map(str, d)) for d, _ in tensors)
    return Figure(f"operator {name} {shapes}"[:110], 1e-3 * sum(durations), "ms", note=note)


def _operations(name: str, dims: Sequence[Any], concrete: Sequence[str]) -> int:
    """Floating-point operations of a convolution, of its gradients or of a matrix product; 0 where it is neither."""
    if name.endswith("convolution_backward"):
        gradient, _, weight = dims[:3]
        parts = sum(json.loads(concrete[-1].lower())[:2])
        return 2 * parts * gradient[0] * math.prod(gradient[2:]) * math.prod(weight)
    if name.endswith("convolution_transpose"):
        images, weight = dims[:2]
        return 2 * images[0] * math.prod(images[2:]) * math.prod(weight)
    if "convolution" in name and len(dims) > 1 and len(dims[1]) == 4:
        images, weight = dims[:2]
        stride, padding = (json.loads(each) for each in _lists(concrete)[:2])
        if name == "aten::cudnn_convolution":
            stride, padding = padding, stride
        space = [(n + 2 * p - k) // s + 1 for n, p, k, s in zip(images[2:], padding, weight[2:], stride, strict=False)]
        return 2 * images[0] * math.prod(space) * math.prod(weight)
    if name in ("aten::mm", "aten::addmm"):
        left, right = dims[-2:] if name == "aten::mm" else dims[1:3]
        return 2 * math.prod(left) * right[-1]
    return 0


def _lists(concrete: Sequence[str]) -> list[str]:
    return [each for each in concrete if each.startswith("[")]


def _union(events: Iterable[Any]) -> float:
    """Length in µs of the union of the events' spans."""
    end = total = 0.0
    for event in sorted(events, key=lambda each: each["ts"]):
        begin, stop = max(event["ts"], end), event["ts"] + event["dur"]
        total += max(0.0, stop - begin)
        end = max(end, stop)
    return total


PARTS: dict[str, Callable[[Setting], Iterator[Figure]]] = {
    "versions": versions,
    "kernels": kernels,
    "parity": parity,
    "step": lambda setting: step(setting, *_spikformer(setting), "off"),
    "graphs": lambda setting: step(setting, *_spikformer(setting), "on" if setting.is_gpu else "off"),
    "vgg": lambda setting: step(setting, *_vgg(setting), "off"),
}


# --- the program


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="which, in this order")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "check_gpu.jsonl", help="file to append to")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for all parts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to see whether it runs")
    parser.add_argument("--tiny", action="store_true", help="sizes of a test")
    parser.add_argument("--inside", metavar="FILE", help=argparse.SUPPRESS)  # the process of one part
    flags = parser.parse_args(arguments)
    if flags.inside:
        return _inside(flags.parts[0], Setting(torch.device(flags.device), flags.tiny), flags.inside)
    if flags.device == "cuda" and not torch.cuda.is_available():
        needed = "give it a CUDA GPU and a torch built for it, or --device cpu --tiny to see whether the program runs"
        print(f"no GPU that torch can use, so nothing was checked: {needed}", file=sys.stderr)
        return NO_GPU
    flags.output.parent.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + flags.limit_s, False
    for part in flags.parts:
        line = _run_part(part, flags, end - time.monotonic())
        with flags.output.open("a") as file:
            file.write(json.dumps(line) + "\n")
        failed |= bool(line["error"]) or not all(each["met"] for each in line["figures"])
        _show(line)
    print(f"\nappended to {flags.output}")
    return int(failed)


def _inside(part: str, setting: Setting, path: str) -> int:
    """Runs a part in this process, and writes each figure as a line as soon as it is there."""
    from tools.stand_ins import do_without_libraries

    do_without_libraries()
    with open(path, "a") as file:
        for figure in PARTS[part](setting):
            file.write(json.dumps({**asdict(figure), "met": figure.is_met}) + "\n")
            file.flush()
    return 0


def _run_part(part: str, flags: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """Returns figures, seconds, and the end of what the process wrote where it failed."""
    line: dict[str, Any] = {"part": part, "time": time.time(), "figures": [], "error": "", "seconds": 0.0}
    if left_s <= 0:
        return {**line, "error": f"left out: --limit-s {flags.limit_s:g} is over"}
    with tempfile.TemporaryDirectory() as folder:
        found, begin = Path(folder) / "figures", time.monotonic()
        options = ["--parts", part, "--device", flags.device, "--inside", str(found)]
        command = [sys.executable, str(Path(__file__).resolve()), *options, *(["--tiny"] if flags.tiny else [])]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=left_s, env=dict(os.environ))
            if ended.returncode:
                line["error"] = f"status {ended.returncode}\n{ended.stderr[-6000:]}"
        except subprocess.TimeoutExpired as error:
            line["error"] = f"no end within {left_s:.0f} s\n{(error.stderr or b'').decode(errors='replace')[-6000:]}"
        line["seconds"] = round(time.monotonic() - begin, 1)
        if found.exists():
            line["figures"] = [json.loads(each) for each in found.read_text().splitlines()]
    return line


def _show(line: dict[str, Any]) -> None:
    print(f"\n{line['part']} ({line['seconds']:g} s)")
    for each in line["figures"]:
        target = "" if each["most"] is None else f" <= {each['most']:g} {'yes' if each['met'] else 'MISSED'}"
        print(f"  {each['name']}: {each['value']:.5g} {each['unit']}{target}  {each['note']}".rstrip(), flush=True)
    if line["error"]:
        print("  FAILED: " + line["error"].strip().replace("\n", "\n    "), flush=True)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # from any folder
    sys.exit(main())
