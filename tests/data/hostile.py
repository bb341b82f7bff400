"""Files that were made to take the machine, or to run code: a small one each, and what reads it."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megasnn.data.dataset import ShardDataset
from megasnn.data.event_files import FrameSettings
from megasnn.data.event_frames import EventFormat
from megasnn.data.images import ImageFormat
from megasnn.data.open import _KINDS
from megasnn.data.shards import open_shard
from megasnn.events import read_recording
from tests.data.shard_files import image_file, write_shard
from tests.events import files

KEY = "victim"
PIXELS = np.zeros((8, 8, 3), np.uint8)


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, array)
    return buffer.getvalue()


def npy_header(shape: object, dtype: str = "<f8", padding: int = 0) -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".encode() + b" " * padding + b"\n"
    return b"\x93NUMPY\2\0" + struct.pack("<I", len(text)) + text


def npz(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def zeros(megabytes: int) -> bytes:
    """A raw deflate stream of zeros, a kilobyte for each megabyte."""
    packer = zlib.compressobj(9, wbits=-15)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    return block * megabytes + packer.flush()


def zip_bomb(megabytes: int, declared: int) -> bytes:
    """frames.npy of so many zeros, with any size in its headers."""
    content, name = zeros(megabytes), b"frames.npy"
    common = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 0, 0, len(content), declared, len(name), 0)
    local = b"PK\3\4" + common + name + content
    central = b"PK\1\2" + struct.pack("<H", 20) + common + struct.pack("<HHHII", 0, 0, 0, 0, 0) + name
    return local + central + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)


def events(**changes: object) -> bytes:
    fields: dict[str, object] = {"t": [1, 2], "x": [0, 1], "y": [0, 1], "p": [0, 1], "height": 34, "width": 34}
    return npz(**{name: npy(np.asarray(value)) for name, value in (fields | changes).items()})


class Runs:
    """Unpickling it makes a file."""

    def __init__(self, decoy: Path) -> None:
        self.decoy = decoy

    def __reduce__(self):
        return os.mkdir, (str(self.decoy),)


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"\x78\x9c" + zeros(1)) + chunk(b"IEND", b"")


def webp(width: int, height: int) -> bytes:
    size = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\2\0\0\0" + size
    return b"RIFF" + struct.pack("<I", len(body)) + body


def jpeg(width: int, height: int) -> bytes:
    data = bytearray(image_file(PIXELS, "JPEG"))
    struct.pack_into(">HH", data, data.index(b"\xff\xc0") + 5, height, width)
    return bytes(data)


def samples(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Contents of a sample's file that cannot be decoded, by what is wrong with them."""
    objects = np.array([Runs(folder / "run"), None], object)
    buffer = io.BytesIO()
    np.save(buffer, objects, allow_pickle=True)
    frames, nan = np.zeros((4, 2, 8, 8), np.float32), np.zeros((4, 2, 8, 8), np.float32)
    nan[1, 0, 3, 3] = np.nan
    return {
        "npz of 3 GB": ("frames.npz", zip_bomb(3000, 3000 << 20)),
        "npz of 1 GB that declares little": ("frames.npz", zip_bomb(1000, 5000)),
        "npz with 100,000 members": ("frames.npz", b"PK\1\2" * 100_000 + npz(frames=npy(frames))),
        "npy of 8 TB": ("frames.npz", npz(frames=npy_header((10**12,)))),
        "npy of a negative size": ("frames.npz", npz(frames=npy_header((-1, 2, 4, 4)))),
        "npy whose size overflows": ("frames.npz", npz(frames=npy_header((2**32, 2**32)))),
        "npy of nothing, very often": ("frames.npz", npz(frames=npy_header((2**62, 2**62, 0)))),
        "npy with a shape of truth values": ("frames.npz", npz(frames=npy_header((True, True)))),
        "npy with a large header": ("frames.npz", npz(frames=npy_header((1,), padding=8 << 20))),
        "npy with a deep header": ("frames.npz", npz(frames=npy_header("-" * 9000 + "1"))),
        "npy with large elements": ("frames.npz", npz(frames=npy_header((4, 2, 8, 8), "S1000000000"))),
        "objects": ("frames.npz", npz(frames=buffer.getvalue())),
        "objects in events": ("events.npz", npz(t=buffer.getvalue())),
        "frames with NaN": ("frames.npz", npz(frames=npy(nan))),
        "frames with infinity": ("frames.npz", npz(frames=npy(frames + np.inf))),
        "frames beyond float32": ("frames.npz", npz(frames=npy(frames.astype(float) + 1e300))),
        "frames of an absurd height": ("frames.npz", npz(frames=npy(np.zeros((4, 2, 3_000_000, 1), np.uint8)))),
        "empty frames": ("frames.npz", npz(frames=npy(np.zeros((4, 2, 0, 0), np.uint8)))),
        "sensor of 60,000 x 60,000": ("events.npz", events(height=60_000, width=60_000)),
        "sensor of 2^60 x 1": ("events.npz", events(height=2**60, width=1)),
        "sensor of a negative height": ("events.npz", events(height=-5)),
        "sensor whose height is an array": ("events.npz", events(height=np.zeros((7, 7), int))),
        "sensor whose height is a fraction": ("events.npz", events(height=3.5)),
        "times beyond 62 bits": ("events.npz", events(t=[-(2**62), 2**62])),
        "times beyond int64": ("events.npz", events(t=np.array([2**63, 2**63 + 5], np.uint64))),
        "PNG of 13,000 x 13,000": ("png", png(13_000, 13_000)),
        "PNG of 2^31 x 2^31": ("png", png(2**31 - 1, 2**31 - 1)),
        "JPEG of 65,500 x 65,500": ("jpg", jpeg(65_500, 65_500)),
        "WebP of 16,383 x 16,383": ("webp", webp(16_383, 16_383)),
        "PPM of 100,000 x 100,000": ("ppm", b"P6 100000 100000 255\n" + bytes(100)),
        "PNG cut": ("png", image_file(PIXELS)[:45]),
        "GIF called PNG": ("png", image_file(PIXELS, "GIF")),
        "TIFF called JPEG": ("jpg", image_file(PIXELS, "TIFF")),
    }


def header(name: str, size: int = 0, kind: bytes = tarfile.REGTYPE, field: bytes | None = None) -> bytes:
    """A header of a tar; `field` replaces its twelve bytes of size."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "target"
    data = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    data[124:136] = field or (size.to_bytes(12, "big") if size >= 8**11 else b"%011o\0" % size)
    if size >= 8**11 and field is None:
        data[124] |= 0x80
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data)
    return bytes(data)


def pax(records: dict[str, str], kind: bytes = tarfile.XHDTYPE) -> bytes:
    content = b""
    for key, value in records.items():
        record = f" {key}={value}\n".encode()
        length = len(record) + 1
        while length != len(str(length)) + len(record):
            length = len(str(length)) + len(record)
        content += str(length).encode() + record
    return header("pax", len(content), kind) + content + bytes(-len(content) % 512)


def sample_members(key: str, label: bytes = b"1") -> bytes:
    content = image_file(PIXELS)
    return b"".join(
        header(f"{key}.{suffix}", len(data)) + data + bytes(-len(data) % 512)
        for suffix, data in (("png", content), ("cls", label))
    )


END = bytes(1024)
NEGATIVE = b"\xff" * 10 + (-1536 & 0xFFFF).to_bytes(2, "big")


def tars() -> dict[str, bytes]:
    """Shards that cannot be used, by what is wrong with them."""
    good = sample_members("good")
    sparse = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "a.png", "GNU.sparse.realsize": "9"}
    many = {f"key{number}": "x" for number in range(500)}
    return {
        "attributes of 4 GB": good + header("pax", 4 << 30, tarfile.XHDTYPE) + END,
        "name of 4 GB": good + header("././@LongLink", 4 << 30, tarfile.GNUTYPE_LONGNAME) + END,
        "attributes of a negative size": good + header("pax", kind=tarfile.XHDTYPE, field=NEGATIVE) + END,
        "negative size": good + header("a.png", field=NEGATIVE) + END,
        "negative size in attributes": good + pax({"size": "-1536"}) + header("a.png") + END,
        "size of 2^70": good + header("a.png", 2**70) + END,
        "size of 2^70 in attributes": good + pax({"size": str(2**70)}) + header("a.png") + END,
        "size that is no number": good + pax({"size": "many"}) + header("a.png") + END,
        "5,000 attributes in a row": good + pax({"comment": "x"}) * 5000 + header("a.png") + END,
        "500 global attributes": pax(many, tarfile.XGLTYPE) + good + END,
        "sparse with 10^18 holes": good
        + pax(sparse)
        + header("a", 512)
        + b"1000000000000000000".ljust(512, b"\n")
        + END,
        "sparse of the old kind": good + header("a.png", 0, tarfile.GNUTYPE_SPARSE) + header("a.cls", 0) + END,
        "link": good + header("a.png", 0, tarfile.SYMTYPE) + header("a.cls", 0) + END,
        "hard link": good + header("a.png", 0, tarfile.LNKTYPE) + header("a.cls", 0) + END,
        "device": good + header("a.png", 0, tarfile.CHRTYPE) + header("a.cls", 0) + END,
        "pipe": good + header("a.png", 0, tarfile.FIFOTYPE) + header("a.cls", 0) + END,
        "name of 100,000 letters": good + pax({"path": "a" * 100_000 + ".png"}) + header("a.png") + END,
        "name that is not UTF-8": good.replace(b"good", b"go\xff\xfe") + END,
        "name with control characters": good.replace(b"good", b"go\x1b\x07") + END,
        "label of 100,000 digits": sample_members("good", b"1" * 100_000) + END,
        "label that goes on": sample_members("good", b"1".ljust(32) + b"7") + END,
        "label with an underscore": sample_members("good", b"1_0") + END,
    }


def recordings() -> dict[str, tuple[str, bytes]]:
    """Recordings that cannot be used, by what is wrong with them: the file's ending, and its content."""
    return {
        "AEDAT 2 with a header of 20 million lines": (".aedat", b"#!AER-DAT2.0\n" + b"#\n" * 20_000_000),
        "AEDAT 3 with room for 2^31 events": (
            ".aedat",
            files.aedat3([struct.pack("<hhiiiiii", 1, 1, 8, 4, 0, 2**31 - 1, 2**31 - 1, 0)]),
        ),
        "npy of 8 TB": (".npy", npy_header((10**12,))),
        "npz of 3 GB": (".npz", zip_bomb(3000, 3000 << 20)),
        "structured npy of objects": (".npy", npy_header((4,), "|O")),
    }


def read_sample(path: Path) -> None:
    """Decodes the samples of a shard."""
    shard = open_shard(path, tuple(_KINDS))
    image = set(shard.suffixes.tolist()) & {b"png", b"jpg", b"webp", b"ppm"}
    format = ImageFormat(8, 3) if image else EventFormat(FrameSettings(4, size=8))
    dataset = ShardDataset([shard], format, 10)
    for index in range(len(dataset)):
        dataset.sample(index)


def cases(folder: Path) -> dict[str, tuple[Callable[[Path], object], Path, str]]:
    """What reads it, the file, and what the error must name besides the file."""
    found: dict[str, tuple[Callable[[Path], object], Path, str]] = {}
    for number, (name, (suffix, data)) in enumerate(samples(folder).items()):
        path = write_shard(folder / f"sample{number}.tar", {KEY: {suffix: data, "cls": b"1"}})
        found[f"sample: {name}"] = read_sample, path, f"sample '{KEY}'"
    for number, (name, data) in enumerate(tars().items()):
        path = folder / f"shard{number}.tar"
        path.write_bytes(data)
        found[f"shard: {name}"] = read_sample, path, ""
    path = folder / "bomb.tar.gz"
    path.write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + zeros(300) + bytes(8))
    found["shard: tar.gz of 300 MB"] = read_sample, path, "--max-unpacked-gb"
    large = folder / "large.tar"
    large.write_bytes(header(f"{KEY}.png", 400 << 20))
    os.truncate(large, 512 + (400 << 20))
    with open(large, "ab") as file:
        file.write(header(f"{KEY}.cls", 1) + b"1".ljust(512, b"\0") + END)
    found["sample: file of 400 MB"] = read_sample, large, "--max-sample-mb"
    for number, (name, (ending, data)) in enumerate(recordings().items()):
        path = folder / f"recording{number}{ending}"
        path.write_bytes(data)
        found[f"recording: {name}"] = read_recording, path, ""
    path = folder / "holes.bin"
    path.touch()
    os.truncate(path, 1 << 40)
    found["recording: 1 TB of holes"] = read_recording, path, "--max-sample-mb"
    path = folder / "pipe.bin"
    os.mkfifo(path)
    found["recording: pipe"] = read_recording, path, ""
    (folder / "device.bin").symlink_to("/dev/zero")
    found["recording: device"] = read_recording, folder / "device.bin", ""
    return found
