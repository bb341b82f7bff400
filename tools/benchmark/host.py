"""Processor time and function calls of the host in a micro-batch, as on a GPU whose kernels take no time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal

from megasnn.config.checks import at_least
from tools.benchmark.harness import Case, Column, Figures, ratios, rounds, say
from tools.benchmark.host_rank import PARTS, HostFigures, HostRank, HostWork
from tools.benchmark.ranks import RankProcesses, start_ranks

HERE = "here"
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300.0  # seconds of a turn
SAMPLES = 2  # of a micro-batch: context parallelism by samples gives each rank one
# The layers of Spikformer-8-512 and of CIFAR10DVSVGG, with so few channels and pixels that nothing takes time but the
# host. Heads have 8 channels, so that their bits fill bytes as those of the real one do.
DIMENSIONS: dict[str, dict[str, Any]] = {
    "spikformer": dict(embed_dim=32, depth=8, num_heads=4, patch_size=16, image_size=32, time_steps=4, num_classes=10),
    "vgg_dvs": dict(channels="8,16,P,32,32,P,64,64,P,64,64,P", image_size=16, time_steps=10, num_classes=10),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "wp2": {"weight_parallel_size": 2},
    "recompute": {"recompute": "always"},
}
"""Flags of each layout."""
TOTAL = "all"


@dataclass(frozen=True)
class Host(Case):
    """Processor time and function calls of the host in a micro-batch, on the code path of a GPU.

    Tensors are tiny. Substitutes for kernels, convolutions, products and exchanges compute nothing.
    """

    columns: ClassVar[Sequence[Column]] = (
        ("row", "row", ""),
        ("of", "of", ""),
        ("a micro-batch", "measure", ""),
        ("all", TOTAL, ".6g"),
        *((name.replace("_", " "), name, ".6g") for name in PARTS),
        ("substitutes", "own", ".6g"),
    )
    notes: ClassVar[str] = """\
ms: processor time of one rank, one thread, without Python's collection of garbage; medians of steps, then of rounds
substitutes: what they and the marks between the parts take, already taken off; of calls, how many substitutes there are
   (launches of Triton, convolutions, products)
calls, C calls: functions of Python, and of C that Python called, in one step under a profiler
here / tree: ratios; of all milliseconds, the median and quartiles of the rounds' ratios
attention: without its units. executor: without the layers. step: the batch, zeroing, norms, statistics, checks"""

    models: tuple[Literal["spikformer", "vgg_dvs"], ...] = ("spikformer", "vgg_dvs")
    """Models with the layers of Spikformer-8-512 and CIFAR10DVSVGG."""
    rows: tuple[Literal["one", "tp2", "cp2", "wp2", "recompute"], ...] = ("one", "tp2", "cp2", "wp2", "recompute")
    """Layouts: one rank, or the first of two; recompute is on one rank."""
    tree: Path | None = None
    """Another checkout to measure in turns with this one."""
    rounds: int = 30
    """Number of turns of each checkout."""
    steps: int = 4
    """Steps per turn; few, so that both checkouts meet the machine in the same state."""
    micro_batches: int = 1
    """Micro-batches per step."""

    def problems(self) -> list[str]:
        wrong = at_least(self, 1, "rounds", "steps", "micro_batches")
        if self.tree is not None and not (self.tree / "megasnn" / "__init__.py").exists():
            wrong.append(f"--tree {self.tree} is no checkout: it has no megasnn/__init__.py")
        if find_spec("triton") is None:
            wrong.append("--host starts kernels of Triton, which is not installed here: pip install triton")
        return wrong

    def measure(self) -> list[Figures]:
        return [figures for model in self.models for row in self.rows for figures in self._measure_row(model, row)]

    def work(self, model: str, row: str, tree: Path) -> HostWork:
        """A row's work in a checkout."""
        ranks = 2 if any(name.endswith("_size") for name in LAYOUTS[row]) else 1
        replicas = LAYOUTS[row].get("weight_parallel_size", 1)
        flags = {
            **LAYOUTS[row],
            "micro_batch_size": SAMPLES,
            "global_batch_size": SAMPLES * self.micro_batches * replicas,
            "precision": "bf16",
            "lr_decay_style": "constant",
            "device": "cpu",
        }
        return HostWork(f"{model} {row}", tree, model, DIMENSIONS[model], flags, ranks, self.micro_batches)

    def _measure_row(self, model: str, row: str) -> list[Figures]:
        trees = {HERE: ROOT} if self.tree is None else {HERE: ROOT, "tree": self.tree.resolve()}
        times: dict[str, list[HostFigures]] = {name: [] for name in trees}
        say(f"{model} {row}")
        with _started({name: self.work(model, row, tree) for name, tree in trees.items()}) as started:
            for number in rounds(self.rounds):
                # The one that comes first in a round comes last in the next: what a turn leaves in caches evens out.
                for name in list(trees)[:: 1 if number % 2 else -1]:
                    times[name] += started[name].call("time", self.steps, timeout=TIMEOUT)
            calls = {name: ranks.call("calls", timeout=TIMEOUT)[0] for name, ranks in started.items()}
        return figures(f"{model} {row}", times, calls)


@contextmanager
def _started(works: Mapping[str, HostWork]) -> Iterator[dict[str, RankProcesses]]:
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(start_ranks(f"{work.name} of {work.tree}", HostRank, work, 1, 1))
            for name, work in works.items()
        }
        for ranks in started.values():
            ranks.ready(TIMEOUT)
        yield started


def figures(row: str, times: Mapping[str, Sequence[HostFigures]], calls: Mapping[str, HostFigures]) -> list[Figures]:
    """Table rows: milliseconds, calls and C calls by checkout, then their ratios.

    Args:
        times: one figure per round, by checkout.
        calls: by checkout.
    """
    found: dict[str, list[Figures]] = {}
    for name in times:
        milliseconds = {part: median(each.parts[part] for each in times[name]) for part in PARTS}
        own = median(each.own for each in times[name])
        of_tree: Figures = {"row": row, "of": name}
        found[name] = [
            {**of_tree, "measure": "ms", **_with_total(milliseconds), "own": round(own, 2)},
            {
                **of_tree,
                "measure": "calls",
                **_with_total(calls[name].parts),
                "own": sum(calls[name].substituted.values()),
                **calls[name].substituted,
            },
            {**of_tree, "measure": "C calls", **_with_total(calls[name].c_calls)},
        ]
    rows = [each for of_tree in found.values() for each in of_tree]
    if len(found) == 1:
        return rows
    here, tree = found.values()
    compared = [_ratio(row, *pair) for pair in zip(here, tree, strict=True)]
    totals = [[sum(each.parts.values()) for each in of_tree] for of_tree in times.values()]
    compared[0][TOTAL] = ratios(*totals)
    return rows + compared


def _with_total(parts: Mapping[str, float]) -> Figures:
    rounded = {part: round(value, 2) for part, value in parts.items()}
    return {TOTAL: round(sum(rounded.values()), 2), **rounded}


def _ratio(row: str, here: Figures, tree: Figures) -> Figures:
    """Ratios of the parts; None if the tree does nothing."""
    shares = {part: round(here[part] / tree[part], 3) if tree[part] else None for part in (TOTAL, *PARTS)}
    return {"row": row, "of": "here / tree", "measure": here["measure"], **shares}
