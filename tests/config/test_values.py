"""Configurations as dictionaries, as flags, and as keyword arguments of an Engine."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megasnn.config import ConfigError, NeuronConfig, OptimizerConfig, changed_flags, flags_between, from_dict, to_dict
from megasnn.config.identity import changed_recipe, recipe
from megasnn.config.values import with_keywords
from megasnn.models.model import run_config
from megasnn.models.spikformer.model import Spikformer

CLASS = run_config(Spikformer)


def test_dictionaries_there_and_back_and_flags_that_changed() -> None:
    config = CLASS(model=Spikformer(depth=2), neuron=NeuronConfig(v_reset=None))
    assert from_dict(CLASS, json.loads(json.dumps(to_dict(config)))) == config
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
    wrong = {"lrr": 1, "depth": 2, "save": "x", "bptt": 3}
    with pytest.raises(ConfigError) as refused:
        with_keywords(CLASS(), wrong)
    assert len(refused.value.problems) == 4 and "'lr'" in refused.value.problems[0]
    with pytest.raises(ConfigError, match="--lr 0"):
        with_keywords(CLASS(), {"lr": 0})


def test_a_resume_warns_of_every_flag_that_changes_the_update() -> None:
    config = CLASS()
    saved = {"recipe": json.loads(json.dumps(recipe(config)))}
    assert changed_recipe(saved, recipe(config)) == []
    optimizer = OptimizerConfig(lr=0.1, weight_decay=1.0, clip_grad=0.0, lr_warmup_iters=8)
    changed = replace(config, optimizer=optimizer, training=replace(config.training, train_iters=9, seed=5))
    (line,) = changed_recipe(saved, recipe(changed))
    names = ("--lr ", "--weight-decay ", "--clip-grad ", "--lr-warmup-iters ", "--seed ", "--train-")
    assert all(name in line for name in names) and "\n" not in line
    assert changed_recipe({}, recipe(changed)) == [], "weights from elsewhere"
