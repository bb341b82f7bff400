"""Files are read with sizes and fields checked, or refused by name."""

from __future__ import annotations

import io
import os
from dataclasses import dataclass

import numpy as np
import pytest
from pydantic import with_config

from megasnn.files import STRICT, Count, DescriptionError, FreeForm, described, read_arrays, read_file


@with_config(STRICT)
@dataclass(frozen=True)
class Parts:
    size: Count
    parts: dict[str, list[float]]
    extra: FreeForm


GOOD = '{"size": 5, "parts": {"w": [1.5, 2.0]}, "extra": {"note": [1, null, "x"]}}'


@pytest.mark.parametrize(("old", "new", "named"), [
    ("5", "-5", "size.*-5"),
    ("5", '"5"', "size"),
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
