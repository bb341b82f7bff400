"""`--config FILE`: what a run writes can be given back, flags win over it, and what does not fit is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megasnn.config import CheckpointConfig, ConfigError, parse, to_dict, to_json, validate
from megasnn.config.names import table_of
from megasnn.files.described import in_message
from megasnn.models.model import run_config
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.models.vgg_dvs.dimensions import VggDvs
from megasnn.pretraining import configuration

ROOT = Path(__file__).parents[2]
BY_TYPE = {
    int: st.integers(-(2**62), 2**62),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    bool: st.booleans(),
    NoneType: st.none(),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may have."""
    if (table := table_of(hint)) is not None:
        return st.sampled_from(table.choices)
    if get_origin(hint) is Annotated:
        return values_of(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return st.one_of(*map(values_of, get_args(hint)))
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    return BY_TYPE[hint]


def random_configs(config_class: type) -> st.SearchStrategy[Any]:
    parts = {}
    for entry in fields(config_class):
        part = type(getattr(config_class(), entry.name))
        hints = get_type_hints(part, include_extras=True)
        parts[entry.name] = st.builds(part, **{each.name: values_of(hints[each.name]) for each in fields(part)})
    return st.builds(config_class, **parts)


def spikformer(path: Path, *flags: str) -> run_config(Spikformer):
    return parse(run_config(Spikformer), ["--config", str(path), *flags])


def written(folder: Path, values: object) -> Path:
    path = folder / "given.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


@pytest.mark.parametrize("config_class", [run_config(Spikformer), run_config(VggDvs)])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_a_run_writes_given_back_is_the_same(config_class, data, tmp_path) -> None:
    config = data.draw(random_configs(config_class))
    path = written(tmp_path, to_json(config))
    assert parse(config_class, ["--config", str(path)]) == config


def test_flags_win_wherever_they_stand(tmp_path) -> None:
    path = written(
        tmp_path, {"optimizer": {"lr": 2, "min_lr": 0.5}, "checkpoint": {"no_load_optim": True, "load": "x"}}
    )
    config = parse(run_config(Spikformer), ["--lr", "3", f"--config={path}", "--no-load-optim", "--load", "none"])
    assert (config.optimizer.lr, config.optimizer.min_lr) == (3.0, 0.5)
    assert config.checkpoint.no_load_optim and config.checkpoint.load is None
    assert not spikformer(path, "--no-no-load-optim").checkpoint.no_load_optim
    assert spikformer(path, "--config", "none") == run_config(Spikformer)()


def test_a_variant_of_the_file_gives_its_dimensions(tmp_path) -> None:
    path = written(tmp_path, {"model": {"variant": "spikformer_s", "depth": 3}})
    assert spikformer(path).model == Spikformer(variant="spikformer_s", depth=3)


def test_the_flag_of_a_variant_replaces_the_dimensions_of_the_file(tmp_path) -> None:
    saved = run_config(Spikformer)(model=Spikformer(embed_dim=64, num_classes=3, time_steps=7, mlp_ratio=2.0))
    path = written(tmp_path, to_json(saved))
    named = Spikformer(variant="spikformer_ti", time_steps=7, mlp_ratio=2.0)
    assert spikformer(path, "--variant", "spikformer_ti").model == named
    assert spikformer(path, "--variant", "spikformer_ti", "--depth", "2").model == replace(named, depth=2)
    assert spikformer(path, "--variant", "none").model == Spikformer(time_steps=7, mlp_ratio=2.0)


@pytest.mark.parametrize(
    ("values", "messages"),
    [
        ({"training": {"seeds": 1}}, ["unknown name training.seeds"]),
        (
            {"optimizer": {"lr": "fast"}, "model": {"depth": 2.0}},
            ["optimizer.lr (--lr) cannot be 'fast'", "model.depth (--depth) cannot be 2.0"],
        ),
        ({"training": {"loss": "l3"}}, ["training.loss (--loss) cannot be 'l3'"]),
        ({"trainings": {}}, ["unknown name trainings"]),
        ({"about": {"model": "vgg_dvs"}, "training": {"seed": 1}}, ["about.model is vgg_dvs, and this is spikformer"]),
        ({"training": 3}, ["training: Input should be an object, found 3"]),
        ([1], ["Input should be an object"]),
        ('{"optimizer": {"lr": 1, "lr": 2}}', ["lr: this field is there twice"]),
        ('{"optimizer": {"lr": NaN}}', ["lr: should be a finite number"]),
        ("lr: 1", ["Expecting value"]),
        (json.dumps({"x" * 10: {"\x1b[2J" * 1000: 1}}), ["unknown name xxxxxxxxxx"]),
        (" " * (1 << 21), ["has 2097152 bytes"]),
    ],
)
def test_what_does_not_fit_is_refused_with_file_and_field(tmp_path, values, messages) -> None:
    path = written(tmp_path, values)
    with pytest.raises(ConfigError) as refused:
        spikformer(path)
    text = str(refused.value)
    assert len(refused.value.problems) == len(messages) and text.count(f"--config {path}") == len(messages)
    assert all(message in text for message in messages) and "\x1b" not in text and len(text) < 1000


@pytest.mark.parametrize("by_name", [True, False])
def test_the_recipe_of_another_model_is_named_with_its_command(tmp_path, by_name) -> None:
    recipe = "vgg_dvs/digits" if by_name else str(VggDvs.recipes()["vgg_dvs/digits"])
    with pytest.raises(ConfigError) as refused:
        configuration(Spikformer, ["--config", recipe])
    shown = in_message(recipe)
    assert refused.value.problems == (
        f"--config {shown} is of the model vgg_dvs, not spikformer; run it with python -m megasnn vgg_dvs --config "
        f"{shown}",
    )


def test_a_file_that_fits_is_not_taken_for_another_models(tmp_path) -> None:
    """Where something else is wrong."""
    path = written(tmp_path, {"training": {"seed": 1}})
    with pytest.raises(ConfigError, match="--precision fp16: gradients"):
        configuration(Spikformer, ["--config", str(path), "--precision", "fp16"])


def test_a_file_of_no_model_is_refused_as_before(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"unknown name training\.seeds"):
        configuration(Spikformer, ["--config", str(written(tmp_path, {"training": {"seeds": 1}}))])
    with pytest.raises(ConfigError, match="neither a file nor the name of a recipe"):
        configuration(Spikformer, ["--config", "vgg_dvs/absent"])


def test_a_file_of_another_model_is_refused(tmp_path) -> None:
    path = written(tmp_path, to_dict(run_config(VggDvs)()))
    with pytest.raises(ConfigError) as refused:
        spikformer(path)
    assert [problem.split(": ")[1].split(";")[0] for problem in refused.value.problems] == [
        "unknown name model.channels",
        "unknown name model.dropout",
        "unknown name model.tensor_parallel_style",
    ]
    assert "give one that a run of this model wrote" in str(refused.value)
    path.write_text(to_json(run_config(VggDvs)()))  # as a run writes it, with the model's name
    with pytest.raises(ConfigError) as refused:
        spikformer(path)
    (problem,) = refused.value.problems
    assert problem.startswith(f"--config {path}: about.model is vgg_dvs, and this is spikformer; correct the file, or")
    with pytest.raises(ConfigError, match="is of the model vgg_dvs, not spikformer; run it with python -m megasnn vgg"):
        configuration(Spikformer, ["--config", str(path)])


@pytest.mark.parametrize("name", ["absent", "", "a\0b", "/dev/null", "/", "\udcff", "\x1b[2J"])
def test_what_is_no_file_is_refused(tmp_path, monkeypatch, name) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="--config"):
        parse(run_config(Spikformer), ["--config", name])


def test_help_shows_the_flag_and_the_values_of_the_file(tmp_path, capsys) -> None:
    path = written(tmp_path, {"model": {"image_size": 20}})
    with pytest.raises(SystemExit) as stopped:
        parse(run_config(Spikformer), ["--config", str(path), "--help"], recipes={"spikformer/small": path})
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert stopped.value.code == 0
    assert "--config STR" in text and "recipe: spikformer/small." in text
    assert "Height and width of the images. (default: 20)" in text


def test_it_is_refused_before_torch_is_imported(tmp_path) -> None:
    path = written(tmp_path, {"training": {"seeds": 1}})
    program = "import sys, pretrain_spikformer as p; print(p.main(sys.argv[1:]), 'torch' in sys.modules)"
    run = [sys.executable, "-c", program, "--config", str(path)]
    ended = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stdout.split() == ["2", "False"]
    assert f"--config {path}: unknown name training.seeds" in ended.stderr and "Traceback" not in ended.stderr


OF_A_RUN = {
    "checkpoint": {
        **{"save": "a", "save_interval": 2, "keep_last": 1, "keep_best": True, "finetune": True, "reset_head": True},
        **{"load": "b", "ckpt_step": 3},
    },
    "logging": {"eval_iters": 0, "profile_steps": "3", "tensorboard_dir": "t", "eval_interval": 5},
    "training": {"train_iters": 9},
}


def test_an_evaluation_takes_nothing_of_a_file_that_is_for_training(tmp_path) -> None:
    """What a run was given need not be taken back; what a flag gives is refused."""
    path = written(tmp_path, OF_A_RUN)
    found = spikformer(path, "--load", "a", "--evaluate-only")
    assert found.checkpoint == CheckpointConfig(load="a")
    assert (found.logging.eval_iters, found.logging.profile_steps) == (None, None)
    assert (found.logging.tensorboard_dir, found.training.train_iters) == ("t", 9)
    validate(found, 1)
    with pytest.raises(ConfigError, match="begins with b and saves in a: give one of them to --load"):
        spikformer(path, "--evaluate_only")
    assert spikformer(path, "--no-evaluate-only").checkpoint.save == "a"
    with pytest.raises(ConfigError, match="--evaluate-only saves nothing: leave --save c out"):
        validate(spikformer(path, "--load", "a", "--evaluate-only", "--save", "c"), 1)
    own = written(tmp_path, {**OF_A_RUN, "checkpoint": {**OF_A_RUN["checkpoint"], "save": "b"}})
    assert spikformer(own, "--evaluate_only").checkpoint == CheckpointConfig(load="b", ckpt_step=3)
