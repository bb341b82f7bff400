"""`--load` without dimensions takes the model's and the neuron from the checkpoint, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megasnn.checkpoint.save import save_global_tensors
from megasnn.config import ConfigError, PretrainConfig, to_json, validate
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.pretraining import configuration
from tests.convert.saved import MODELS as SAVED
from tests.convert.saved import save_whole
from tests.training.runs import TINY, train
from tests.training.test_other_model import refuses

ROOT = Path(__file__).parents[2]
SPIKFORMER = MODELS["spikformer"]
DIMENSIONS = TINY[: TINY.index("--micro-batch-size")]
NEURON = ["--neuron", "if", "--v-reset", "none"]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(str(folder / "cache"), *NEURON, "--train-iters", "1", "--save", str(folder / "saved"))
    return folder / "saved"


def read(*flags: str, model: str = "spikformer") -> PretrainConfig:
    return configuration(MODELS[model], ["--train-iters", "2", *flags])


def same_model(found: PretrainConfig, *flags: str) -> bool:
    wanted = read(*DIMENSIONS, *flags)
    return (found.model, found.neuron) == (wanted.model, wanted.neuron)


@pytest.mark.parametrize("more", [[], ["--finetune"], ["--ckpt-step", "1"]])
def test_what_no_flag_gives_is_the_checkpoints(run, more, capsys) -> None:
    found = read("--load", str(run), *more)
    assert same_model(found, *NEURON) and found.training.micro_batch_size == 8
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"--load {run} gives --image-size 8 --in-channels 1 ")
    assert "--time-steps 2 --embed-dim 32 --depth 1" in line and "--neuron if --v-reset none" in line
    validate(found, 1)


def test_flags_variants_and_files_win(run, tmp_path) -> None:
    assert read("--load", str(run), "--depth", "3").model.depth == 3
    assert read("--load", str(run), "--finetune", "--num-classes", "7").model.num_classes == 7
    named = read("--load", str(run), "--variant", "spikformer_ti").model
    assert (named.embed_dim, named.depth, named.time_steps) == (256, 4, 2)
    assert read("--load", str(run), "--config", "spikformer/digits").model.embed_dim == 64
    assert read("--load", str(run), "--config", "spikformer/cifar10").model.depth == 4
    whole = tmp_path / "config.json"
    whole.write_text(to_json(read("--load", "absent")))
    assert read("--config", str(whole), "--load", str(run)).model == run_config(SPIKFORMER)().model
    assert same_model(read("--config", "none", "--load", str(run)), *NEURON)


def test_a_folder_without_a_checkpoint_of_this_model_changes_nothing(tmp_path, capsys) -> None:
    save_whole(tmp_path / "vgg", SAVED["vgg"])
    save_global_tensors(tmp_path / "weights", {}, model="spikformer")
    (tmp_path / "damaged" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "damaged" / "iter_0000001" / "metadata.json").write_text("{}")
    for name in ("absent", "vgg", "weights", "damaged", "a" * 5000, "a\0b"):
        found = read("--load", str(tmp_path / name))
        assert (found.model, found.neuron) == (run_config(SPIKFORMER)().model, run_config(SPIKFORMER)().neuron)
    assert capsys.readouterr().out == ""
    assert read("--load", str(tmp_path / "vgg"), model="vgg_dvs").model != MODELS["vgg_dvs"]()


def test_what_cannot_be_is_refused_as_a_flag_would_be(tmp_path) -> None:
    config = {"model": {"depth": 10**15}, "neuron": {"tau": 0.5}}
    save_global_tensors(tmp_path, {}, model="spikformer", config=config)
    with pytest.raises(ConfigError, match="--tau 0.5 must be greater than 1"):
        validate(read("--load", str(tmp_path)), 1)


def test_flags_that_differ_are_refused(run, tmp_path) -> None:
    error = refuses(str(tmp_path), "--load", str(run), "--embed-dim", "64", *NEURON[:2])
    assert str(run) in error and "model.embed_dim: saved 32, now 64" in error and "neuron.v_reset: saved None" in error


def test_another_number_of_time_steps_is_evaluated_where_only_weights_are_taken(run, tmp_path) -> None:
    flags = ("--load", str(run), "--evaluate-only", "--time-steps", "3")
    error = refuses(str(tmp_path), *flags, *NEURON)
    assert "model.time_steps: saved" in error and "--finetune" in error
    assert train(str(tmp_path), *flags, *NEURON, "--finetune").iteration == 0


def test_it_is_read_without_torch(run) -> None:
    program = (
        "import sys; from megasnn.models.registry import MODELS\n"
        "from megasnn.pretraining import configuration as read\n"
        "print(read(MODELS['spikformer'], sys.argv[1:]).model.embed_dim, 'torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "--load", str(run)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "32 False"
