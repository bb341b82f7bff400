import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megasnn.config import (
    ConfigError,
    NeuronConfig,
    OptimizerConfig,
    ParallelConfig,
    describe,
    from_dict,
    to_dict,
)
from megasnn.kernels import SURROGATES
from megasnn.models.model import run_config
from megasnn.models.spikformer.dimensions import Spikformer

finite = st.floats(allow_nan=False, allow_infinity=False)
configs = st.builds(
    run_config(Spikformer),
    model=st.builds(
        Spikformer,
        variant=st.sampled_from([None, "spikformer_ti", "spikformer_s"]),
        depth=st.integers(1, 200),
        patch_size=st.sampled_from([4, 16]),
        mlp_ratio=finite,
    ),
    neuron=st.builds(
        NeuronConfig,
        v_reset=st.none() | finite,
        decay_input=st.booleans(),
        surrogate=st.sampled_from(list(SURROGATES)),
    ),
    parallel=st.builds(ParallelConfig, pipeline_model_parallel_layout=st.none() | st.text(max_size=5)),
    optimizer=st.builds(OptimizerConfig, lr=finite, lr_warmup_fraction=st.none() | finite),
)


@settings(max_examples=50, deadline=None)
@given(configs)
def test_round_trip(config: run_config(Spikformer)) -> None:
    assert from_dict(run_config(Spikformer), to_dict(config)) == config
    assert from_dict(run_config(Spikformer), json.loads(json.dumps(to_dict(config)))) == config


def test_what_is_missing_takes_its_default() -> None:
    config = from_dict(run_config(Spikformer), {"model": {"variant": "spikformer_s"}, "optimizer": {"lr": 1}})
    assert config.model == Spikformer(variant="spikformer_s")
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)


def test_what_is_unknown_or_of_a_wrong_type_is_refused_at_once() -> None:
    values = to_dict(run_config(Spikformer)())
    values["model"] |= {"wings": 2, "depth": "4", "patch_size": 8}
    values["training"] = 3
    values["data"] |= {"shuffle": 1}
    values["parallel"] |= {"tensor_model_parallel_size": True}
    with pytest.raises(ConfigError) as error:
        from_dict(run_config(Spikformer), values)
    assert sorted(error.value.problems) == [
        "data.shuffle (--shuffle) cannot be 1; give true or false",
        "model.depth (--depth) cannot be '4'; give a whole number",
        "model.patch_size (--patch-size) cannot be 8; give 4 or 16",
        "parallel.tensor_model_parallel_size (--tensor-model-parallel-size) cannot be True; give a whole number",
        "training must be a dictionary, got 3",
        "unknown name model.wings",
    ]


def test_the_table_marks_what_was_changed() -> None:
    config = run_config(Spikformer)(model=Spikformer(variant="spikformer_ti", depth=2))
    config = replace(config, neuron=NeuronConfig(v_reset=None))
    lines = describe(config).splitlines()
    changed = [line.split()[1:] for line in lines if "*" in line]
    assert [(words[0], words[-1]) for words in changed] == [("depth", "2"), ("v_reset", "none")]
    assert any(line.split()[0] == "embed_dim" and line.endswith(" 256") for line in lines)
    assert "training" in lines
