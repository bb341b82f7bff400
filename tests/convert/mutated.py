"""Every field of every description with every value of a table, its checksums made anew.

Each case loads as before, or gives the one error that names file and field. The program runs within a bound of memory,
reads nothing outside its folder, and changes nothing there. It prints the number of cases; and what went wrong, and
ends with status 1 then.
"""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import random
import resource
import signal
import sys
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megasnn.checkpoint import CheckpointError, load_global_tensors, read_metadata, save_global_tensors
from megasnn.checkpoint.folder import LATEST
from megasnn.checkpoint.job import LOCK, JobFolder
from megasnn.checkpoint.pieces import PIECES
from megasnn.checkpoint.torch_archive import read_state_dict
from megasnn.checkpoint.whole import verify_checkpoint
from megasnn.convert.listing import as_json, as_text
from megasnn.convert.opening import open_source
from tests.checkpoint import crafted
from tests.checkpoint.crafted import as_format_2, put, put_format_2, seal, values_of

MEMORY = 1 << 30
TENSORS = {"weight": torch.arange(12.0).view(3, 4), "large": torch.arange(300_000.0), "scalar": torch.tensor(3)}
# What JSON can say and Python's writer cannot, by what stands for it.
RAW = {
    "@digits": b"5" * 5000,
    "@deep": b"[" * 5000 + b"]" * 5000,
    "@bytes": b'"\xff\xfe"',
    "@surrogate": b'"\\ud800"',
    "@large": b"1e400",
}
EVIL: list[Any] = [
    *RAW,
    *(None, True, -1, 0, 1, 1.5, "", "x", "5", [], {}, [None], [-1], {"x": None}, [2**40, 2**40]),
    *(2**31, 2**62, 2**63, 2**70, float("nan"), float("inf")),
    *(
        "../../decoys/secret",
        "/dev/zero",
        "pipe",
        "link",
        "..",
        "a\0b",
        "x" * 10_000,
        "\x1b[2J",
        "__0_0.distcp",
        ".metadata",
    ),
]
Place = tuple[str | int, ...]


def dumped(value: Any) -> bytes:
    text = json.dumps(value).encode()
    for name, raw in RAW.items():
        text = text.replace(b'"%s"' % name.encode(), raw)
    return text


def places(value: Any, at: Place = ()) -> Iterator[Place]:
    """All fields, and of lists the first element."""
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for name, below in items:
        yield from places(below, (*at, name))


def mutations(value: Any, file: str) -> Iterator[tuple[Place, Any, tuple[str, ...]]]:
    """The value with one field changed, without it, and with one that is unknown.

    Yields:
        the place of the field; the value; what the error should name one of: the field or what it belongs to, or the
        file where it is no JSON.
    """
    for place in places(value):
        for evil in (*EVIL, "@without", "@unknown"):
            changed = copy.deepcopy(value)
            at = changed
            for name in place[:-1]:
                at = at[name]
            if evil == "@without":
                del at[place[-1]]
            elif evil == "@unknown" and isinstance(at, dict):
                at["unknown"] = 1
            else:
                at[place[-1]] = evil
            fields = tuple(name for name in (*place, "unknown") if isinstance(name, str))
            yield place, changed, (file,) if isinstance(evil, str) and evil in RAW else fields


class Cases:
    """Counts cases, and collects what went wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        self.wrong: list[str] = []

    def run(self, title: str, names: tuple[str, ...], read: Callable[[], object]) -> bool:
        """Reads: either nothing happens, or the error names one of these. Whether it was read."""
        self.count += 1
        signal.alarm(30)  # in case something waits for a pipe
        try:
            read()
        except CheckpointError as error:
            text = str(error)
            if not any(name in text for name in names) or len(text) > 20_000 or "\x1b" in text:
                self.wrong.append(f"{title}: the error should name one of {names}: {text[:400]!r}")
            return False
        except BaseException as error:
            self.wrong.append(f"{title}: {type(error).__name__}: {str(error)[:300]}")
            return False
        finally:
            signal.alarm(0)
        return True


def as_before(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = load_global_tensors(path.parent, 100)
    if loaded.keys() != TENSORS.keys() or not all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS):
        raise AssertionError("other values were loaded")


def looked_into(path: Path) -> None:
    source = open_source(path)
    if "\x1b" in as_text(source):
        raise AssertionError("a stranger steers the terminal")
    as_json(source)


def verified(path: Path) -> None:
    if problems := [problem for _, problem in verify_checkpoint(path) if problem]:
        raise CheckpointError(*problems)


def all_readers(cases: Cases, title: str, names: tuple[str, ...], path: Path) -> None:
    read = cases.run(f"load, {title}", names, lambda: as_before(path))
    if read or cases.count % 8 == 0:  # it goes the same way
        cases.run(f"inspect, {title}", names, lambda: looked_into(path))
    if cases.run(f"verify, {title}", names, lambda: verified(path)) and not read:
        cases.wrong.append(f"{title}: verify finds nothing, though it cannot be loaded")


def checkpoints(cases: Cases) -> None:
    config = {"model": {"depth": 2}}
    path = save_global_tensors(cases.folder / "run", TENSORS, iteration=100, model="spikformer", config=config)
    os.symlink(cases.folder / "decoys" / "secret", path / "link")
    os.mkfifo(path / "pipe")
    metadata, pieces = (path / "metadata.json").read_bytes(), (path / PIECES).read_bytes()
    for place, values, names in mutations(values_of(path), "metadata.json"):
        seal(path, dumped(values))
        all_readers(cases, f"metadata.json {place}", names, path)
    (path / "metadata.json").write_bytes(metadata)
    for place, values, names in mutations(json.loads(pieces), PIECES):
        put(path, PIECES, dumped(values))
        all_readers(cases, f"{PIECES} {place}", (*names, "large"), path)


def format_2(cases: Cases) -> None:
    path = save_global_tensors(cases.folder / "old", TENSORS, iteration=100)
    names = ("metadata.json", PIECES, ".metadata")
    before = {name: (path / name).read_bytes() for name in names}
    evil = [value for value in EVIL if not (isinstance(value, str) and value in RAW)]
    fields = ("relative_path", "offset", "length", "crc32", "data", "__dict__")
    for field in fields:
        for value in [*evil, int("5" * 4000), (2**70,), [[]] * 3]:
            for name, content in before.items():
                (path / name).write_bytes(content)

            def change(dcp: Any, field: str = field, value: Any = value) -> None:
                info = next(iter(dcp.storage_data.values()))
                info.__dict__.update({field: value})

            as_format_2(path, change)
            all_readers(cases, f".metadata {field} {str(value)[:40]}", (".metadata", "metadata.json"), path)
    for name, content in before.items():
        (path / name).write_bytes(content)
    as_format_2(path)
    whole = (path / ".metadata").read_bytes()
    dice = random.Random(0)
    nested = b"\x80\x04)" + b"\x85" * 200_000 + b"."
    for number in range(300):
        content = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            content[dice.randrange(len(content))] = dice.randrange(256)
        put_format_2(path, bytes(content) if number else nested)
        all_readers(cases, f".metadata, bytes of {number}", (".metadata", "metadata.json"), path)


def folders(cases: Cases) -> None:
    folder = cases.folder / "steps"
    path = save_global_tensors(folder, TENSORS, iteration=100)
    contents = [b"", b"-1", b"9" * 5000, b"\xff", b"1e3", "\u0663".encode(), b"../x", b"1 0", b"100\0", b"0x64", b"99"]
    for content in contents:
        (folder / LATEST).write_bytes(content)
        cases.run(f"latest {content[:20]!r}", (LATEST,), lambda: load_global_tensors(folder))
    (folder / LATEST).write_bytes(b"100\n")
    for name in (
        "iter_" + "9" * 240,
        "iter_\u0663\u0663\u0663\u0663\u0663\u0663\u0663",
        "iter_-000001",
        "iter_0000100x",
    ):
        (folder / name).mkdir()
        (folder / name / "metadata.json").write_bytes(b"{}")
        cases.run(f"folder {name[:20]}", (name,), lambda: as_before(path))
    note = {"holder": {"host": "h", "process": 1, "since": "s"}, "note": {"job": "j", "last_serial": 1}}
    for place, values, _ in mutations(note, LOCK):
        (folder / LOCK).write_bytes(dumped(values))
        cases.run(f"lock {place}", (LOCK,), lambda: JobFolder(folder).release())


def safetensors(cases: Cases) -> None:
    import safetensors.torch

    file = cases.folder / "weights.safetensors"
    safetensors.torch.save_file({"weight": TENSORS["weight"], "large": TENSORS["large"]}, file, {"format": "pt"})
    whole = file.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    for place, values, names in mutations(json.loads(whole[8:begin]), file.name):
        text = dumped(values)
        file.write_bytes(len(text).to_bytes(8, "little") + text + whole[begin:])
        cases.run(f"safetensors {place}", (*names, "weight", "large"), lambda: all_of(file))
    for length in (0, 1, 2**31, 2**63, 2**64 - 1, begin - 9, begin - 7):
        file.write_bytes(length.to_bytes(8, "little") + whole[8:])
        cases.run(f"safetensors length {length}", (file.name,), lambda: all_of(file))
    for cut in (0, 5, 8, 20, begin, len(whole) - 1):
        file.write_bytes(whole[:cut])
        cases.run(f"safetensors cut at {cut}", (file.name,), lambda: all_of(file))


def all_of(file: Path) -> None:
    source = open_source(file)
    as_text(source)
    for name in source.tensors:
        source.read(name)


def rewritten(content: bytes, change: Callable[[bytes], bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of torch.save with another data.pkl, checksums included."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(target, "w", how) as made:
        for entry in source.filelist:
            data = source.read(entry)
            made.writestr(entry.filename, change(data) if entry.filename.endswith("data.pkl") else data)
    return target.getvalue()


def torch_files(cases: Cases) -> None:
    file = cases.folder / "weights.pt"
    state = {"w": TENSORS["weight"], "b": torch.arange(5)}
    dice = random.Random(1)
    for legacy in (False, True):
        torch.save(state, file, _use_new_zipfile_serialization=not legacy)
        whole = file.read_bytes()

        def garble(data: bytes) -> bytes:
            changed = bytearray(data)
            for _ in range(dice.randrange(1, 4)):
                changed[dice.randrange(len(changed))] = dice.randrange(256)
            return bytes(changed)

        for number in range(250):
            file.write_bytes(garble(whole) if legacy else rewritten(whole, garble))
            cases.run(f"torch file, bytes of {number}", (file.name,), lambda: all_of(file))
            cases.run(f"torch file, bytes of {number}", (file.name,), lambda: read_state_dict(file))
    torch.save(state, file)
    whole = file.read_bytes()
    # A storage of 12 elements, seen as (3, 4) with strides (4, 1), as protocol 2 writes them.
    twelve, shape, strides, none = b"K\x0ctq", b"K\x03K\x04\x86", b"K\x04K\x01\x86", b"K\x00K\x00\x86"
    for old, new in (
        (twelve, b"J\x00\x00\x00\x40tq"),
        (shape, b"J\x00\x00\x00\x40K\x04\x86"),
        (strides, none),
    ):
        assert old in zipfile.ZipFile(io.BytesIO(whole)).read("weights/data.pkl"), old
        content = rewritten(whole, lambda data, old=old, new=new: data.replace(old, new))  # type: ignore[misc]
        file.write_bytes(content)
        if cases.run(f"torch file, {new!r}", (file.name,), lambda: read_state_dict(file)) and new != none:
            cases.wrong.append(f"torch file, {new!r}: it was read")
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("weights/data.pkl", bytes(64 << 20))
        made.writestr("weights/version", b"3\n")
    file.write_bytes(bomb.getvalue())
    for read in (all_of, read_state_dict):
        if cases.run("torch file, compressed", ("is compressed",), lambda read=read: read(file)):  # type: ignore[misc]
            cases.wrong.append("a compressed torch file was read")
    for legacy in (False, True):
        file.write_bytes(crafted.claiming_memory(legacy))
        cases.run("torch file, bytearray", ("bytearray does not belong",), lambda: read_state_dict(file))
    file.write_bytes(b"\x80\x02" + pickle.dumps({"w": [1] * 10}) + b"x" * 100)
    cases.run("torch file, a pickle", (file.name,), lambda: read_state_dict(file))


def main(folder: Path) -> int:
    decoys = folder / "decoys"
    decoys.mkdir()
    (decoys / "secret").write_bytes(b"secret" * 1000)
    opened: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            name = os.fsdecode(arguments[0])
            if "decoys" in name or name.startswith("/dev/zero"):
                opened.append(name)

    read_metadata(save_global_tensors(folder / "first", TENSORS))  # whatever is imported late
    warnings.simplefilter("ignore")
    sys.addaudithook(hook)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    cases = Cases(folder)
    for kind in (checkpoints, format_2, folders, safetensors, torch_files):
        before = cases.count
        kind(cases)
        print(f"  {kind.__name__}: {cases.count - before} cases, {time.process_time():.1f} s", file=sys.stderr)
    if opened:
        cases.wrong.append(f"opened outside its folder: {opened[:5]}")
    if (decoys / "secret").read_bytes() != b"secret" * 1000 or len(list(decoys.iterdir())) != 1:
        cases.wrong.append("the decoys were changed")
    print(cases.count, "cases,", len(cases.wrong), "wrong")
    print("\n".join(cases.wrong[:100]))
    return bool(cases.wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
