"""What a source holds, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megasnn.checkpoint.description import AVERAGE, BESIDE, PREFIX
from megasnn.convert.source import TensorInfo, TensorSource
from megasnn.files.described import printable

Tree = dict[str, "Tree | TensorInfo"]


def as_text(source: TensorSource) -> str:
    """What it is, the tree of tensors with type, size, shape and where they lie, and totals."""
    facts = source.facts
    lines = [f"{source.path}: {source.kind}" + (f" of the model {facts.model}" if facts.model else "")]
    if facts.versions:
        lines.append(f"iteration {facts.iteration}, {facts.consumed_samples} samples consumed")
        lines.append(f"written by {_pairs(facts.versions)}; layout: {_pairs(facts.layout or {}) or 'one process'}")
        for part, values in (facts.config or {}).items():
            lines.append(f"{part}: {_pairs(values) if isinstance(values, Mapping) else values}")
    rows = list(_rows(_tree(source.tensors)))
    width = max((len(label) for label, _ in rows), default=0)
    lines += [f"{label:<{width}}  {_row(info)}" if info else label for label, info in rows]
    return "\n".join(map(printable, [*lines, *_totals(source)]))


def as_json(source: TensorSource) -> dict[str, Any]:
    """The same as plain values."""
    facts = source.facts
    return {
        "path": str(source.path),
        "kind": source.kind,
        "iteration": facts.iteration,
        "consumed_samples": facts.consumed_samples,
        "model": facts.model,
        "config": facts.config,
        "layout": facts.layout,
        "optimizer": facts.optimizer,
        "versions": facts.versions,
        "files": dict(source.files),
        "tensors": {
            name: {
                "shape": list(info.shape),
                "dtype": info.dtype_name,
                "bytes": info.bytes,
                "boxes": [
                    {"file": box.file, "offset": list(box.offset), "sizes": list(box.sizes)} for box in info.boxes
                ],
            }
            for name, info in source.tensors.items()
        },
    }


def _tree(tensors: Mapping[str, TensorInfo]) -> Tree:
    root: Tree = {}
    for name, info in tensors.items():
        *parents, last = name.split(".")
        node = root
        for parent in parents:
            below = node.setdefault(f"{parent}.", {})
            assert isinstance(below, dict)  # the names of tensors in the tree end without a dot, those of parents with
            node = below
        node[last] = info
    return root


def _rows(tree: Tree, depth: int = 0) -> Iterator[tuple[str, TensorInfo | None]]:
    """Lines of a tree, children behind their parent; a parent with one child shares its line."""
    for label, below in tree.items():
        while isinstance(below, dict) and len(below) == 1:
            name, below = next(iter(below.items()))
            label += name
        yield "  " * depth + label.removesuffix("."), below if isinstance(below, TensorInfo) else None
        if isinstance(below, dict):
            yield from _rows(below, depth + 1)


def _row(info: TensorInfo) -> str:
    files = {box.file for box in info.boxes}
    place = f"{len(info.boxes)} pieces in {len(files)} files" if len(info.boxes) > 1 else "".join(files)
    return f"{info.dtype_name:<8}  {size_text(info.bytes):>10}  {list(info.shape)!s:<20}  {place}".rstrip()


def _totals(source: TensorSource) -> Iterator[str]:
    of = {name: next(filter(name.startswith, BESIDE), "") for name in source.tensors}
    for label, prefix in (("model", ""), ("average of the model", AVERAGE), ("optimizer state", PREFIX)):
        chosen = [info for name, info in source.tensors.items() if of[name] == prefix]
        if prefix == AVERAGE and not chosen:
            continue
        elements = sum(info.elements for info in chosen)
        kind = f" of {source.facts.optimizer}" if prefix == PREFIX and source.facts.optimizer else ""
        total = size_text(sum(info.bytes for info in chosen))
        yield f"{label}{kind}: {len(chosen)} tensors, {elements:,} elements, {total}"
    yield f"on disk: {len(source.files)} files, {size_text(sum(source.files.values()))}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def size_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
