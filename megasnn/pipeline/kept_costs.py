"""Measured costs of a pipeline's layers, kept in the cache folder for the next start of the same run."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numba
import torch
from pydantic import with_config

from megasnn.common.files import (
    STRICT,
    CacheError,
    DescriptionError,
    FreeForm,
    cache_folder,
    described,
    read_regular,
    write_whole,
)
from megasnn.common.memory import processor_name
from megasnn.common.version import VERSION
from megasnn.config import PretrainConfig
from megasnn.layers.context import BuildContext
from megasnn.models.description import Built, ModelDescription
from megasnn.parallel.agreement import broadcast_result, gather
from megasnn.pipeline.cost_model import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.profile_layers import profile_pipeline

FOLDER = "layer_costs"
_PACKAGE = Path(__file__).parents[1]
_TRAINING = "precision", "sparse_products", "deterministic", "bptt_steps"  # flags that change a layer's work


@with_config(STRICT)
@dataclass(frozen=True)
class _KeptCosts:
    """Content of a file: costs, and everything that they depend on."""

    depends_on: FreeForm
    layers: tuple[LayerCost, ...]
    link: LinkCost


def pipeline_costs(
    description: ModelDescription, built: Sequence[Built], config: PretrainConfig, context: BuildContext
) -> PipelineCosts:
    """Costs that an earlier start has kept, or new ones, which are kept. Collective over the world.

    The first rank reads and writes the file. A file that is broken or of another run is ignored, with a warning.
    """
    world = context.state.world
    machines = gather(world.handle, _machine(context))
    kept = broadcast_result(world.handle, partial(_find, description, built, config, context, machines))
    file, depends_on, costs = kept
    if costs is not None:
        return costs
    samples = context.largest_share(config.training.micro_batch_size)
    costs = profile_pipeline(description, samples, context)
    if file is not None and world.rank == 0:
        values = {"depends_on": depends_on, **asdict(replace(costs, kept_in=""))}
        del values["kept_in"]
        try:
            write_whole(file, json.dumps(values, indent=1))
        except OSError as error:
            warnings.warn(f"the next start measures the layers again: {file} cannot be written: {error}", stacklevel=2)
    return costs


def _find(
    description: ModelDescription,
    built: Sequence[Built],
    config: PretrainConfig,
    context: BuildContext,
    machines: list[str],
) -> tuple[Path | None, dict[str, Any], PipelineCosts | None]:
    """File for these costs, its key, and the costs there; without a file, costs cannot be kept."""
    sources = _digest_of_sources([type(config.model), *_classes(built)])
    if not sources:
        # Code without a file, as in a notebook, may change unseen.
        return None, {}, None
    depends_on = _dependencies(description, config, context, machines, sources)
    name = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()[:24]
    try:
        file = cache_folder(FOLDER) / f"{config.model.name}-{name}.json"
    except CacheError as error:
        warnings.warn(f"every start measures the layers: {error}", stacklevel=2)
        return None, {}, None
    return file, depends_on, _read(file, depends_on, len(description.layers))


def _read(file: Path, depends_on: dict[str, Any], layers: int) -> PipelineCosts | None:
    if not file.exists():
        return None
    try:
        kept = described(_KeptCosts, read_regular(file), file)
        if kept.depends_on != depends_on or len(kept.layers) != layers:
            raise ValueError(f"{file} is of another run")
        if not all(0 <= number < math.inf for number in _numbers(kept)):
            raise ValueError(f"{file} has a cost that is negative or not finite")
    except (OSError, DescriptionError, ValueError) as error:
        warnings.warn(f"the layers are measured again: {error}", stacklevel=2)
        return None
    return PipelineCosts(kept.layers, kept.link, str(file))


def _numbers(kept: _KeptCosts) -> Iterator[float]:
    yield from astuple(kept.link)
    for layer in kept.layers:
        for value in astuple(layer):
            yield from value if isinstance(value, tuple) else (value,)


def _dependencies(
    description: ModelDescription,
    config: PretrainConfig,
    context: BuildContext,
    machines: list[str],
    sources: str,
) -> dict[str, Any]:
    training = asdict(config.training)
    grid = context.state.grid
    layers = repr([(each.name, each.entries, each.inputs, each.parameters) for each in description.layers])
    values = {
        "model": config.model.name,
        "values": asdict(config.model),
        "neuron": asdict(config.neuron),
        "training": {name: training[name] for name in _TRAINING},
        "samples": context.largest_share(config.training.micro_batch_size),
        "grid": asdict(grid),
        "cut": context.context_cut,
        "layers": hashlib.sha256(layers.encode()).hexdigest(),
        "machines": machines,
        "sources": sources,
        "versions": {"megasnn": VERSION, "torch": torch.__version__, "numba": numba.__version__},
    }
    # As it is read again: tuples become lists.
    read: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return read


def _machine(context: BuildContext) -> str:
    device = context.state.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor_name()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads a rank"


def _classes(built: Sequence[Built]) -> list[type]:
    found = dict[type, None]()
    for layer in built:
        for module in layer.module.modules():
            found[type(module)] = None
    return list(found)


def _digest_of_sources(classes: Sequence[type]) -> str:
    """Hash of MegaSNN's files and the files with these classes; empty where a class is in no file."""
    files = set(_PACKAGE.rglob("*.py"))
    for each in classes:
        try:
            files.add(Path(inspect.getfile(each)))
        except (TypeError, OSError):
            return ""
    digest = hashlib.sha256()
    for file in sorted(files):
        if not file.is_file():
            return ""
        digest.update(file.read_bytes())
    return digest.hexdigest()
