"""Bits per byte of a spiking and a dense language model after the same time on two cores.

    python examples/language_record/run.py --output runs/language_record

Downloads Django's documentation with pip, trains both models one after the other, and prints a table in Markdown.
A short run before each training decides on the number of iterations, so that the learning rate ends with the time.
docs/language.md has the result.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tyro

FOLDER = Path(__file__).parent
ARCHIVE = "Django-5.2.tar.gz"
VALID_EVERY = 20  # of 20 files one is for validation
TRIAL_ITERATIONS = 100

COMMON = shlex.split(
    "--embed-dim 160 --depth 4 --num-heads 4 --seq-length 256 --vocab-size 257 "
    "--micro-batch-size 4 --global-batch-size 8 --log-interval 20 --device cpu"
)
PROGRAMS = {
    "spiking": shlex.split("-m megasnn spike_lm --time-steps 2 --lr 3e-3"),
    "dense": [str(FOLDER / "dense.py"), *shlex.split("--lr 3e-3")],
}


class Cost(NamedTuple):
    """A run's minutes from its start to its end, by the clock and of all processors."""

    minutes: float
    processor_minutes: float


def main(
    output: Path = Path("runs/language_record"),
    minutes: float = 20.0,
    spiking_iterations: int | None = None,
    dense_iterations: int | None = None,
) -> None:
    """Trains both models and prints the table.

    Args:
        output: folder of the text, both runs and the table.
        minutes: of each run, start and validation included. The iterations follow from a short run's speed.
        spiking_iterations: length of the spiking model's training in iterations of 2,048 tokens, without a short run.
        dense_iterations: the same of the dense model.
    """
    given = {"spiking": spiking_iterations, "dense": dense_iterations}
    for name in given:
        if (output / name).exists():
            sys.exit(f"{output / name} has a run already: remove it, or give another --output")
    prepare(output)
    costs = {}
    for name, length in given.items():
        iterations = length or iterations_of(minutes, output, name)
        print(f"{name}: {iterations} iterations", flush=True)
        costs[name] = train(name, output / name, iterations)
    text = table(output, costs)
    (output / "table.md").write_text(text)
    print(text)


def prepare(output: Path) -> None:
    """Makes the tokens of training and validation, unless they are there."""
    if (output / "tokens").exists():
        return
    # pip compares the archive with the hash before it opens it.
    pip = "pip download --quiet --no-deps --no-binary :all: --require-hashes -r".split()
    start(*pip, FOLDER / "requirements.txt", "-d", output)
    split(output / ARCHIVE, output / "texts")
    start("megasnn.commands.preprocess_data", "text", "--input", output / "texts", "--output", output / "tokens")


def split(archive: Path, texts: Path) -> None:
    """Writes the .txt files in docs/ of an archive, in the order of their names, to `texts`/train and `texts`/val."""
    with tarfile.open(archive) as files:
        members = {member.name: member for member in files if member.isfile()}
        names = sorted(name for name in members if "/docs/" in name and name.endswith(".txt"))
        for number, name in enumerate(names, start=1):
            folder = texts / ("train" if number % VALID_EVERY else "val")
            folder.mkdir(parents=True, exist_ok=True)
            content = files.extractfile(members[name])
            assert content is not None
            # Names by number: a path in an archive may lead anywhere.
            (folder / f"{number:04d}.txt").write_bytes(content.read())


def iterations_of(minutes: float, output: Path, name: str) -> int:
    """Number of iterations for a run of some minutes, from a short one that is then removed."""
    folder = output / f"{name}_trial"
    # A short run that was interrupted leaves its folder.
    shutil.rmtree(folder, ignore_errors=True)
    cost = train(name, folder, TRIAL_ITERATIONS)
    lines = _lines(folder / "log.jsonl", "iteration")
    shutil.rmtree(folder)
    # The first line has compilation and the first accesses to memory.
    seconds = sum(line["elapsed_ms"] for line in lines[1:]) / 1000 / len(lines[1:])
    rest = 60 * cost.minutes - TRIAL_ITERATIONS * seconds
    return max(int((60 * minutes - rest) / seconds), 1)


def train(name: str, folder: Path, iterations: int) -> Cost:
    """Trains and validates a model on two processes of one thread each, by the tokens beside the run's folder."""
    tokens = folder.parent / "tokens"
    data = ["--data-path", str(tokens / "train"), "--valid-data-path", str(tokens / "val")]
    length = ["--train-iters", str(iterations), "--lr-warmup-iters", str(iterations // 20)]
    save = ["--save", str(folder)]
    ranks = ["--standalone", "--nproc-per-node", "2"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    start("torch.distributed.run", *ranks, *PROGRAMS[name], *COMMON, *data, *length, *save)
    seconds = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(seconds / 60, processor_seconds / 60)


def start(module: str, *arguments: object) -> None:
    """Runs `python -m module arguments` with one thread a process. Ends this program if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    words = [sys.executable, "-m", module, *map(str, arguments)]
    if subprocess.run(words, env=environment, check=False).returncode:
        sys.exit(f"failed: {shlex.join(words)}")


def table(output: Path, costs: Mapping[str, Cost]) -> str:
    """A table in Markdown with a column for each run in a folder of `output`."""
    columns = [_column(output / name / "log.jsonl", cost) for name, cost in costs.items()]
    lines = [f"| | {' | '.join(costs)} |", "|---" * (1 + len(costs)) + "|"]
    for row in columns[0]:
        cells = [column[row] for column in columns]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _column(log: Path, cost: Cost) -> dict[str, str]:
    """A run's cells by row. Operations and energy are those of one token in a forward pass."""
    (start,) = _lines(log, "start")
    (validation,) = _lines(log, "validation")
    model = start["config"]["model"]
    length = model["seq_length"]
    macs = validation["validation/effective_macs"] / length
    acs = validation["validation/effective_acs"] / length
    sparsity = activation_sparsity(model, validation["layers"])
    return {
        "parameters": f"{start['parameters']:,}",
        "iterations": f"{validation['iteration']:,}",
        "tokens of training": f"{validation['consumed_samples'] * length:,}",
        "minutes": f"{cost.minutes:.1f}",
        "processor minutes": f"{cost.processor_minutes:.1f}",
        "perplexity of a byte": f"{validation['perplexity']:.3f}",
        "**bits per byte, validation**": f"**{validation['bits_per_byte']:.3f}**",
        "Footprint, MB": f"{4e-6 * start['parameters']:.2f}",
        "Activation sparsity of the neurons": "no neurons" if sparsity is None else f"{sparsity:.3f}",
        "Synaptic operations, Dense, a token": f"{dense_operations(model):,}",
        "Effective MACs, a token": f"{macs:,.0f}",
        "Effective ACs, a token": f"{acs:,.0f}",
        "energy in 45 nm, µJ a token": f"{1e3 * validation['validation/energy_mj'] / length:.2f}",
    }


def _lines(log: Path, kind: str) -> list[dict[str, Any]]:
    """A log's entries of one kind."""
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return [entry for entry in entries if entry["kind"] == kind]


def activation_sparsity(model: Mapping[str, Any], layers: Mapping[str, Mapping[str, float]]) -> float | None:
    """Share of zeros among the outputs of all neurons; None without neurons.

    Args:
        model: dimensions.
        layers: accumulations `acs` of a sample by product.
    """
    dim = model["embed_dim"]
    uses = {"qkv": 3 * dim, "fc1": int(dim * model["mlp_ratio"])}  # of each neuron's output
    shares = []
    for name, operations in layers.items():
        used = uses.get(name.rpartition(".")[2])
        # Multiply-adds: the product's inputs are no spikes.
        if used is None or operations["macs"]:
            continue
        fired = operations["acs"] / used
        shares.append(fired / (model["time_steps"] * model["seq_length"] * dim))
    return 1 - sum(shares) / len(shares) if shares else None


def dense_operations(model: Mapping[str, Any]) -> int:
    """Operations of all products with weights, zeros included."""
    dim = model["embed_dim"]
    hidden = int(dim * model["mlp_ratio"])
    block = 4 * dim * dim + 2 * dim * hidden
    # The output layer takes the mean over time: one product a token.
    output: int = dim * model["vocab_size"]
    operations: int = model["time_steps"] * model["depth"] * block + output
    return operations


if __name__ == "__main__":
    tyro.cli(main)
