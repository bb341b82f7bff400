"""Laying out a checkpoint of many tensors takes the memory of a few of them, not of all."""

from __future__ import annotations

from pathlib import Path

from megasnn.checkpoint import read_metadata
from tests.convert.saved import save_whole
from tools.benchmark.checkpoints import CheckpointBenchmark
from tools.benchmark.conversion import ConversionTask, measure_conversion


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    model = CheckpointBenchmark(embed_dim=256, depth=6, num_heads=4).model()
    path = save_whole(tmp_path / "run", model)
    measured = measure_conversion(ConversionTask(path.parent, tmp_path / "new", tensor=2, pipeline=2))
    total = sum(file.bytes for file in read_metadata(path).files.values()) / 1e6
    assert total > 25 * measured["largest_mb"] > 0
    # What is read, what is written of it, and what the libraries allocate once.
    assert measured["peak_mb"] < 3 * measured["largest_mb"] + 16
