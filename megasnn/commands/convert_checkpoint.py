"""Inspect, verify, reshard and compare checkpoints, and exchange weights with other programs. One process, no GPU.

    megasnn-convert-checkpoint inspect checkpoints/run
    megasnn-convert-checkpoint verify checkpoints/run
    megasnn-convert-checkpoint reshard --load checkpoints/run --save checkpoints/tp2_pp2 \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    megasnn-convert-checkpoint export --load checkpoints/run --output spikformer.pt
    megasnn-convert-checkpoint import --input spikformer.pt --save checkpoints/start
    megasnn-convert-checkpoint nir --load checkpoints/run --output network.nir
    megasnn-convert-checkpoint diff checkpoints/run/iter_0000100 spikformer.pt --model-only

A path is a run's folder (its latest checkpoint), one iter_... folder, or a file of torch.save or safetensors. Existing
files are never overwritten.
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
    import_weights,
    size_text,
    tensor_differences,
)
from megasnn.checkpoint.format import averages_of
from megasnn.checkpoint.reshard import Target, reshard
from megasnn.checkpoint.source import Source, in_our_names, open_source
from megasnn.checkpoint.tensor_io import damaged_files
from megasnn.commands.flags import name_in
from megasnn.common.files import CheckpointError, quantity
from megasnn.export.trained_model import load_model
from megasnn.schedule.partition import PLACEMENTS

PathArgument = Annotated[Path, tyro.conf.Positional]
# Result of a command: True ends the program with status 1.
HasFindings = bool


def _inspect(path: PathArgument) -> HasFindings:
    """Print progress, layout and every tensor of a checkpoint or file, with type, size, shape and file.

    Args:
        path: checkpoint or file.
    """
    print(as_text(open_source(path, values=False)))
    return False


def _verify(path: PathArgument) -> HasFindings:
    """Read a checkpoint and verify every byte. Status 1 if it is damaged.

    Args:
        path: a run's folder, or one checkpoint in it.
    """
    # Without values: the checksums read every byte anyway, and a checkpoint may be larger than the memory.
    source = open_source(path, values=False)
    if not source.is_checkpoint:
        raise CheckpointError(f"{path} is no checkpoint: a file of weights has no checksums to verify")
    problems = damaged_files(source.path, source.metadata)
    name = source.metadata.model
    title = f"{source.path}, of the model {name}" if name else str(source.path)
    total = size_text(sum(file.bytes for file in source.metadata.files.values()))
    for problem in problems:
        print(problem)
    print(f"{title}: {total} read, {quantity(len(problems), 'problem')}")
    return bool(problems)


def _reshard(
    load: Path,
    save: Path,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    num_virtual_stages_per_pipeline_rank: int = 1,
    placement: Annotated[str, name_in(PLACEMENTS)] = "loop",
    pipeline_model_parallel_layout: str | None = None,
) -> HasFindings:
    """Write a checkpoint with one file for each rank of another layout, optimizer state included.

    Optional: any layout loads any checkpoint. Afterwards each rank of this layout reads a single file.

    Args:
        load: checkpoint to read.
        save: folder to write to, without checkpoints; the iteration stays the same.
        tensor_model_parallel_size: tensor parallel size of the new layout.
        pipeline_model_parallel_size: pipeline parallel size of the new layout.
        num_virtual_stages_per_pipeline_rank: chunks of layers on each pipeline rank.
        placement: placement of the chunks: loop (round-robin) or v (two chunks a rank, as zbv).
        pipeline_model_parallel_layout: layer groups or layers of each chunk, such as "1|2|2|1". By default the saved
            layout, or chunks of equal multiply-adds if their number differs.
    """
    target = Target(
        tensor_model_parallel_size,
        pipeline_model_parallel_size,
        num_virtual_stages_per_pipeline_rank,
        pipeline_model_parallel_layout,
        placement,
    )
    # Without values: a rank's part at a time is read when its file is written.
    path, layout = reshard(open_source(load, values=False), save, target)
    ranks = target.tensor * target.pipeline
    print(f"{path}: a file for each rank, {ranks} in all")
    if len(target.placement) > 1:
        print(f'train with --pipeline-model-parallel-layout "{layout}": then each rank opens its own file only')
    return False


def _export(load: Path, output: Path, names: Names = "spikingjelly", ema: bool = True) -> HasFindings:
    """Write a model's weights to a file for another program.

    Args:
        load: checkpoint or file to read.
        output: file to write: safetensors if its name ends in .safetensors, otherwise a state_dict of torch.save.
        names: program whose tensor names the file uses.
        ema: write the average of the weights if the run kept one (--ema-decay).
    """
    source = open_source(load, ema=ema)
    for notice in source.notices:
        print(notice)
    averaged = ema and bool(averages_of(source.tensors))
    note = ""
    if averaged:
        note = ", the average of the weights (--no-ema: the weights)"
    counts = _counts(export_weights(source, output, names, averaged))
    print(f"{output}: {counts}{note}")
    return False


def _import(input: Path, save: Path, ema: bool = True) -> HasFindings:
    """Make a checkpoint of weights from another program's file. The tensor names identify the program.

    Args:
        input: state_dict of torch.save, or safetensors.
        save: folder to write to, without checkpoints; the checkpoint is iteration 0.
        ema: take the average of the weights if the file has one.
    """
    source = open_source(input, ema=ema)
    for notice in source.notices:
        print(notice)
    path, title = import_weights(source, save)
    counts = _counts(open_source(path, values=False))
    print(f"{path}: {counts}, from {title}; start from it with --load {save} --finetune")
    return False


def _nir(load: Path, output: Path, dt: float = 1e-4, ema: bool = True) -> HasFindings:
    """Write a model as a NIR graph for simulators and neuromorphic chips.

    Args:
        load: checkpoint to read.
        output: file to write.
        dt: length of a time step in seconds.
        ema: write the average of the weights if the run kept one (--ema-decay).
    """
    try:
        import nir

        from megasnn.export.to_nir import to_nir
    except ModuleNotFoundError as error:
        raise CheckpointError("NIR graphs need the package nir: pip install megasnn[nir]") from error
    if output.exists():
        raise CheckpointError(f"{output} exists already; remove it or give another --output")
    graph = to_nir(load_model(load, ema=ema), dt)
    nir.write(output, graph)
    print(f"{output}: {len(graph.nodes)} nodes, {len(graph.edges)} edges")
    return False


def _diff(first: PathArgument, second: PathArgument, tolerance: float = 0.0, model_only: bool = False) -> HasFindings:
    """Print the largest difference of each tensor between two checkpoints or files. Status 1 beyond the tolerance.

    Args:
        first: checkpoint or file.
        second: checkpoint or file.
        tolerance: largest allowed difference between two elements.
        model_only: ignore optimizer state.
    """
    ours = in_our_names(open_source(first))
    # Either side may be another program's file, whose tensors have other names.
    others = in_our_names(open_source(second))
    tensors = list(tensor_differences(ours, others, model_only))
    if not tensors:
        raise CheckpointError(f"{first} and {second} hold no tensor to compare")
    width = max(len(each.name) for each in tensors)
    differing = 0
    for each in tensors:
        if each.largest > tolerance:
            mark = "differs"
            differing += 1
        elif each.largest == 0:
            mark = "equal"
        else:
            mark = "close"
        print(f"{each.name:<{width}}  {mark:<7}  {each.largest:<10.4g} {each.note}".rstrip())
    print(f"more than {tolerance:g} of difference: {differing} of {quantity(len(tensors), 'tensor')}")
    return differing > 0


def _counts(source: Source) -> str:
    elements = sum(value.numel() for value in source.tensors.values())
    return f"{quantity(len(source.tensors), 'tensor')}, {elements:,} elements"


COMMANDS: dict[str, Callable[..., HasFindings]] = {
    "inspect": _inspect,
    "verify": _verify,
    "reshard": _reshard,
    "export": _export,
    "import": _import,
    "nir": _nir,
    "diff": _diff,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand. Returns the exit status: 0; 1 for a difference or damage; 2 for an error."""
    # Warnings are for the user of a command: file and line of this package say nothing to them.
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    try:
        return int(tyro.extras.subcommand_cli_from_dict(COMMANDS, description=__doc__, args=arguments))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
