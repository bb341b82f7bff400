import importlib
from dataclasses import fields

import pytest

from megasnn.config import ConfigError, parse
from megasnn.config.help import ORDER, RARELY_USED, help_texts
from megasnn.models.model import run_config
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.models.vgg_dvs.dimensions import VggDvs


def cli(*argv: str) -> run_config(Spikformer):
    return parse(run_config(Spikformer), argv)


def test_without_flags_everything_has_its_default() -> None:
    assert cli() == run_config(Spikformer)()


def test_flags_are_flat_and_megatrons() -> None:
    config = cli(
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-layout", "1|2|2|1"),
        *("--micro-batch-size=4", "--train_iters", "7", "--lr", "3e-4", "--save", "out", "--no-load-optim"),
    )
    assert config.parallel.tensor_model_parallel_size == 2
    assert config.parallel.layout == (1, 2, 2, 1)
    assert (config.training.micro_batch_size, config.training.train_iters) == (4, 7)
    assert config.optimizer.lr == 3e-4
    assert config.checkpoint.save == "out" and config.checkpoint.no_load_optim


def test_switches_have_a_negative_form_and_the_last_one_wins() -> None:
    assert not cli("--no-shuffle").data.shuffle
    assert not cli("--no-decay-input").neuron.decay_input
    assert cli("--no-shuffle", "--shuffle").data.shuffle
    assert cli("--depth", "2", "--depth", "3").model.depth == 3


@pytest.mark.parametrize("text", ["none", "None", "NONE"])
def test_none_can_be_said(text: str) -> None:
    assert cli("--v-reset", text).neuron.v_reset is None
    assert cli("--variant", text).model == Spikformer()


@pytest.mark.parametrize("form", [["--variant", "spikformer_s"], ["--variant=spikformer_s"]])
def test_flags_win_over_the_variant(form: list[str]) -> None:
    assert cli(*form).model == Spikformer(variant="spikformer_s")
    for argv in (["--depth", "2", *form], [*form, "--depth", "2"]):
        model = cli(*argv).model
        assert (model.depth, model.embed_dim, model.patch_size, model.image_size) == (2, 384, 16, 224)


def test_a_flag_wins_even_with_the_value_of_another_default() -> None:
    assert cli("--variant", "spikformer_ti", "--embed-dim", "384").model.embed_dim == 384


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("spikformer_ti", (256, 4, 8, 16, 224, 1000)),
        ("spikformer_s", (384, 6, 12, 16, 224, 1000)),
        ("spikformer_cifar10", (384, 4, 12, 4, 32, 10)),
        (None, (384, 4, 12, 4, 32, 10)),
    ],
)
def test_variants(variant: str | None, expected: tuple[int, ...]) -> None:
    m = Spikformer(variant=variant)  # type: ignore[arg-type]
    assert (m.embed_dim, m.depth, m.num_heads, m.patch_size, m.image_size, m.num_classes) == expected


def test_help_has_groups_texts_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli("--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert stopped.value.code == 0
    groups = ("model", "neuron", "parallel", "training", "optimizer", "data", "checkpoint", "logging")
    assert all(f"{group} options" in text for group in groups)
    assert "Ranks that share every layer, by channels and heads. (default: 1)" in text
    assert "--shuffle, --no-shuffle" in text
    assert "--model." not in text and "--no-no-" not in text


@pytest.mark.parametrize("config_class", [run_config(Spikformer), run_config(VggDvs)])
def test_what_is_rarely_used_comes_last(capsys: pytest.CaptureFixture[str], config_class: type) -> None:
    with pytest.raises(SystemExit):
        parse(config_class, ["--help"])
    text = capsys.readouterr().out
    places = [text.index(f" {group} options") for group in (*ORDER, "rarely-used")]
    assert places == sorted(places)
    for flag in ("--lr FLOAT", "--micro-batch-size INT", "--train-iters INT", "--save STR", "--neuron {lif,if,plif}"):
        assert text.index(flag) < places[-1], flag
    for flag in ("--adam-eps FLOAT", "--distributed-timeout-minutes FLOAT", "--ckpt-step INT"):
        assert text.index(flag) > places[-1], flag
    assert "None}" not in text


def test_the_rarely_used_are_fields_of_their_parts() -> None:
    for part, names in RARELY_USED.items():
        known = {f.name for c in (run_config(Spikformer)(), run_config(VggDvs)()) for f in fields(getattr(c, part))}
        assert set(names) <= known


def test_every_flag_has_a_text_on_one_line() -> None:
    for config in (run_config(Spikformer)(), run_config(VggDvs)()):
        for part in fields(config):
            own = getattr(config, part.name)
            texts = help_texts(type(own))
            assert {f.name for f in fields(own)} <= texts.keys()
            assert all(text and "\n" not in text for text in texts.values())


@pytest.mark.parametrize(
    "command",
    [
        *("tools.benchmark.program", "megasnn.commands.draw_schedule", "megasnn.commands.show_data"),
        *("megasnn.commands.convert_checkpoint inspect", "megasnn.commands.preprocess_data n-mnist"),
    ],
)
def test_the_tools_say_int_too(capsys: pytest.CaptureFixture[str], command: str) -> None:
    tool, *subcommand = command.split()
    with pytest.raises(SystemExit):
        importlib.import_module(tool).main([*subcommand, "--help"])
    text = capsys.readouterr().out
    assert " INT" in text and "None}" not in text


def test_help_shows_the_dimensions_of_the_variant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("--variant", "spikformer_ti", "--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Height and width of the images. (default: 224)" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--micro-batch", "4"], "Unrecognized"),
        (["--variant", "spikformer_xl"], "'spikformer_xl' is not one of spikformer_ti"),
        (["--variant"], "--variant"),
        (["--lr", "fast"], "--lr"),
        (["--pipeline-schedule", "zigzag"], "zigzag"),
        (["--v-reset", "no"], "--v-reset"),
        (["--patch-size", "8"], "--patch-size"),
    ],
)
def test_mistakes_end_with_status_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli(*argv)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--precision", "fp16"], ["--lr", "1", "--precision=fp16"]])
def test_a_name_that_its_table_refuses_is_refused_with_the_reason(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="--precision fp16: gradients .* without a loss scale, .* use bf16"):
        cli(*argv)


def test_other_ranks_can_keep_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(run_config(Spikformer), ["--lr", "fast"], console_outputs=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("flags", "name", "words"),
    [
        ("--train-iters 2 --data-path a.tar b.tar c.tar", "--data-path", 3),
        ("--valid-data-path a.tar b.tar --data-path c.tar", "--valid-data-path", 2),
        ("--data-path=a.tar --data-path=b.tar --train-iters 2", "--data-path", 2),  # the last one would win
    ],
)
def test_a_path_that_the_shell_has_expanded_wants_quotes(flags, name, words) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(run_config(Spikformer), flags.split())
    (problem,) = refused.value.problems
    assert problem.startswith(f"{name} takes one value, and here are {words}, as a shell") and "in quotes" in problem


def test_a_later_path_still_wins() -> None:
    flags = "--data-path=a.tar --train-iters 2 --data-path=b.tar --valid-data-path c --data-path d"
    assert parse(run_config(Spikformer), flags.split()).data.data_path == "d"
