"""Look into checkpoints, lay them out for other ranks, compare them, exchange weights. One process, no GPU needed.

    megasnn-convert-checkpoint inspect checkpoints/run
    megasnn-convert-checkpoint verify checkpoints/run
    megasnn-convert-checkpoint reshard --load checkpoints/run --save checkpoints/tp2_pp2 \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    megasnn-convert-checkpoint export --load checkpoints/run --output spikformer.pt
    megasnn-convert-checkpoint import --input spikformer.pt --save checkpoints/start
    megasnn-convert-checkpoint nir --load checkpoints/run --output network.nir
    megasnn-convert-checkpoint diff checkpoints/run/iter_0000100 spikformer.pt --model-only

A path may lead to a run's folder of checkpoints, which stands for its latest, to one checkpoint in it, or to a file of
torch.save or safetensors. Nothing that exists is overwritten.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from megasnn.checkpoint.exchange import (
    Names,
    as_text,
    export_weights,
    has_average,
    import_weights,
    size_text,
    tensor_differences,
)
from megasnn.checkpoint.reshard import Target, reshard
from megasnn.checkpoint.source import Source, in_our_names, open_source
from megasnn.checkpoint.tensor_io import damage
from megasnn.commands.flags import name_in
from megasnn.common.files import CheckpointError
from megasnn.export.trained_model import load_model
from megasnn.schedule.partition import PLACEMENTS

PathArgument = Annotated[Path, tyro.conf.Positional]
Differs = bool  # what a command returns: whether to end with status 1


def _inspect(path: PathArgument) -> Differs:
    """Print what a checkpoint or file holds: progress, layout, and every tensor with type, size, shape and file.

    Args:
        path: what to look into.
    """
    print(as_text(open_source(path, values=False)))
    return False


def _verify(path: PathArgument) -> Differs:
    """Read every byte of a checkpoint and check it. Status 1 when something is wrong.

    Args:
        path: a run's folder, or one checkpoint in it.
    """
    source = open_source(path, values=False)
    if not source.is_checkpoint:
        raise CheckpointError(f"{path} is no checkpoint: a file of weights has no checksums to verify")
    problems = damage(source.path, source.metadata)
    name = source.metadata.model
    title = f"{source.path}, of the model {name}" if name else str(source.path)
    total = size_text(sum(file.bytes for file in source.metadata.files.values()))
    print("\n".join([*problems, f"{title}: {total} read, {len(problems) or 'no'} problem(s)"]))
    return bool(problems)


def _reshard(
    load: Path,
    save: Path,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    num_virtual_stages_per_pipeline_rank: int = 1,
    placement: Annotated[str, name_in(PLACEMENTS)] = "loop",
    pipeline_model_parallel_layout: str | None = None,
) -> Differs:
    """Write a checkpoint again with a file for each rank of another grid, optimizer state included.

    Any layout loads any checkpoint without this; here each target rank finds all it needs in its own file.

    Args:
        load: checkpoint to read.
        save: folder without checkpoints to write to, under the same iteration.
        tensor_model_parallel_size: of the target, as all that follow.
        pipeline_model_parallel_size: of the target.
        num_virtual_stages_per_pipeline_rank: chunks of layers on each pipeline rank.
        placement: of these chunks: round and round, or a v (two chunks, schedule zbv).
        pipeline_model_parallel_layout: layer groups or layers in each chunk, like "1|2|2|1", as the run on the target
            will have it; by default as it was saved, or with another number of chunks even in multiply-adds.
    """
    target = Target(
        tensor_model_parallel_size,
        pipeline_model_parallel_size,
        num_virtual_stages_per_pipeline_rank,
        pipeline_model_parallel_layout,
        placement,
    )
    path, layout = reshard(open_source(load, values=False), save, target)
    print(f"{path}: a file for each rank, {target.tensor * target.pipeline} in all")
    if len(target.placement) > 1:
        print(f'train with --pipeline-model-parallel-layout "{layout}": then each rank opens its own file only')
    return False


def _export(load: Path, output: Path, names: Names = "spikingjelly", ema: bool = True) -> Differs:
    """Write a model's weights to a file for another program: safetensors where the file's name ends so, otherwise a
    state_dict of torch.save.

    Args:
        load: checkpoint or file to read.
        output: file to write.
        names: whose names the tensors get.
        ema: write the average of the weights where the run kept one (--ema-decay); otherwise the weights.
    """
    source = open_source(load)
    averaged = ema and has_average(source)
    of_what = ", the average of the weights (--no-ema: the weights)" if averaged else ""
    print(f"{output}: {_counts(export_weights(source, output, names, averaged))}{of_what}")
    return False


def _import(input: Path, save: Path) -> Differs:
    """Make a checkpoint of weights only from another program's file; its names tell which program it is.

    Args:
        input: state_dict of torch.save, or safetensors.
        save: folder without checkpoints to write into, as iteration 0.
    """
    path, title = import_weights(open_source(input), save)
    counts = _counts(open_source(path, values=False))
    print(f"{path}: {counts}, from {title}; start from it with --load {save} --finetune")
    return False


def _nir(load: Path, output: Path, dt: float = 1e-4, ema: bool = True) -> Differs:
    """Write a model as a graph of NIR, which simulators and chips read: convolutions, linear layers, LIF and IF.

    Args:
        load: checkpoint to read.
        output: file to write.
        dt: seconds of a time step.
        ema: write the average of the weights where the run kept one (--ema-decay); otherwise the weights.
    """
    try:
        import nir

        from megasnn.export.to_nir import to_nir
    except ModuleNotFoundError as error:
        raise CheckpointError("nir writes these graphs: pip install megasnn[nir]") from error
    if output.exists():
        raise CheckpointError(f"{output} exists already; remove it or give another --output")
    graph = to_nir(load_model(load, ema=ema), dt)
    nir.write(output, graph)
    print(f"{output}: {len(graph.nodes)} nodes, {len(graph.edges)} edges")
    return False


def _diff(first: PathArgument, second: PathArgument, tolerance: float = 0.0, model_only: bool = False) -> Differs:
    """Print for each tensor how far two checkpoints are apart, whatever their formats. Status 1 beyond the tolerance.

    Args:
        first: checkpoint or file.
        second: checkpoint or file.
        tolerance: largest difference of two elements that still counts as equal.
        model_only: leave optimizer state aside.
    """
    found = list(tensor_differences(in_our_names(open_source(first)), in_our_names(open_source(second)), model_only))
    if not found:
        raise CheckpointError(f"{first} and {second} hold no tensor to compare")
    width = max(len(entry.name) for entry in found)
    for entry in found:
        mark = "differs" if entry.largest > tolerance else "equal" if entry.largest == 0 else "close"
        print(f"{entry.name:<{width}}  {mark:<7}  {entry.largest:<10.4g} {entry.note}".rstrip())
    differing = sum(entry.largest > tolerance for entry in found)
    print(f"{differing} of {len(found)} tensors differ by more than {tolerance:g}")
    return differing > 0


def _counts(source: Source) -> str:
    elements = sum(value.numel() for value in source.tensors.values())
    return f"{len(source.tensors)} tensors, {elements:,} elements"


COMMANDS: dict[str, Callable[..., Differs]] = {
    "inspect": _inspect,
    "verify": _verify,
    "reshard": _reshard,
    "export": _export,
    "import": _import,
    "nir": _nir,
    "diff": _diff,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Returns 0; 1 for a difference or damage that was found; 2 when it could not be done."""
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        return int(tyro.extras.subcommand_cli_from_dict(COMMANDS, description=__doc__, args=arguments))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
