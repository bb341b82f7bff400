"""Recordings in the formats and folders of the data sets, written from random events."""

from __future__ import annotations

from pathlib import Path

import numpy as np

AEDAT2_HEADER = b"#!AER-DAT2.0\r\n# This is a raw AE data file\r\n# created for a test\r\n"
AEDAT3_HEADER = b"#!AER-DAT3.1\r\n#Format: RAW\r\n#Source 1: DVS128\r\n#!END-HEADER\r\n"


def random_events(seed: int, count: int = 300, side: int = 128, start: int = 0, duration: int = 100_000) -> np.ndarray:
    """int64 `[4, count]`: t, x, y, p."""
    random = np.random.default_rng(seed)
    t = start + np.sort(random.integers(0, duration, count))
    return np.stack([t, *random.integers(0, side, (2, count)), random.integers(0, 2, count)])


def aedat2(events: np.ndarray) -> bytes:
    """As CIFAR10-DVS has them: see megasnn.events.aedat2."""
    t, x, y, p = events
    address = (127 - x) << 8 | (127 - y) << 1 | (1 - p)
    return AEDAT2_HEADER + np.stack([address, t], axis=1).astype(">u4").tobytes()


def aedat3(events: np.ndarray) -> bytes:
    """As DVS128 Gesture has them, in one packet."""
    t, x, y, p = events
    packet = np.array([1, 1], "<i2").tobytes() + np.array([8, 4, 0, len(t), len(t), len(t)], "<i4").tobytes()
    words = np.stack([x << 17 | y << 2 | p << 1 | 1, t], axis=1).astype("<u4")
    return AEDAT3_HEADER + packet + words.tobytes()


def five_bytes(events: np.ndarray) -> bytes:
    """As N-MNIST has them."""
    t, x, y, p = events
    return np.stack([x, y, p << 7 | t >> 16, t >> 8 & 255, t & 255], axis=1).astype(np.uint8).tobytes()


def cifar10_dvs(folder: Path, classes: tuple[str, ...] = ("airplane", "bird"), each: int = 10) -> Path:
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for number in range(each):
            events = aedat2(random_events(100 * label + number))
            (folder / name / f"cifar10_{name}_{number}.aedat").write_bytes(events)
    return folder


def n_mnist(folder: Path, digits: int = 3, each: int = 4) -> Path:
    for split in ("Train", "Test"):
        for digit in range(digits):
            (folder / split / str(digit)).mkdir(parents=True)
            for number in range(each):
                events = five_bytes(random_events(10 * digit + number, side=34))
                (folder / split / str(digit) / f"{split[:2]}{number:05d}.bin").write_bytes(events)
    return folder


def dvs128_gesture(folder: Path) -> Path:
    """Two recordings for training and one for testing, each with three clips; the last 20 ms belong to none."""
    folder.mkdir(parents=True)
    for number, (name, split) in enumerate([("user01_led", "train"), ("user02_lab", "train"), ("user24_led", "test")]):
        (folder / f"{name}.aedat").write_bytes(aedat3(random_events(number, 900, start=5000)))
        lines = ["class,startTime_usec,endTime_usec", "2,5000,30000", "1,30000,60000", f"{9 + number},60000,85000"]
        (folder / f"{name}_labels.csv").write_text("\n".join(lines) + "\n")
        with open(folder / f"trials_to_{split}.txt", "a") as trials:
            trials.write(f"{name}.aedat\n")
    return folder
