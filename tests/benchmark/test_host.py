"""The benchmark of the host: its parts add up, every substitute is hit, and another checkout is measured beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.triton_process import without_triton
from tools.benchmark.__main__ import main
from tools.benchmark.host_marks import Label, Marks, Meter
from tools.benchmark.host_places import replaced, resolved
from tools.benchmark.host_rank import PARTS
from tools.benchmark.host_substitutes import without_computing

ROOT = Path(__file__).resolve().parents[2]
VGG_CONVOLUTIONS = 8
BLOCKS, UNITS_OF_STEM, UNITS_OF_BLOCK = 8, 5, 4


def rows_of(tmp_path: Path, *flags: str) -> list[dict[str, Any]]:
    log = tmp_path / "log"
    assert main(["--host", *flags, "--rounds", "1", "--steps", "2", "--output", str(log)]) == 0
    return [json.loads(line) for line in log.read_text().splitlines()]


def require_sums(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["all"] == pytest.approx(sum(row[part] for part in PARTS)), row["measure"]
        assert all(row[part] > 0 for part in PARTS if part != "attention"), row["measure"]


@without_triton
def test_a_checkout_beside_itself(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--models", "vgg_dvs", "--rows", "tp2", "--tree", str(ROOT))
    here, tree, compared = rows[:3], rows[3:6], rows[6:]
    require_sums(here + tree)
    assert [row["measure"] for row in here] == ["ms", "calls", "C calls"]
    assert [row["of"] for row in compared] == ["here / tree"] * 3
    assert compared[0]["all"]["median"] > 0
    for ours, theirs, ratio in zip(here[1:], tree[1:], compared[1:], strict=True):
        assert [ours[part] for part in PARTS] == [theirs[part] for part in PARTS]
        assert ratio["all"] == ratio["executor"] == 1 and ratio["attention"] is None
    # A convolution has two gradients; the first one's input needs none.
    assert here[1]["convolutions"] == 3 * VGG_CONVOLUTIONS - 1
    assert here[1]["launches"] > 2 * VGG_CONVOLUTIONS and here[1]["products"] > 0 < here[0]["own"]


@without_triton
def test_recompute_computes_twice(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--models", "spikformer", "--rows", "one", "recompute")
    once, again = rows[:3], rows[3:]
    require_sums(rows)
    units = UNITS_OF_STEM + BLOCKS * UNITS_OF_BLOCK
    assert once[1]["convolutions"] == 3 * units - 1 and again[1]["convolutions"] == 4 * units - 1
    assert once[1]["attention"] > 0
    assert again[1]["unit_forward"] > 1.5 * once[1]["unit_forward"]
    assert again[1]["weight_gradients"] == once[1]["weight_gradients"]


@without_triton
def test_a_kernel_without_a_substitute_is_refused() -> None:
    from megasnn.kernels.triton.codec import pack_bits_kernel

    meter, a = Meter(("step", False)), torch.ones(2, 2)
    with without_computing(meter):
        assert (a @ a).shape == (2, 2) and meter.substituted == {"products": 1}
        with pytest.raises(RuntimeError, match="pack_bits_kernel was started"):
            pack_bits_kernel[(1,)](a, a, None, 4, BLOCK=8)
        with pytest.raises(RuntimeError, match="aten::mv has no substitute"):
            a @ a[0]
    assert torch.equal(a @ a, 2 * a)


class Recorded:
    """A recorder of labels."""

    def __init__(self) -> None:
        self.label: Label = ("around", False)
        self.labels: list[Label] = []

    def pause(self) -> None:
        pass

    def enter(self, label: Label) -> None:
        self.label = label
        self.labels.append(label)


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Pair(nn.Module):
    """A module that begins with another one and goes on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).exp()


def test_marks_follow_modules_within_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorded()
    marks = Marks(recorder)
    for kind in (Scaled, Pair):
        monkeypatch.setattr(kind, "forward", marks.marked(kind.forward, lambda module: type(module).__name__))
    y = Pair()(torch.ones(2, requires_grad=True) + 1)
    of_forward = [("Pair", False), ("Scaled", False), ("Pair", False), ("around", False)]
    assert recorder.labels == of_forward
    recorder.labels.clear()
    y.sum().backward()
    assert recorder.labels[:2] == [("Pair", True), ("Scaled", True)]
    assert set(recorder.labels[2:]) == {("around", True)}


def test_a_place_is_the_first_path_that_exists() -> None:
    from megasnn.kernels import layout

    paths = "megasnn.nowhere.layout:empty", "megasnn.kernels.layout:nothing", "megasnn.kernels.layout:empty"
    assert resolved(paths) == (layout, "empty")
    with pytest.raises(LookupError, match=r"megasnn\.nowhere\.layout:empty or .*layout:nothing: put its new place"):
        resolved(paths[:2])


def test_a_replacement_stands_wherever_a_function_was_imported() -> None:
    from megasnn.kernels import layout
    from megasnn.parallel import collectives

    before = layout.empty
    with replaced(("megasnn.kernels.layout:empty",), None):
        assert layout.empty is collectives.empty is None
    assert layout.empty is collectives.empty is before


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--tree", "nowhere"], "--tree nowhere is no checkout"), (["--steps", "0"], "--steps must be at least 1")],
)
def test_flags_without_sense(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--host", *flags]) == 2 and named in capsys.readouterr().err
