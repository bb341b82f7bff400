"""Flags: Megatron's names, help from the fields' texts, and mistakes told in one sentence before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest

import pretrain_spikformer
from megasnn import pretrain
from megasnn.checkpoint.save import save_global_tensors
from megasnn.config import ConfigError, PretrainConfig, parse
from megasnn.config.checks import help_texts
from megasnn.config.cli import ORDER, flag_names
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.models.spikformer.model import Spikformer
from tools import flags as flag_page

ROOT = Path(__file__).parents[2]


def cli(*argv: str) -> PretrainConfig:
    return parse(run_config(Spikformer), argv)


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_flags_are_flat_and_megatrons() -> None:
    config = cli(
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-layout", "1|2|2|1"),
        *("--micro-batch-size=4", "--train-iters", "7", "--lr", "3e-4", "--save", "out", "--async-save"),
    )
    assert config.parallel.tensor_model_parallel_size == 2 and config.parallel.layout == (1, 2, 2, 1)
    assert (config.training.micro_batch_size, config.training.train_iters) == (4, 7)
    assert config.optimizer.lr == 3e-4 and config.checkpoint.save == "out" and config.checkpoint.async_save
    assert cli() == run_config(Spikformer)()
    # the last one wins, and switches have a negative form
    assert not cli("--no-shuffle").data.shuffle and not cli("--no-decay-input").neuron.decay_input
    assert cli("--no-shuffle", "--shuffle").data.shuffle
    assert cli("--depth", "2", "--depth", "3").model.depth == 3
    assert cli("--patch-size", "16").model.patch_size == 16


def test_a_neuron_without_reset_can_be_said() -> None:
    assert cli("--v-reset", "None").neuron.v_reset is None


@pytest.mark.parametrize("model", MODELS)
def test_help_has_every_flag_with_its_text_and_default(capsys: pytest.CaptureFixture[str], model: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(run_config(MODELS[model]), ["--help"])
    text = printed(capsys)
    assert stopped.value.code == 0 and "None}" not in text and "--no-no-" not in text
    assert (places := [text.index(f" {part} options: ") for part in ORDER]) == sorted(places)
    config = run_config(MODELS[model])()
    for part, names in flag_names(type(config)).items():
        texts = help_texts(type(getattr(config, part)))
        unused = MODELS[model].unused if part == "model" else ()
        for name in names:
            # A switch has its opposite behind a comma.
            is_shown = any(f" --{name.replace('_', '-')}{end}" in text for end in (" ", ","))
            assert is_shown == (name not in unused) and texts[name] and "\n" not in texts[name], name
    assert "Ranks that share every layer, by channels and heads. (default: 1)" in text and "--lr FLOAT" in text


def test_a_flag_without_meaning_for_the_model_is_refused() -> None:
    config = parse(run_config(MODELS["spike_lm"]), ["--image-size", "64"])
    assert config.model.problems(tensor_parallel=1) == ["--image-size 64: spike_lm has no use for it; leave it out"]


# A command line, and what its one sentence names.
MISTAKES = {
    "--lr -1": ["--lr", "-1"],
    "--lr nan": ["--lr", "nan"],
    "--lr fast": ["--lr", "fast"],
    "--lrr 3": ["--lrr", "is it --lr?"],
    "--micro-batch 4": ["--micro-batch", "is it --micro-batch-size?"],
    "3": ["'3'"],
    "--micro-batch-size 0": ["--micro-batch-size", "0", "1"],
    "--label-smoothing 1": ["--label-smoothing", "1"],
    "--crop-scale 1.5": ["--crop-scale", "1.5"],
    "--center-crop 0": ["--center-crop", "0"],
    "--memory-budget inf": ["--memory-budget", "inf"],
    "--pipeline-schedule zigzag": ["--pipeline-schedule", "zigzag", "zbv"],
    "--patch-size 8": ["--patch-size", "8", "16"],
    "--v-reset no": ["--v-reset", "no"],
    "--precision fp16": ["--precision fp16", "loss scaling", "bf16"],
    "--data-path=": ["--data-path"],
    "--lr": ["--lr"],
    "--depth 0": ["--depth", "0"],
    "--mlp-ratio 0": ["--mlp-ratio", "0"],
    "--shuffle=3": ["--shuffle"],
    "--data-path a.tar b.tar c.tar": ["b.tar", "quotes"],
    "--data-path=a.tar --data-path=b.tar": ["--data-path", "quotes"],  # the last one would win
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_one_sentence_and_status_2(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert pretrain_spikformer.main(["--train-iters", "2", *flags.split()]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and all(part in told for part in MISTAKES[flags]), told


def test_it_is_refused_at_once_before_torch_is_imported(tmp_path: Path) -> None:
    save_global_tensors(tmp_path, {}, model="spikformer", config={"model": {"depth": 10**15}, "neuron": {"tau": 0.5}})
    mistakes = {
        "--lr -1": "--lr",
        "--num-heads 5": "--num-heads 5",
        "--config absent": "--config",
        f"--train-iters 2 --load {tmp_path}": "--tau 0.5 must be greater than 1",
    }
    run = "print(p.main(flags.split()), 'torch' in sys.modules)"
    program = f"import sys, pretrain_spikformer as p\nfor flags in {[*mistakes]}:\n    {run}"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout.splitlines().count("2 False") == len(mistakes) and "Traceback" not in ended.stderr
    assert all(told in ended.stderr for told in mistakes.values())


def test_in_a_notebook_flags_are_given_as_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    """`sys.argv` is that of the kernel there."""
    monkeypatch.setattr(sys, "argv", ["/lib/ipykernel_launcher.py", "-f", "/run/kernel-1.json"])
    with pytest.raises(ValueError, match="argv="):
        pretrain(Spikformer)


def test_names_that_are_not_utf8_are_written_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under most locales Python refuses to write them, and a run would end where it names what it has saved."""
    stream = TextIOWrapper(BytesIO(), encoding="utf-8", errors="strict")
    monkeypatch.setattr(sys, "stdout", stream)
    assert pretrain(Spikformer, argv=["--depth", "0"]) == 2
    print("caf\udce9", flush=True)
    assert stream.buffer.getvalue() == b"caf\xe9\n"


def test_errors_of_several_values_are_a_list() -> None:
    with pytest.raises(ConfigError) as refused:
        cli("--lr", "0", "--seed", "-1", "--depth", "x")
    assert [problem.split()[0] for problem in refused.value.problems] == ["--depth", "--lr", "--seed"]
    assert str(refused.value).count("\n") == 3


def test_the_page_of_flags_is_that_of_the_parser() -> None:
    """Written anew by `python tools/flags.py > docs/flags.md`."""
    assert (ROOT / "docs" / "flags.md").read_text() == flag_page.page()
