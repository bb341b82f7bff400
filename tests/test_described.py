"""Descriptions from strangers: read with every field checked, or refused with file, field and value."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import with_config

from megasnn.files.described import (
    STRICT,
    Count,
    Crc32,
    DescriptionError,
    DtypeName,
    FreeForm,
    PlainName,
    Shape,
    described,
    open_regular,
    open_within,
    read_described,
)


@with_config(STRICT)
@dataclass(frozen=True)
class Part:
    file: PlainName
    size: Count
    crc32: Crc32
    shape: Shape = ()
    dtype: DtypeName = "float32"
    scale: float = 1.0


@with_config(STRICT)
@dataclass(frozen=True)
class Whole:
    parts: dict[str, Part]
    extra: FreeForm


PART = '{"file": "a.bin", "size": 5, "crc32": "0123abcd"'
GOOD = '{"parts": {"w": ' + PART + ', "shape": [2, 3]}}, "extra": {"note": [1, null, "x"]}}'


def with_part(rest: str) -> str:
    return '{"parts": {"w": ' + rest + '}, "extra": {}}'


def test_what_is_right_is_read(tmp_path):
    (tmp_path / "it.json").write_text(GOOD)
    read = read_described(Whole, tmp_path / "it.json")
    assert read == Whole({"w": Part("a.bin", 5, "0123abcd", (2, 3))}, {"note": [1, None, "x"]})


@pytest.mark.parametrize(
    ("content", "field", "value"),
    [
        (with_part(PART.replace("5", "-1") + "}"), "parts.w.size", "-1"),
        (with_part(PART.replace("5", "null") + "}"), "parts.w.size", "None"),
        (with_part(PART.replace("5", '"5"') + "}"), "parts.w.size", "'5'"),
        (with_part(PART.replace("5", "true") + "}"), "parts.w.size", "True"),
        (with_part(PART.replace("5", str(2**70)) + "}"), "parts.w.size", str(2**70)),
        (with_part(PART.replace("5", "5" * 5000) + "}"), "size", "'55555"),
        (with_part(PART.replace("5", "NaN") + "}"), "size", "NaN"),
        (with_part(PART + ', "scale": 1e999}'), "scale", "inf"),
        (with_part(PART + ', "unknown": 3}'), "parts.w.unknown", "3"),
        (with_part('{"file": "a.bin", "crc32": "0123abcd"}'), "parts.w.size", ""),
        (with_part(PART + ', "size": 6}'), "size: this field is there twice", ""),
        (with_part(PART.replace("0123abcd", "0123ABCDEF") + "}"), "parts.w.crc32", "0123ABCDEF"),
        (with_part(PART + ', "dtype": "qint8"}'), "parts.w.dtype", "qint8"),
        (with_part(PART + ', "shape": [2, 3.0]}'), "parts.w.shape[1]", "3.0"),
        (with_part(PART + ', "shape": [4294967296, 4294967296]}'), "parts.w.shape", "4294967296"),
        *(
            (with_part(PART.replace("a.bin", name) + "}"), "parts.w.file", "")
            for name in ("", ".", "..", "../a", "/dev/zero", "a/b", "a\\u0000b", "x" * 300)
        ),
        ('{"parts": [], "extra": {}}', "parts", "[]"),
        ('{"parts": {}, "extra": {"a": [NaN]}}', "a", "NaN"),
        ('{"parts": {}, "extra": {"a": [[NaN]]}}', "a", "NaN"),
        ('{"parts": {}, "extra": {"a": [3, [-1e999]]}}', "a", "-inf"),
        ('{"parts": {}, "extra": {"a": [[' + "5" * 5000 + "]]}}", "a", "'55555"),
        ("[" * 100_000, "", ""),
        ("[]", "the file", "[]"),
        ("[[NaN]]", "the file", "NaN"),
        ("", "", ""),
        (b'{"parts": {}, "extra": {"\xff": 1}}', "", "0xff"),
        ('{"parts": {}, "extra": {"a": "\\ud800"}}', "", ""),
    ],
)
def test_what_is_wrong_names_file_field_and_value(tmp_path, content: str | bytes, field, value):
    (tmp_path / "it.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DescriptionError) as raised:
        read_described(Whole, tmp_path / "it.json")
    text = str(raised.value)
    assert f"{tmp_path / 'it.json'}: {field}" in text and value in text and "take it from its source" in text
    assert len(text) < 600


def test_control_characters_of_a_stranger_do_not_reach_the_terminal():
    with pytest.raises(DescriptionError) as raised:
        described(Whole, b'{"parts": {"\\u001b[2J": 3}, "extra": {}}', "it.json")
    assert "\x1b" not in str(raised.value)


def test_a_description_of_absurd_size_is_not_read(tmp_path):
    with open(tmp_path / "it.json", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DescriptionError, match=f"it.json has {1 << 40} bytes"):
        read_described(Whole, tmp_path / "it.json")


ALL_WRONG = """
import resource
from tests.test_described import Whole
from megasnn.files.described import DescriptionError, described

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for content in (
    b'{"parts": {' + b",".join(b'"%d":0' % i for i in range(999_000)) + b'}, "extra": {}}',
    b'{"parts": {}, "extra": {"a": [' + b",".join(b"[]" for _ in range(499_000)) + b']}, "b": 4}',
    b'{"parts": {}, "extra": {"a": [' + b",".join(b"[]" for _ in range(5_000_000)) + b"]}}",
):
    try:
        described(Whole, content, "it.json")
        raise SystemExit("it was read")
    except DescriptionError as error:
        assert len(str(error)) < 600
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_what_is_wrong_in_every_field_takes_bounded_memory():
    done = subprocess.run([sys.executable, "-c", ALL_WRONG], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 700 << 10  # kilobytes


def a_link(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def a_pipe(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path, outside: Path) -> None:
    path.mkdir()


def a_socket(path: Path, outside: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(os.path.relpath(path))


@pytest.mark.parametrize("make", [a_link, a_pipe, a_folder, a_socket])
def test_only_plain_files_of_the_folder_are_opened(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outside.json").write_text(GOOD)
    (tmp_path / "inside").mkdir()
    path = tmp_path / "inside" / "it.json"
    make(path, tmp_path / "outside.json")
    with pytest.raises(DescriptionError, match=r"cannot read .*it\.json"):
        read_described(Whole, path)
    with pytest.raises(OSError, match=r"it\.json"):
        open_within(tmp_path / "inside", "it.json")
    for name in ("../outside.json", str(tmp_path / "outside.json"), "..", ""):
        with pytest.raises(OSError, match="no name of a file"):
            open_within(tmp_path / "inside", name)


def test_a_link_that_the_user_named_is_followed_a_device_is_not_read(tmp_path):
    (tmp_path / "it.json").write_text(GOOD)
    (tmp_path / "link").symlink_to(tmp_path / "it.json")
    with open_regular(tmp_path / "link") as stream:
        assert stream.read() == GOOD.encode()
    with pytest.raises(OSError, match="no regular file"):
        open_regular(Path("/dev/zero"))
