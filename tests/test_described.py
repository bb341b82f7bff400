"""JSON from files: read with every field checked, or refused with file, field and value."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from pydantic import with_config

from megasnn.files.described import STRICT, Count, DescriptionError, FreeForm, described, open_regular, read_bounded


@with_config(STRICT)
@dataclass(frozen=True)
class Whole:
    size: Count
    parts: dict[str, list[float]]
    extra: FreeForm


GOOD = '{"size": 5, "parts": {"w": [1.5, 2.0]}, "extra": {"note": [1, null, "x"]}}'


def test_what_is_right_is_read():
    assert described(Whole, GOOD.encode(), "it.json") == Whole(5, {"w": [1.5, 2.0]}, {"note": [1, None, "x"]})


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("5", "-5", "size.*-5"),
        ("5", '"5"', "size"),
        ("5", "1" * 5000, "."),
        ('"size": 5, ', "", "size"),
        ('"size": 5', '"size": 5, "more": 1', "more"),
        ('"size": 5', '"size": 5, "size": 6', "size.*twice"),
        ("1.5", "NaN", "NaN"),
        ("1.5", "1e999", "w.0"),
        ("null", "Infinity", "Infinity"),
        ('{"note"', '{"a": ' + "[" * 9000 + "]" * 9000 + ', "note"', "."),
        ("}}", "}", "."),
        ("}}", '}, "steer\\u001b": 1}', r"steer\\x1b"),
    ],
)
def test_what_is_wrong_names_file_and_field(old, new, named):
    with pytest.raises(DescriptionError, match=f"(?s)^it.json: .*{named}") as caught:
        described(Whole, GOOD.replace(old, new, 1).encode(), "it.json")
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()


def test_only_plain_files_of_usual_size_are_read(tmp_path):
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 1 << 30)
    with open_regular(tmp_path / "large") as stream, pytest.raises(DescriptionError, match="large"):
        read_bounded(stream, tmp_path / "large")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path):
        with pytest.raises(OSError):
            open_regular(path)
