"""Names of rows, and what they make of the batch."""

from __future__ import annotations

import pytest

from megasnn.config.checks import ConfigError
from tools.benchmark.layouts_flags import LayoutBenchmark
from tools.benchmark.layouts_rows import Row, parse_row


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("spikingjelly", (1, 1, 1, 1, 1)),
        ("spikingjelly-compiled@2", (1, 1, 1, 1, 2)),
        ("megasnn@all", (1, 1, 1, 1, 4)),
        ("dp2", (2, 1, 1, 1, 1)),
        ("pp2", (1, 1, 2, 8, 1)),
        ("pp4:3@2", (1, 1, 4, 3, 2)),
        ("tp2dp3pp2", (3, 2, 2, 8, 1)),
        ("cp2", (1, 1, 1, 1, 1, 2)),
        ("cp2rows@2", (1, 1, 1, 1, 2, 2, "rows")),
        ("cp2tp2", (1, 2, 1, 1, 1, 2)),
        ("dp2zero1:2", (2, 1, 1, 2, 1, 1, "samples", True)),
    ],
)
def test_a_name_says_the_layout(name: str, row: tuple[int, ...]) -> None:
    assert parse_row(name, 8, 4) == Row(name, *row)


def test_compiling_is_no_neuron_of_spikingjelly() -> None:
    rows = [parse_row(name, 8, 4) for name in ("spikingjelly", "spikingjelly-compiled@2", "spikingjelly-triton@all")]
    assert [row.compiled for row in rows] == [False, True, False]
    assert [list(row.variables.values()) for row in rows] == [[], [], ["triton"]]


@pytest.mark.parametrize(
    "name",
    ["", "dp", "dp0", "xp2", "dp2dp2", "spikingjelly2", "dp2rows", "tp2zero1", "spikingjelly:4", "pp2@"],
)
def test_what_is_no_row_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="--rows"):
        parse_row(name, 8, 4)


def test_regimes_differ_in_the_batch_of_rows_of_several_ranks() -> None:
    dp2, pp2 = parse_row("dp2", 4, 1), parse_row("pp2", 4, 1)
    strong, weak = LayoutBenchmark(global_batch_size=8), LayoutBenchmark(regime="weak", global_batch_size=8)
    assert (strong.samples(dp2), strong.micro_batch_size(dp2)) == (8, 4)
    assert (weak.samples(dp2), weak.micro_batch_size(dp2)) == (16, 8)
    assert (weak.samples(pp2), weak.micro_batch_size(pp2)) == (16, 4)
    one = parse_row("megasnn", 4, 1)
    assert (weak.samples(one), strong.samples(one)) == (8, 8)


def test_everything_wrong_is_told_at_once() -> None:
    config = LayoutBenchmark(rows=("tp5", "pp2"), global_batch_size=4)
    with pytest.raises(ConfigError) as caught:
        config.check()
    assert "row tp5: --num-heads 12 must be a multiple of" in str(caught.value)
    assert "row pp2: 4 samples cannot be cut into 8 micro-batches" in str(caught.value)
    with pytest.raises(ConfigError, match="--depth 2, --patch-size 4: --model cifar10_dvs_vgg has no such dimension"):
        LayoutBenchmark(model="cifar10_dvs_vgg", depth=2, patch_size=4).check()
    LayoutBenchmark(rows=("cp2rows",), global_batch_size=1).check()
    with pytest.raises(
        ConfigError, match="row cp2: 1 samples in micro-batches of 1 leave one that 2 ranks cannot share"
    ):
        LayoutBenchmark(rows=("cp2",), global_batch_size=1).check()
    with pytest.raises(ConfigError, match="--rounds must be at least 1, got 0"):
        LayoutBenchmark(rounds=0).check()
