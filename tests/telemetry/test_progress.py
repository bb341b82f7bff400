from __future__ import annotations

import io
import sys

from megasnn.telemetry.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_there_are_only_lines(capsys):
    with Progress(total=3) as progress:
        progress.advance(loss=1.0)
        progress.line("one")
    out, err = capsys.readouterr()
    assert (out, err) == ("one\n", "")


def test_quiet_ranks_say_nothing(capsys, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with Progress(total=3, quiet=True) as progress:
        progress.advance()
        progress.line("one")
    assert capsys.readouterr().out == "" and screen.getvalue() == ""


def test_bar_continues_where_the_run_was_and_steps_aside_for_lines(monkeypatch):
    screen = Terminal()  # a terminal shows both streams, so both are the same object here
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    with Progress(total=10, done=4) as progress:
        progress.line("a line")
        progress.advance(loss="0.5")
    shown = screen.getvalue()
    assert "4/10" in shown and "5/10" in shown and "loss=0.5" in shown
    before, after = shown.split("a line\n")
    assert before.endswith("\r"), "the bar must be wiped before the line"
    assert "4/10" in after, "the bar must come back below the line"
