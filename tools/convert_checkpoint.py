"""Look into checkpoints, and exchange weights with SpikingJelly. One process, no GPU needed.

    python tools/convert_checkpoint.py inspect checkpoints/run
    python tools/convert_checkpoint.py export --load checkpoints/run --output spikformer.pt
    python tools/convert_checkpoint.py import --input spikformer.pt --save checkpoints/start

The exported file is a state_dict that SpikingJelly's Spikformer loads strictly. The imported checkpoint holds
weights only: a run takes it up with `--load checkpoints/start --finetune`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from megasnn.checkpoint import (
    CheckpointError,
    find_checkpoint,
    from_spikingjelly,
    load_global_tensors,
    read_metadata,
    read_state_dict,
    save_global_tensors,
    to_spikingjelly,
)
from megasnn.checkpoint.optimizer_state import PREFIX


def inspect_checkpoint(load: Annotated[Path, tyro.conf.Positional], ckpt_step: int | None = None) -> None:
    """Print what a checkpoint holds: progress, layout, and every tensor with type, size and shape.

    Args:
        load: checkpoint folder of a run.
        ckpt_step: iteration; the latest when not given.
    """
    metadata = read_metadata(find_checkpoint(load, ckpt_step))
    print(f"iteration {metadata.iteration}, {metadata.consumed_samples} samples consumed")
    print(f"written by {_pairs(metadata.versions)}; layout: {_pairs(metadata.layout or {}) or 'one process'}")
    width = max(map(len, metadata.tensors), default=0)
    for name, told in metadata.tensors.items():
        print(f"{name:<{width}}  {told['dtype']:<8}  {_size(_bytes(told)):>10}  {told['shape']}")
    for label, of_optimizer in (("model", False), ("optimizer state", True)):
        chosen = [told for name, told in metadata.tensors.items() if name.startswith(PREFIX) == of_optimizer]
        elements = sum(prod(told["shape"]) for told in chosen)
        print(f"{label}: {len(chosen)} tensors, {elements:,} elements, {_size(sum(map(_bytes, chosen)))}")
    stored = sum(file["bytes"] for file in metadata.files.values())
    print(f"on disk: {len(metadata.files)} files, {_size(stored)}")


def export_weights(load: Path, output: Path, ckpt_step: int | None = None) -> None:
    """Write a checkpoint's model as a state_dict of SpikingJelly's Spikformer.

    Args:
        load: checkpoint folder of a run.
        output: file to write, for torch.load; an existing one is replaced.
        ckpt_step: iteration; the latest when not given.
    """
    state_dict = to_spikingjelly(load_global_tensors(load, ckpt_step))
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f"{output.name}.tmp")
    torch.save(state_dict, aside)
    os.replace(aside, output)
    print(f"{output}: {_counts(state_dict)}")


def import_weights(input: Path, save: Path) -> None:
    """Make a checkpoint of weights only from a state_dict of SpikingJelly's Spikformer.

    Args:
        input: file written by torch.save(model.state_dict(), ...).
        save: checkpoint folder to write into, as iteration 0 and its latest.
    """
    tensors = from_spikingjelly(read_state_dict(input))
    path = save_global_tensors(save, tensors, extra={"source": str(input)})
    print(f"{path}: {_counts(tensors)}; start from it with --load {save} --finetune")


def _counts(tensors: Mapping[str, torch.Tensor]) -> str:
    return f"{len(tensors)} tensors, {sum(tensor.numel() for tensor in tensors.values()):,} elements"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _bytes(told: Mapping[str, Any]) -> int:
    return prod(told["shape"]) * getattr(torch, told["dtype"]).itemsize


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


COMMANDS: dict[str, Callable[..., None]] = {
    "inspect": inspect_checkpoint,
    "export": export_weights,
    "import": import_weights,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Returns 0, or 1 after saying on stderr why it could not be done."""
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, description=__doc__, args=arguments)
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
