"""What --load takes from a checkpoint where no flag says otherwise, what it refuses, and what is told."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from pydantic_core import to_json as json_bytes

from megasnn.checkpoint.load import load_global_tensors
from megasnn.checkpoint.save import save_global_tensors
from megasnn.common.files import CheckpointError, NoCheckpointError
from megasnn.config import PretrainConfig, to_json, validate
from megasnn.config.values import samples
from megasnn.data.shards import Index, ShardRecord, scan
from megasnn.export.trained_model import load_model
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.parallel import agreement
from megasnn.pretraining import configuration, pretrain
from tests.checkpoint.saved import MODELS as SAVED
from tests.checkpoint.saved import save_whole
from tests.data.shard_files import image_file, numbered, write_shard
from tests.training.runs import TINY, log_of, train

DEFAULTS = run_config(MODELS["spikformer"])()
DIMENSIONS = TINY[: TINY.index("--micro-batch-size")]
NEURON = ["--neuron", "if", "--v-reset", "none"]
BATCHES = "--micro-batch-size 4 --global-batch-size 8 --num-workers 0".split()
WARNING = "WARNING: samples are prepared differently from the samples of the training: "


@pytest.fixture(scope="module")
def run(cache, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(cache, *NEURON, "--train-iters", "1", "--eval-iters", "0", "--save", str(folder))
    return folder


def read(*flags: str, model: str = "spikformer") -> PretrainConfig:
    return configuration(MODELS[model], ["--train-iters", "2", *flags])


def same_model(found: PretrainConfig, *flags: str) -> bool:
    wanted = read(*DIMENSIONS, *flags)
    return (found.model, found.neuron) == (wanted.model, wanted.neuron)


def refused(cache: str, *flags: str) -> str:
    with pytest.raises(CheckpointError) as raised:
        train(cache, "--train-iters", "1", *flags)
    return str(raised.value)


# --- dimensions


@pytest.mark.parametrize("more", [[], ["--finetune"], ["--ckpt-step", "1"]])
def test_what_no_flag_gives_is_the_checkpoints(run, more, capsys) -> None:
    found = read("--load", str(run), *more)
    assert same_model(found, *NEURON) and found.training.micro_batch_size == 8
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"--load {run} gives --image-size 8 --in-channels 1 ")
    assert "--time-steps 2 --embed-dim 32 --depth 1" in line and "--neuron if --v-reset none" in line
    validate(found, 1)


def test_flags_and_files_win(run, tmp_path) -> None:
    assert read("--load", str(run), "--depth", "3").model.depth == 3
    assert read("--load", str(run), "--finetune", "--num-classes", "7").model.num_classes == 7
    assert read("--load", str(run), "--config", "spikformer/digits").model.embed_dim == 64
    whole = tmp_path / "config.json"
    whole.write_text(to_json(read("--load", "absent")))
    assert read("--config", str(whole), "--load", str(run)).model == DEFAULTS.model
    assert same_model(read("--config", "none", "--load", str(run)), *NEURON)


def test_a_folder_without_a_checkpoint_of_this_model_changes_nothing(cache, tmp_path, capsys) -> None:
    save_whole(tmp_path / "vgg", SAVED["vgg_dvs"])
    save_global_tensors(tmp_path / "weights", {}, model="SomebodysNet")
    (tmp_path / "damaged" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "damaged" / "iter_0000001" / "metadata.json").write_text("{}")
    for name in ("absent", "vgg", "weights", "damaged", "a" * 5000, "a\0b"):
        found = read("--load", str(tmp_path / name))
        assert (found.model, found.neuron) == (DEFAULTS.model, DEFAULTS.neuron)
    assert capsys.readouterr().out == ""
    assert read("--load", str(tmp_path / "vgg"), model="vgg_dvs").model != MODELS["vgg_dvs"]()
    for name, model in (("vgg", "vgg_dvs"), ("weights", "SomebodysNet")):
        error = refused(cache, "--load", str(tmp_path / name))
        assert model in error and "spikformer" in error and str(tmp_path / name) in error


def test_a_new_start_and_classes_that_the_data_lack_are_warned_of(cache, tmp_path, capsys) -> None:
    folder = str(tmp_path / "none")
    flags = ("--load", folder, "--save", folder, "--eval-iters", "0", "--num-classes", "12")
    train(cache, "--train-iters", "1", *flags)
    warnings = [line for line in capsys.readouterr().out.splitlines() if "WARNING: " in line]
    assert [folder in line for line in warnings] == [True, False] and "--num-classes" in warnings[1]
    train(cache, "--train-iters", "2", *flags)
    again = capsys.readouterr().out
    assert "2 iterations of" in again and "1 iteration done, 1 to go" in again
    assert "WARNING: there is no checkpoint" not in again


def test_another_number_of_time_steps_is_evaluated_where_only_weights_are_taken(cache, run) -> None:
    flags = ("--load", str(run), "--evaluate-only", "--time-steps", "3", *NEURON)
    error = refused(cache, *flags)
    assert "model.time_steps: saved" in error and "--finetune" in error
    assert train(cache, *flags, "--finetune").iteration == 0


# --- how samples are made


@pytest.fixture(scope="module")
def shard(tmp_path_factory) -> str:
    """Images in colour that are larger than the model's."""
    random, files = np.random.default_rng(5), {}
    for number in range(24):
        picture = random.integers(0, 256, (12, 12, 3), dtype=np.uint8)
        files[f"s{number}"] = {"png": image_file(picture), "cls": str(number % 10).encode()}
    return str(write_shard(tmp_path_factory.mktemp("shards") / "a.tar", files))


def evaluated(log: Path, *flags: str) -> list[float]:
    """The losses that a run has found on what it evaluated."""
    assert pretrain("spikformer", [*BATCHES, "--tensorboard-dir", str(log), *flags]) == 0
    return [line["loss"] for line in log_of(log, "validation")]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shard) -> tuple[str, list[float]]:
    """A run by `--augment cifar` with a part of each image cut off, and the loss that it found at its end."""
    folder = tmp_path_factory.mktemp("trained")  # the log lies beside the checkpoints
    flags = ["--data-path", shard, "--valid-data-path", shard, "--augment", "cifar", "--center-crop", "0.5"]
    flags += [*DIMENSIONS, "--in-channels", "3", "--v-threshold", "0.1", "--train-iters", "8", "--save", str(folder)]
    return str(folder), evaluated(folder, *flags)


def test_an_evaluation_makes_samples_as_the_training_did_or_says_that_it_does_not(
    trained, shard, tmp_path, capsys
) -> None:
    """Whatever is said of the training data and of its augmentation, that has no part in an evaluation."""
    folder, loss = trained
    evaluate = ("--load", folder, "--evaluate-only", "--valid-data-path", shard)
    training = ("--data-path", "absent.tar", "--augment", "cifar")
    for number, flags in enumerate((training, ("--normalize-images", "cifar10", "--center-crop", "0.5"))):
        assert evaluated(tmp_path / str(number), *evaluate, *flags) == loss
        assert WARNING not in capsys.readouterr().out
    other = evaluated(tmp_path / "other", *evaluate, "--normalize-images", "generic", "--center-crop", "1")
    told = "--normalize-images from cifar10 to generic, --center-crop from 0.5 to 1.0"
    assert other != loss and f"{WARNING}{told}\n" in capsys.readouterr().out


def test_an_evaluation_makes_the_frames_of_the_training(tmp_path) -> None:
    config = {"model": {}, "neuron": {}}
    save_global_tensors(tmp_path, {}, model="vgg_dvs", config=config, extra={"samples": {"split_by": "time"}})
    assert read("--load", str(tmp_path), "--evaluate-only", model="vgg_dvs").data.split_by == "time"


def test_fine_tuning_takes_the_constants_and_a_run_that_goes_on_takes_none(trained, shard, tmp_path, capsys) -> None:
    start = ["--load", trained[0], "--finetune", "--data-path", shard]
    found = read(*start)
    assert samples(found) == {"normalize_images": "cifar10", "center_crop": 1.0} and found.data.augment == "none"
    assert capsys.readouterr().out.rstrip().endswith(" --normalize-images cifar10")
    evaluated(tmp_path, *start, "--train-iters", "1", "--normalize-images", "imagenet")
    assert f"{WARNING}--normalize-images from cifar10 to imagenet\n" in capsys.readouterr().out
    assert samples(read("--load", trained[0], "--data-path", shard))["normalize_images"] == "generic"


def test_fine_tuning_on_events_after_images(trained, tmp_path, capsys) -> None:
    """The constants of images say nothing of events; a first convolution of other channels is drawn anew, and said."""
    start = ["--load", trained[0], "--finetune", "--event-frames", "--in-channels", "2", "--save", str(tmp_path)]
    found = read(*start)
    assert found.data.normalize_images is None and found.model.embed_dim == 32
    assert pretrain("spikformer", [*BATCHES, *start, "--train-iters", "1", "--eval-iters", "0"]) == 0
    told = capsys.readouterr().out
    weights, before = load_global_tensors(tmp_path), load_global_tensors(trained[0])
    (name,) = (name for name in before if weights[name].shape != before[name].shape)
    assert f"{name} has other input channels in the checkpoint and keeps its initial values" in told
    assert "--normalize-images" not in told
    grey = read(*start[:3], "--in-channels", "1")
    assert grey.data.normalize_images is None and samples(grey)["normalize_images"] == "digits"


def test_a_folder_named_by_mistake_is_refused_and_a_first_start_is_not(cache, tmp_path) -> None:
    with pytest.raises(NoCheckpointError, match="typo"):
        train(cache, "--train-iters", "1", "--load", str(tmp_path / "typo"))
    folder = str(tmp_path / "job")
    with pytest.raises(NoCheckpointError, match="job"):
        train(cache, "--train-iters", "2", "--load", folder, "--save", folder, "--exit-on-missing-checkpoint")
    assert not (tmp_path / "job").exists()
    first = train(cache, "--train-iters", "2", "--exit-interval", "1", "--load", f"{folder}/", "--save", folder)
    second = train(cache, "--train-iters", "2", "--load", folder, "--save", folder, "--exit-on-missing-checkpoint")
    assert (first.iteration, second.iteration) == (1, 2)


def test_ranks_agree_once_on_a_start_and_twice_on_a_load(cache, tmp_path) -> None:
    """Each agreement makes all ranks wait. What files decide, the first rank tells once."""
    train(cache, "--train-iters", "1", "--save", str(tmp_path))
    ways = (agreement.gather, agreement.broadcast_result, agreement.run_on_all_ranks, agreement.run_and_gather)
    codes = [way.__code__ for way in ways]
    callers = []

    def profile(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code in codes and frame.f_back is not None:
            callers.append(Path(frame.f_back.f_code.co_filename).stem)

    sys.setprofile(profile)
    try:
        train(cache, "--train-iters", "2", "--load", str(tmp_path), "--save", str(tmp_path), only_load=True)
    finally:
        sys.setprofile(None)
    found = [caller for caller in callers if caller != "agreement"]
    # Folder and checkpoint, and that hosts share the folder; flags; plan; the checkpoint fits, and is read; memory.
    expected = ["start", "start", "build", "plan", "load", "load", "memory"]
    assert found[: len(expected)] == expected and set(found[len(expected) :]) == {"checkpoint"}, found


def test_what_a_resumed_run_does_otherwise_is_told_or_refused(cache, tmp_path, capsys) -> None:
    folder = str(tmp_path)
    train(cache, "--train-iters", "2", "--exit-interval", "1", "--eval-iters", "0", "--save", folder)
    capsys.readouterr()
    again = ("--train-iters", "2", "--eval-iters", "0", "--load", folder)
    train(cache, *again)
    assert "changed since" not in capsys.readouterr().out
    train(cache, *again, "--loss", "mse", "--augment", "cifar")
    printed = capsys.readouterr().out
    assert "WARNING: changed since the checkpoint was saved: --loss from cross-entropy to mse, --augment" in printed
    with pytest.raises(CheckpointError, match="last_batch: continue when it was saved, drop now"):
        train(cache, *again, "--last-batch", "drop")
    with pytest.raises(CheckpointError, match="seed"):
        train(cache, *again, "--seed", "7")
    write_shard(tmp_path / "train-00000.tar", numbered(range(8)))
    with pytest.raises(CheckpointError, match="dataset"):
        train(cache, *again, "--data-path", str(tmp_path / "train-00000.tar"))
    with pytest.raises(CheckpointError, match="--load"):
        train(cache, "--train-iters", "2", "--save", folder)


def test_a_damaged_one_gives_way_to_the_one_before_unless_it_is_asked_for(cache, tmp_path, capsys) -> None:
    """One bit of the newest, and a model of other dimensions; neither changes what is there."""
    folder = tmp_path / "run"
    common = ("--train-iters", "2", "--eval-iters", "0", "--load", str(folder))
    train(cache, *common, "--save", str(folder), "--save-interval", "1")
    (file,) = (folder / "iter_0000002").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    before = contents(folder)
    capsys.readouterr()
    assert train(cache, *common, only_load=True).iteration == 1
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 1 and "damaged" in warnings[0]
    with pytest.raises(CheckpointError, match=f"iter_0000002/{file.name}"):
        train(cache, *common, "--ckpt-step", "2", "--save", str(folder))
    with pytest.raises(CheckpointError, match="embed_dim.*32.*64"):
        train(cache, *common, "--embed-dim", "64", "--save", str(folder))
    assert contents(folder) == before


def contents(folder: Path) -> dict[str, str]:
    """Files of the checkpoints and their hashes."""
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("iter_*/*")}


def test_class_names_go_with_a_checkpoint_and_are_compared(cache, tmp_path, capsys):
    """Shards that number the classes otherwise are refused; of shards without a list nothing is known."""
    names = {"one": [f"c{number}" for number in range(10)], "other": [f"c{number}" for number in reversed(range(10))]}
    shards = {}
    for name, classes in names.items():
        (tmp_path / name).mkdir()
        shards[name] = path = write_shard(tmp_path / name / "a.tar", numbered(range(12)))
        record = ShardRecord(path.name, "train", path.stat().st_size, [], scan(path, name))
        (tmp_path / name / "index.json").write_bytes(json_bytes(asdict(Index(classes, [record]))))
    paths = {name: ("--data-path", str(path), "--valid-data-path", str(path)) for name, path in shards.items()}
    run = tmp_path / "run"
    train(cache, "--train-iters", "1", *paths["one"], "--save", str(run))
    assert load_model(run).about.samples["class_names"] == names["one"]
    load_model(run).save_pretrained(tmp_path / "pretrained")
    assert '"c9"' in (tmp_path / "pretrained" / "README.md").read_text()
    for flags in (("--evaluate-only",), ("--train-iters", "2")):
        with pytest.raises(CheckpointError, match="class 0 is 'c0' and 'c9' when it was saved and in the data now"):
            train(cache, *flags, "--load", str(run), *paths["other"])
    capsys.readouterr()
    flags = ("--train-iters", "1", "--eval-iters", "0", "--load", str(run), "--finetune")
    told = "WARNING: class 0 is 'c0' and 'c9' in the checkpoint and in the data, and head keeps its weights"
    for more, is_told in (
        (paths["other"], True),
        (paths["one"], False),
        ((*paths["other"], "--num-classes", "11"), False),
    ):
        train(cache, *flags, *more)
        assert (told in capsys.readouterr().out) == is_told
    (tmp_path / "other" / "index.json").unlink()
    train(cache, "--evaluate-only", "--load", str(run), *paths["other"])
