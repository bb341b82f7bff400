"""Command lines put together at random are accepted, or refused with a message: no traceback, nothing that hangs."""

from __future__ import annotations

import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from megasnn.commands import convert_checkpoint
from megasnn.config import ConfigError, parse, validate
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
Program = Callable[[Sequence[str]], object]


def pretrain(model: str) -> Program:
    def run(argv: Sequence[str]) -> None:
        validate(parse(run_config(MODELS[model]), argv), 2 ** (len(argv) % 4))

    return run


# Commands in front of the flags; what they read is not there.
PROGRAMS: dict[str, tuple[Program, tuple[str, ...]]] = {
    "spikformer": (pretrain("spikformer"), ("",)),
    "vgg": (pretrain("vgg_dvs"), ("",)),
    "convert": (
        convert_checkpoint.main,
        ("inspect absent", "verify absent", "reshard --load absent --save new", "export --load absent --output x.pt"),
    ),
}


def flags(program: Program, command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit):
        program([*command.split()[:1], "--help"])
    return sorted(set(re.findall(r"--[a-z][a-z0-9-]+", capsys.readouterr().out)))


def command_line(known: list[str], command: str, chance: random.Random) -> list[str]:
    argv = command.split()
    for _ in range(chance.choice((1, 1, 2, 4))):
        flag = chance.choice(known)
        argv += [flag[: chance.randrange(1, len(flag))] if chance.random() < 0.03 else flag]
        if chance.random() < 0.9:
            argv.append(chance.choice(PLAIN if chance.random() < 0.6 else ODD))
    if chance.random() < 0.1:
        chance.shuffle(argv)
    return argv


def too_long(number: int, frame: object) -> None:
    raise TimeoutError("takes too long")


@pytest.mark.parametrize("name", PROGRAMS)
def test_accepted_or_refused_with_a_message(name, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for stream in (sys.stdout, sys.stderr):  # as in a program
        stream.reconfigure(errors="backslashreplace")
    program, commands = PROGRAMS[name]
    known = {command: flags(program, command, capsys) for command in commands}
    chance, ends = random.Random(name), Counter[str]()
    previous = signal.signal(signal.SIGPROF, too_long)
    deadline = time.process_time() + SECONDS
    try:
        while time.process_time() < deadline:
            command = chance.choice(commands)
            argv = command_line(known[command], command, chance)
            signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
            try:
                ends["refused" if program(argv) else "accepted"] += 1
            except (SystemExit, ConfigError, ValueError) as refusal:  # whoever calls it prints an error's words
                assert str(refusal)
                ends["refused" if getattr(refusal, "code", 2) else "help"] += 1
            except BaseException as error:
                pytest.fail(f"{[text[:60] for text in argv]}: {type(error).__name__}: {str(error)[:300]}")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            assert "Traceback" not in capsys.readouterr().err, argv
    finally:
        signal.signal(signal.SIGPROF, previous)
    assert ends["refused"], ends
