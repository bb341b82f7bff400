"""Files are read with sizes and fields checked; those of the cache are complete, and machine code never out of date."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numba
import numpy as np
import pytest
from numba.core.caching import FunctionCache
from pydantic import with_config

from megasnn.common.files import (
    STRICT,
    CacheError,
    DescriptionError,
    FreeForm,
    StoredCount,
    build_once,
    cache_folder,
    cached_name,
    described,
    quantity,
    read_arrays,
    read_file,
)
from megasnn.kernels.numba.jit import FolderLocator, kernel, run_kernel
from tests.kernels.models import torch_threads


@with_config(STRICT)
@dataclass(frozen=True)
class Parts:
    size: StoredCount
    parts: dict[str, list[float]]
    extra: FreeForm


GOOD = '{"size": 5, "parts": {"w": [1.5, 2.0]}, "extra": {"note": [1, null, "x"]}}'


@pytest.mark.parametrize(("old", "new", "named"), [
    ("5", "-5", "size.*-5"),
    ("5", '"5"', "size"),
    ('"size": 5', '"size": 4, "size": 5', "size stands twice in one object; the second is 5"),
    ("null", '{"a": 1, "a": 1}', "a stands twice"),
    ('"size": 5, ', "", "size"),
    ('"size": 5', '"size": 5, "more": 1', "more"),
    ("1.5", "NaN", "."),
    ('{"note"', '{"a": ' + "[" * 9000 + "]" * 9000 + ', "note"', "."),
    ("}}", "}", "."),
    ("}}", '}, "steer\\u001b": 1}', r"steer\\x1b"),
])  # fmt: skip
def test_a_wrong_description_is_refused_with_file_and_field(old, new, named):
    assert described(Parts, GOOD.encode(), "it.json") == Parts(5, {"w": [1.5, 2.0]}, {"note": [1, None, "x"]})
    with pytest.raises(DescriptionError, match=f"(?s)^it.json: .*{named}") as caught:
        described(Parts, GOOD.replace(old, new, 1).encode(), "it.json")
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def test_only_plain_files_within_the_limit_are_read(tmp_path, limits):
    (tmp_path / "file").write_bytes(b"12345")
    limits(5)
    assert read_file(tmp_path / "file") == b"12345"
    os.truncate(tmp_path / "file", 6)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("file", "pipe", "link", "."):
        with pytest.raises(ValueError):
            read_file(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "absent")


def test_arrays_are_read_and_damage_is_refused(limits):
    values, file = {"t": np.arange(5), "p": np.ones((2, 3), bool)}, io.BytesIO()
    np.savez_compressed(file, **values)
    content = file.getvalue()
    found = read_arrays(content)
    assert found.keys() == values.keys() and all(np.array_equal(found[name], values[name]) for name in values)
    objects, bomb = io.BytesIO(), io.BytesIO()
    np.savez(objects, t=np.array([object()]))
    np.savez_compressed(bomb, t=np.zeros(1 << 20))
    for wrong in (content[:-9], content[: len(content) // 2], b"", b"\x93NUMPY", objects.getvalue()):
        with pytest.raises(ValueError):
            read_arrays(wrong)
    limits(1 << 20)
    with pytest.raises(ValueError, match="--max-sample-mb"):
        read_arrays(bomb.getvalue())


ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_its_place_is_this_users_alone(tmp_path, monkeypatch, cache):
    assert cache_folder("index").stat().st_mode & 0o777 == 0o700
    for folder in (cache / "index", cache):
        folder.chmod(0o770)
        with pytest.raises(CacheError, match=f"{folder}.*MEGASNN_CACHE"):
            cache_folder("index")
    monkeypatch.delenv("MEGASNN_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder("index") == tmp_path / "home/.cache/megasnn/index"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg/megasnn"


def test_a_file_is_made_once_and_not_at_all_where_it_cannot_be_finished(cache):
    made, begin = [], threading.Barrier(4)

    def build(path: Path) -> None:
        made.append(path)
        path.write_text("complete")

    def use() -> None:
        begin.wait()
        assert build_once(cache_folder("x") / "thing", build).read_text() == "complete"

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1

    def full_disk(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(CacheError, match="other.*No space left.*MEGASNN_CACHE"):
        build_once(cache / "x" / "other", full_disk)
    assert {path.name for path in (cache / "x").iterdir() if not path.name.endswith(".lock")} == {"thing"}


def test_names_change_with_the_source_and_the_version(cache):
    cache.mkdir()
    names = set()
    for content in ("a", "bb"):
        (source := cache / "caf\udce9 x.tar").write_text(content)
        names |= {cached_name(source, ".json"), cached_name(source, ".json", "2")}
    assert len(names) == 4 and all(name.isascii() for name in names)


def test_machine_code_is_out_of_date_when_a_file_beside_it_changes(tmp_path: Path) -> None:
    """A kernel calls parts that stand in other files of its folder."""
    for name in ("kernel", "part"):
        (tmp_path / f"{name}.py").write_text(f"name = {name!r}\n")

    def stamp() -> str:
        return FolderLocator.from_function(stamp, str(tmp_path / "kernel.py")).get_source_stamp()

    with mock.patch.object(numba.config, "CACHE_DIR", str(tmp_path / "cache")):
        before = stamp()
        assert stamp() == before
        (tmp_path / "part.py").write_text("name = 'other'\n")
        assert stamp() != before


def test_machine_code_of_other_modules_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index that another release wrote names modules that are gone, and numba unpickles it before it looks at it."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    (tmp_path / "kernel.py").write_text("name = 'kernel'\n")

    def path() -> str:
        return FolderLocator.from_function(add, str(tmp_path / "kernel.py")).get_cache_path()

    before = path()
    assert path() == before
    with mock.patch.object(Path, "glob", return_value=[Path("calls.py"), Path("alone.py")]):
        assert path() != before


def test_machine_code_lies_in_the_cache_and_not_beside_the_source(cache):
    """numba runs what it finds in its cache."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("NUMBA_CACHE_DIR", None)
    code = (
        "from megasnn.kernels.numba.jit import kernel; from megasnn.common.grid import micro_batch_sizes\n"
        "import numba\n"
        "print(kernel(micro_batch_sizes).stats.cache_path, repr(numba.config.CACHE_DIR))"
    )
    run = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert run.stdout.startswith(str(cache / "numba")) and run.stdout.endswith("''\n")


def add(x, first, last):
    for i in range(first, last):
        x[i] += 1


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """The kernel as another process would have it."""
    monkeypatch.setenv("MEGASNN_CACHE", str(tmp_path))
    # Both: numba reads its environment anew when that has changed.
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "numba"))
    return lambda: kernel(add)


def added(function: Any, dtype: str) -> float:
    x = np.zeros(9, dtype)
    run_kernel(function, 9, x)
    return float(x.sum())


def test_a_number_and_its_noun() -> None:
    assert [quantity(number, "rank") for number in (0, 1, 2)] == ["0 ranks", "1 rank", "2 ranks"]
    assert quantity(2, "micro-batch") == "2 micro-batches" and quantity(2, "entry") == "2 entries"


def test_no_message_leaves_the_plural_to_the_reader() -> None:
    root = Path(__file__).parents[2]
    sources = [*(root / "megasnn").rglob("*.py"), *(root / "tools").rglob("*.py")]
    assert len(sources) > 200
    left = [path.name for path in sources if re.search(r"\w\((s|es)\)", path.read_text().replace("http(s)", ""))]
    assert left == []


def test_machine_code_is_found_again(compiled, capsys: pytest.CaptureFixture[str]) -> None:
    assert added(compiled(), "f4") == 9
    second = compiled()
    with mock.patch("megasnn.kernels.numba.jit.FileLock", side_effect=AssertionError("nobody waits for a lock")):
        assert added(second, "f4") == 9 and sum(second.stats.cache_hits.values()) == 1
    assert capsys.readouterr().err.count("compiling") <= 1


def test_machine_code_that_cannot_be_saved_is_run(compiled) -> None:
    full = mock.patch.object(FunctionCache, "save_overload", side_effect=OSError(28, "No space left on device"))
    with full as saved, torch_threads(3):
        assert added(compiled(), "f4") == 9 and saved.called
