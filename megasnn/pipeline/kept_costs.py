"""Measured costs that are kept in the user's cache, so that a configuration is planned alike in each of its runs."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from megasnn.cache import CacheError, cache_folder, name_in_cache
from megasnn.comm.agreement import decided_by_first
from megasnn.comm.group import Group
from megasnn.files.durable import write_whole
from megasnn.pipeline.costs import LayerCost, LinkCost, PipelineCosts
from megasnn.pipeline.graphs import KNOWN


def kept_costs(key: tuple[str, ...], world: Group, measure: Callable[[], PipelineCosts]) -> PipelineCosts:
    """Those that were kept under this key, or what `measure` gives, which is kept then. Collective over the world.

    Args:
        key: all that costs depend on.
    """
    kept = decided_by_first(world, lambda: _read(key))
    if kept is not None:
        return kept
    costs = measure()
    if world.rank == 0:
        try:
            write_whole(_file(key), json.dumps(asdict(costs)))
        except (CacheError, OSError) as error:
            sys.stderr.write(f"WARNING: measured costs are not kept for the next run: {error}\n")
    return costs


def code_of(things: Iterable[object]) -> tuple[str, ...] | None:
    """The files with the classes of these objects, as text, that are neither MegaSNN's nor torch's: what a layer costs
    depends on them, too. None where a class is in no file, as in a notebook."""
    kinds = {type(each) for each in things}
    try:
        files = {inspect.getsourcefile(kind) for kind in kinds if kind.__module__.split(".")[0] not in KNOWN}
        return tuple(Path(each).read_text(encoding="utf-8") for each in sorted(filter(None, files)))
    except (OSError, TypeError):
        return None


def _file(key: tuple[str, ...]) -> Path:
    return cache_folder("costs") / name_in_cache("costs-of-layers", ".json", *key)


def _read(key: tuple[str, ...]) -> PipelineCosts | None:
    """None where there are none, or not in this form."""
    try:
        values = json.loads(_file(key).read_text(encoding="utf-8"))
        layers = [LayerCost(**{**each, "working": tuple(each["working"])}) for each in values["layers"]]
        replicas = None if values["replicas"] is None else LinkCost(**values["replicas"])
        return PipelineCosts(tuple(layers), LinkCost(**values["link"]), replicas)
    except (CacheError, OSError, ValueError, KeyError, TypeError):
        return None
