"""Command lines put together at random are accepted, or refused with a message: no traceback, nothing that hangs."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from megasnn.commands.convert_checkpoint import main
from megasnn.config import ConfigError, parse, validate
from megasnn.config.checks import flag
from megasnn.config.cli import flag_names
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS

SECONDS = 1.0  # of the processor, for each program
MOST_SECONDS = 2  # of the processor, that one command line may take: what is refused is refused at once
PLAIN = ("1", "2", "3", "4", "8", "16", "0.5", "1e-3")
ODD = (
    *("", " ", "-", "--", "none", "None", "true", "nan", "inf", "-inf", "1e400", "1e-320", "0", "-1", "-0.0", "3.5"),
    *("9" * 5000, "99999999999999999999", "1000000000", "1e30", "0x10", "1_000", "\u0663", "\udcff", "\u00fc\u0308"),
    *("a\0b", "../absent", "/dev/null/x", "|", "1|2|-3", "8,P,P", "P", "auto", "zbv", "bf16", "%s", "{0..9}"),
    "a" * 100_000,
)
CONVERT = (
    *("--load absent", "--save new", "--output x.pt", "--tensor-model-parallel-size", "--placement", "--ema"),
    *("--pipeline-model-parallel-layout", "--names", "--input absent", "--tolerance"),
)


def command_line(known: list[str], chance: random.Random) -> list[str]:
    argv: list[str] = []
    for _ in range(chance.choice((1, 1, 2, 4))):
        given = chance.choice(known)
        argv += [given[: chance.randrange(1, len(given))]] if chance.random() < 0.03 else given.split()
        if chance.random() < 0.9:
            argv.append(chance.choice(PLAIN if chance.random() < 0.6 else ODD))
    if chance.random() < 0.1:
        chance.shuffle(argv)
    return argv


@pytest.mark.parametrize("name", ["spikformer", "vgg_dvs", "convert"])
def test_accepted_or_refused_with_a_message(name, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    chance, ends, known = random.Random(name), Counter[str](), [*CONVERT]
    if name != "convert":
        known = [flag(each) for names in flag_names(run_config(MODELS[name])).values() for each in names]
    deadline = time.process_time() + SECONDS
    while (began := time.process_time()) < deadline:
        argv = command_line(known, chance)
        try:
            if name == "convert":
                ends[
                    "refused" if main([chance.choice(["inspect", "reshard", "export", "diff"]), *argv]) else "done"
                ] += 1
            else:
                validate(parse(run_config(MODELS[name]), argv), 2 ** (len(argv) % 4))
        except (SystemExit, ConfigError) as refusal:
            assert str(refusal)
            ends["refused"] += 1
        assert time.process_time() - began < MOST_SECONDS, [text[:60] for text in argv]
        assert "Traceback" not in capsys.readouterr().err, argv
    assert ends["refused"], ends
