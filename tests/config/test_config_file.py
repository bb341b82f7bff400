"""Configurations as files, dictionaries and keywords: what a run writes can be given back; what is odd is refused."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from shlex import split

import pytest

from megasnn.config import (
    CheckpointConfig,
    ConfigError,
    NeuronConfig,
    OptimizerConfig,
    PretrainConfig,
    changed_flags,
    flags_between,
    from_dict,
    parse,
    to_json,
    validate,
)
from megasnn.config.values import changed_recipe, recipe, with_keywords
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs

CLASS = run_config(Spikformer)
ODD = {
    "model": {"embed_dim": 48, "num_heads": 6, "mlp_ratio": 2.5},
    "neuron": {"v_reset": None, "tau": 1.0000000000000002, "neuron": "plif"},
    "data": {"data_path": "a b\"'{0..9}caf\udce9.tar", "augment": "cifar", "shuffle": False, "mixup_alpha": 1e-9},
    "training": {"seed": 2**62, "bptt_steps": 2, "deterministic": True, "precision": "bf16"},
    "optimizer": {"lr": 1e30, "lr_warmup_init": 0.0, "lr_interval": "epoch"},
    "parallel": {"memory_budget": 0.1, "pipeline_model_parallel_layout": "1|2", "recompute": "always"},
    "checkpoint": {"save": "caf\udce9", "ckpt_step": 0, "keep_best": True, "load": "x"},
    "logging": {"eval_iters": 0, "profile_step": 1},
}
"""Values of every type, far from the defaults; names of a folder and of shards are not UTF-8."""


def written(folder: Path, values: object) -> Path:
    path = folder / "given.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def spikformer(path: Path, *flags: str) -> PretrainConfig:
    return parse(CLASS, ["--config", str(path), *flags])


def test_what_a_run_writes_given_back_is_the_same(tmp_path) -> None:
    config = from_dict(CLASS, ODD)
    assert parse(CLASS, ["--config", str(written(tmp_path, to_json(config)))]) == config
    flags = [flag for of_part in changed_flags(config).values() for flag in of_part]
    assert parse(CLASS, [word for flag in flags for word in split(flag)]) == config
    other = run_config(VggDvs)(model=VggDvs(channels="8,P,16", dropout=0.5))
    assert parse(run_config(VggDvs), ["--config", str(written(tmp_path, to_json(other)))]) == other


def test_flags_win_wherever_they_stand(tmp_path) -> None:
    values = {"optimizer": {"lr": 2, "min_lr": 0.5}, "checkpoint": {"finetune": True, "load": "x"}}
    path = written(tmp_path, values)
    config = parse(CLASS, ["--lr", "3", f"--config={path}", "--load", "none"])
    assert (config.optimizer.lr, config.optimizer.min_lr) == (3.0, 0.5)
    assert config.checkpoint.finetune and config.checkpoint.load is None
    assert not spikformer(path, "--no-finetune").checkpoint.finetune
    assert spikformer(path, "--config", "none") == CLASS()


@pytest.mark.parametrize("saved", [{"train_epochs": 100}, {"train_iters": 5, "seed": 7}, {}])
def test_a_length_on_the_command_line_replaces_that_of_a_file(tmp_path, saved: dict[str, int]) -> None:
    path = written(tmp_path, {"training": saved})
    training = spikformer(path, "--train-samples", "640").training
    assert (training.train_iters, training.train_samples, training.train_epochs) == (None, 640, None)
    assert training.seed == saved.get("seed", CLASS().training.seed)
    kept = spikformer(path, "--train-samples", "none").training
    assert (kept.train_iters, kept.train_epochs) == (saved.get("train_iters"), saved.get("train_epochs"))


def test_the_values_of_a_checkpoint_come_before_those_of_a_file(tmp_path) -> None:
    path = written(tmp_path, {"model": {"depth": 3}})
    saved = {"model": {"depth": 2, "embed_dim": 64}, "data": {"center_crop": 0.5}}
    config = parse(CLASS, ["--config", str(path)], checkpoint_values=saved)
    assert (config.model.depth, config.model.embed_dim, config.data.center_crop) == (3, 64, 0.5)
    assert parse(CLASS, ["--center-crop", "0.75"], checkpoint_values=saved).data.center_crop == 0.75


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"training": {"seeds": 1}}, ["training.seeds"]),
        ({"optimizer": {"lr": "fast"}, "model": {"depth": 2.5}}, ["--depth 2.5", "--lr fast"]),
        ({"parallel": {"tensor_model_parallel_size": True}}, ["--tensor-model-parallel-size True"]),
        (to_json(run_config(VggDvs)()), ["vgg_dvs"]),
        ({"model": {"channels": "8,P"}}, ["model.channels"]),  # of another model, which it does not name
        ({"training": 3}, ["training"]),
        ('{"optimizer": {"lr": NaN}}', ["lr"]),
        ("lr: 1", [""]),
        ('{"optimizer": {"lr": 1e-3, "lr": 1.0}}', ["lr stands twice in one object; the second is 1.0"]),
        (json.dumps({"x" * 10: {"\x1b[2J" * 1000: 1}}), ["x" * 10]),
        (" " * (1 << 21), ["2097152"]),
    ],
)
def test_what_does_not_fit_is_refused_with_file_and_field(tmp_path, values, named) -> None:
    path = written(tmp_path, values)
    with pytest.raises(ConfigError) as refused:
        spikformer(path)
    problems = refused.value.problems
    assert len(problems) == len(named) and all(f"--config {path}" in each for each in problems), problems
    assert all(part in each for part, each in zip(named, problems, strict=True)), problems
    assert "\x1b" not in str(refused.value) and len(str(refused.value)) < 1000


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_of_an_editor_that_marks_its_encoding_is_read(tmp_path, encoding: str) -> None:
    path = written(tmp_path, {})
    Path(path).write_text('{"training": {"train_iters": 9}}', encoding=encoding)
    assert spikformer(path).training.train_iters == 9


def test_what_is_no_file_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for name in ("pipe", "absent", "", "a\0b", "/dev/null", "/", "\udcff", "\x1b[2J"):
        with pytest.raises(ConfigError, match="--config"):
            parse(CLASS, ["--config", name])


def test_a_command_of_a_file_is_not_run(tmp_path) -> None:
    path = written(tmp_path, {"data": {"data_path": "pipe:touch x"}})
    with pytest.raises(ConfigError, match="data_path is pipe:touch x"):
        spikformer(path)
    assert spikformer(path, "--data-path", "a.tar").data.data_path == "a.tar"


def test_help_shows_recipes_and_the_values_of_the_file(tmp_path, capsys) -> None:
    path = written(tmp_path, {"model": {"image_size": 20}})
    for console_outputs in (False, True):  # other ranks keep quiet
        with pytest.raises(SystemExit):
            parse(CLASS, ["--config", str(path), "--help"], console_outputs, {"spikformer/small": path})
        text = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert console_outputs or text == ""
    assert "recipe: spikformer/small." in text and "--image-size INT" in text and "(default: 20)" in text


def test_an_evaluation_takes_nothing_of_a_file_about_checkpoints_and_logs(tmp_path) -> None:
    """Values for training may stay in the file of a run that is only evaluated."""
    values = {
        "checkpoint": {"save": "a", "save_interval": 2, "keep_best": True, "load": "b", "ckpt_step": 3},
        "logging": {"eval_iters": 0, "profile_step": 3, "tensorboard_dir": "t"},
        "training": {"train_iters": 9},
    }
    path = written(tmp_path, values)
    found = spikformer(path, "--load", "a", "--evaluate-only")
    assert found.checkpoint == CheckpointConfig(load="a") and found.training.train_iters == 9
    validate(found, 1)
    assert spikformer(path, "--no-evaluate-only").checkpoint.save == "a"


def test_dictionaries_there_and_back_and_flags_that_changed() -> None:
    config = CLASS(model=Spikformer(depth=2), neuron=NeuronConfig(v_reset=None))
    assert from_dict(CLASS, json.loads(json.dumps(asdict(config)))) == config
    assert changed_flags(config) == {"model": ["--depth 2"], "neuron": ["--v-reset none"]}
    others = replace(config, optimizer=OptimizerConfig(lr=0.5, optimizer="sgd"), neuron=NeuronConfig(decay_input=False))
    neuron = ["--v-reset 0.0", "--no-decay-input"]
    assert flags_between(config, others) == {"neuron": neuron, "optimizer": ["--optimizer sgd", "--lr 0.5"]}
    config = from_dict(CLASS, {"model": {"depth": 6}, "optimizer": {"lr": 1}})
    assert config.model == Spikformer(depth=6)
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)


def test_keywords_of_an_engine() -> None:
    config = with_keywords(CLASS(), {"lr": 1, "mixup_alpha": 0.5})
    assert config.optimizer.lr == 1.0 and config.data.mixup_alpha == 0.5
    wrong = {"lrr": 1, "depth": 2, "save": "x", "bptt": 3, "train_epochs": 2, "lr_warmup_epochs": 1}
    with pytest.raises(ConfigError) as refused:
        with_keywords(CLASS(), wrong)
    assert len(refused.value.problems) == len(wrong) and "'lr'" in refused.value.problems[0]
    with pytest.raises(ConfigError, match="--lr 0"):
        with_keywords(CLASS(), {"lr": 0})


def test_a_resume_warns_of_every_flag_that_changes_the_update() -> None:
    config = CLASS()
    saved = {"recipe": json.loads(json.dumps(recipe(config)))}
    assert changed_recipe(saved, config) == []
    optimizer = OptimizerConfig(lr=0.1, weight_decay=1.0, clip_grad=0.0, lr_warmup_iters=8)
    changed = replace(config, optimizer=optimizer, training=replace(config.training, train_iters=9, seed=5))
    (line,) = changed_recipe(saved, changed)
    names = ("--lr ", "--weight-decay ", "--clip-grad ", "--lr-warmup-iters ", "--seed ", "--train-")
    assert all(name in line for name in names) and "\n" not in line
    assert changed_recipe({}, changed) == [], "weights from elsewhere"
    older = {"recipe": {name: value for name, value in saved["recipe"].items() if not name.startswith("--adam")}}
    assert changed_recipe(older, config) == [], "a flag that the checkpoint is older than had its default"
    adam = replace(config, optimizer=OptimizerConfig(adam_beta2=0.95, layer_decay=0.8, lr_scale="head.*=2"))
    (line,) = changed_recipe(older, adam)
    assert "--adam-beta2 from 0.999 to 0.95, --layer-decay from 1.0 to 0.8, --lr-scale from None to head.*=2" in line
    own = type("Own", (Spikformer,), {"loss": lambda self, output, target: None, "name": "own"})
    assert recipe(config).keys() - recipe(replace(config, model=own())).keys() == {"--loss", "--label-smoothing"}
