"""What megasnn-preprocess-data does with its options, and what it prints."""

from __future__ import annotations

from pathlib import Path

from megasnn.data.index import INDEX_NAME, read_index, verify
from megasnn.preprocess.options import ShardOptions, Verify
from megasnn.preprocess.run import preprocess
from megasnn.telemetry.log import byte_bar


def run(command: ShardOptions | Verify) -> str:
    """Runs a command; returns what is to be printed.

    Raises:
        ValueError: something is missing, wrong, or cannot be written; shards differ from their index.
    """
    return _verify(command.folder) if isinstance(command, Verify) else _preprocess(command)


def _preprocess(options: ShardOptions) -> str:
    job = options.job()
    index = preprocess(job, options.workers)
    lines = []
    for split in job.listing.splits:
        shards = index.of_split(split)
        braces = f"{{00000..{len(shards) - 1:05d}}}" if len(shards) > 1 else "00000"
        samples, size = sum(shard.samples for shard in shards), sum(shard.size for shard in shards)
        lines.append(f"{samples} samples, {size / 1e6:.1f} MB in {options.output / split}-{braces}.tar")
    broken = [reason for shard in index.shards for reason in shard.broken]
    if broken:
        lines.append(f"{len(broken)} samples could not be used and were left out ({INDEX_NAME} has all): {broken[0]}")
    return "\n".join(lines)


def _verify(folder: Path) -> str:
    index = read_index(folder)
    size = sum(shard.size for shard in index.shards) if index else 0
    with byte_bar(str(folder), size) as bar:
        wrong = verify(folder, bar.update)
    if wrong:
        raise ValueError("\n".join(wrong))
    assert index is not None
    return (
        f"{len(index.shards)} shards with {sum(shard.samples for shard in index.shards)} samples are as they were made"
    )
