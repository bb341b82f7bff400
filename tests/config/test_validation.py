"""Contradictions within and between the parts are refused with value and flag, one sentence for a mistake."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from megasnn.config import ConfigError, TrainingConfig, parse, validate
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS
from megasnn.models.spikformer.model import Spikformer
from megasnn.models.vgg_dvs.model import VggDvs
from megasnn.pretraining import pretrain, refuse_other_device, refuse_unbuildable


def problems(flags: str, world_size: int = 1, length: str = "--train-iters 10", model: type = Spikformer) -> list[str]:
    config = parse(run_config(model), [*length.split(), *flags.split()])
    try:
        validate(config, world_size)
        refuse_unbuildable(config)
    except ConfigError as error:
        return list(error.problems)
    return []


SOUND = {
    "": (1, 8),
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2": (8,),
    "--tensor-model-parallel-size 4 --embed-dim 256 --num-heads 8": (4,),
    "--pipeline-model-parallel-size 14": (14,),
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 3|3": (2,),
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 5,9": (2,),
    "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout 3|0|3": (3,),
    "--global-batch-size 10 --micro-batch-size 4": (3,),
    "--neuron plif --v-reset none --surrogate atan": (1,),
    "--neuron if --surrogate log_tailed_relu --surrogate-alpha 0": (1,),
    "--context-parallel-size 4 --micro-batch-size 4 --global-batch-size 12 --tensor-model-parallel-size 2": (8,),
    "--context-parallel-size 2 --micro-batch-size 3 --global-batch-size 8 --context-parallel-cut samples": (2,),
    "--context-parallel-size 4 --micro-batch-size 2": (4,),
    "--context-parallel-size 2 --tensor-model-parallel-size 2 --micro-batch-size 2 --cuda-graphs on": (4,),
    "--lr-decay-style constant --lr-warmup-iters 1 --clip-grad 0": (1,),
    "--data-path x.tar --valid-data-path y.tar --eval-interval 5 --surrogate erf": (1,),
}


def test_sound_configurations_pass() -> None:
    for flags, sizes in SOUND.items():
        assert [problems(flags, size) for size in sizes] == [[]] * len(sizes), flags
    neuron = run_config(VggDvs)().neuron
    assert (neuron.tau, neuron.decay_input, neuron.surrogate) == (1.333, False, "atan")
    assert [name for name in MODELS if problems("", model=MODELS[name])] == []


# Flags, the number of ranks, and what the one sentence about them names.
REFUSED = [
    ("--embed-dim 100 --num-heads 10", 1, "--embed-dim 100", "8"),
    ("--embed-dim 64 --num-heads 12", 1, "--embed-dim 64", "--num-heads 12"),
    ("--image-size 30", 1, "--image-size 30", "--patch-size 4"),
    ("--tau 1", 1, "--tau", "1"),
    ("--v-reset 1.5", 1, "--v-reset 1.5", "--v-threshold 1.0"),
    ("--surrogate-alpha 0", 1, "--surrogate-alpha", "0"),
    ("--neuron-backend fused --surrogate erf", 1, "--neuron-backend fused", "--surrogate erf"),
    ("--rand-augment rand-w0", 1, "--rand-augment rand-w0", "rand-m9"),
    ("--rand-augment rand-m9-inc1:rotate,spin", 1, "--rand-augment", "spin"),
    ("--data-path x.tar --eval-interval 5", 1, "--eval-interval 5", "--valid-data-path"),
    ("--data-path x.tar --eval-iters 3", 1, "--eval-iters 3", "--valid-data-path"),
    ("--time-steps 3 --bptt-steps 2", 1, "--time-steps 3", "--bptt-steps 2"),
    ("--bptt-steps 2 --recompute always", 1, "--bptt-steps 2", "--recompute always"),
    ("--recompute always --memory-budget 9", 1, "--recompute always", "--memory-budget 9"),
    ("--micro-batch-size 65", 1, "--micro-batch-size 65", "--global-batch-size 64"),
    ("--train-epochs 3", 1, "--train-iters 10", "--train-epochs 3"),
    ("--train-samples 640", 1, "--train-iters 10", "--train-samples 640"),
    ("--adam-beta1 0.8 --optimizer sgd", 1, "--adam-beta1 0.8", "--optimizer sgd"),
    ("--sgd-nesterov", 1, "--sgd-nesterov is for sgd", "--optimizer adamw"),
    ("--optimizer sgd --sgd-nesterov --sgd-momentum 0", 1, "--sgd-nesterov", "--sgd-momentum"),
    ("--lr-scale head.*", 1, "--lr-scale 'head.*'", "factor"),
    ("--lr-scale head.*=-1", 1, "--lr-scale 'head.*=-1'", "0 or more"),
    ("--lr-scale head.*=nan", 1, "--lr-scale 'head.*=nan'", "0 or more"),
    ("--lr-scale a=2,b=3,a=4", 1, "--lr-scale", "two factors for 'a': 2 and 4"),
    ("--min-lr 0.1", 1, "--min-lr 0.1", "--lr 0.001"),
    ("--evaluate-only", 1, "--evaluate-only", "--load"),
    ("--evaluate-only --load x --data-path x.tar", 1, "--evaluate-only", "--valid-data-path"),
    ("--lr-warmup-iters 2 --lr-warmup-epochs 1", 1, "--lr-warmup-iters 2", "--lr-warmup-epochs 1"),
    ("--lr-interval epoch --lr-warmup-iters 3", 1, "--lr-interval epoch", "--lr-warmup-iters 3"),
    ("--save-interval 5", 1, "--save-interval 5", "--save"),
    ("--save x --keep-every 10", 1, "--keep-every 10", "--keep-last"),
    ("--ckpt-step 3", 1, "--ckpt-step 3", "--load"),
    ("--finetune", 1, "--finetune", "--load"),
    ("--exit-on-missing-checkpoint", 1, "--exit-on-missing-checkpoint", "--load"),
    ("--save x --keep-best", 1, "--keep-best", "--eval-interval"),
    ("--precision tf32 --device cpu", 1, "--precision tf32", "--device cpu"),
    ("--cuda-graphs on --device cpu", 1, "--cuda-graphs on", "--device cpu"),
    ("--context-parallel-cut samples", 1, "--context-parallel-cut samples", "--context-parallel-size"),
    ("--weight-parallel-size 3", 4, "--weight-parallel-size 3", "4"),
    ("--weight-parallel-size 2 --global-batch-size 12 --micro-batch-size 2", 4, "-parallel-size 2", "6 are on 4"),
    ("--weight-parallel-size 2 --cuda-graphs on", 2, "--cuda-graphs on", "--weight-parallel-size"),
    ("--no-reshard-after-forward", 1, "--no-reshard-after-forward", "--weight-parallel-size"),
    ("--weight-gradients scattered", 1, "--weight-gradients scattered", "--weight-parallel-size"),
    ("--pipeline-schedule 1f1b --num-virtual-stages-per-pipeline-rank 2", 1, "rank 2", "--pipeline-schedule 1f1b"),
    ("--pipeline-schedule zbv --num-virtual-stages-per-pipeline-rank 3", 1, "rank 3", "--pipeline-schedule zbv"),
    ("--pipeline-schedule zbv --pipeline-model-parallel-layout 1|2|3", 1, "3 entries", "2 chunks"),
    ("--pipeline-model-parallel-layout 1|x", 1, "--pipeline-model-parallel-layout", "1|x"),
    ("--pipeline-model-parallel-layout 5", 1, "sums to 5", "6 layer groups"),
    ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 6, "world size 6", "parallel-size 2"),
    ("--global-batch-size 8 --micro-batch-size 4", 3, "--global-batch-size 8", "3 data parallel replicas"),
    ("--context-parallel-size 3", 4, "world size 4", "--context-parallel-size 3"),
    ("--context-parallel-size 4 --context-parallel-cut samples --micro-batch-size 2", 4, "-size 4", "-size 2"),
    ("--context-parallel-size 2 --micro-batch-size 4 --global-batch-size 9", 2, "--global-batch-size 9", "1 sample"),
    ("--context-parallel-size 2 --context-parallel-cut tokens", 2, "--context-parallel-cut tokens", "spikformer"),
]


@pytest.mark.parametrize(("flags", "world_size", "value", "other"), REFUSED, ids=[each[0] for each in REFUSED])
def test_a_mistake_is_named_with_value_and_flag(flags: str, world_size: int, value: str, other: str) -> None:
    found = problems(flags, world_size)
    assert len(found) == 1 and value in found[0] and other in found[0], found


@pytest.mark.parametrize(
    ("flags", "world_size", "named"),
    [
        ("--image-size 8", 1, "--image-size 8"),
        *((f"--channels={text}", 1, "--channels") for text in ("P", "8,,16", "8,P,P,16", "8,Q", "0", "-8", "8.5")),
    ],
)
def test_dimensions_of_another_model(flags: str, world_size: int, named: str) -> None:
    found = problems(flags, world_size, model=VggDvs)
    assert len(found) == 1 and named in found[0], found


@dataclass(frozen=True, kw_only=True)
class OwnMetrics(Spikformer):
    def metrics(self, output: Tensor, target: Tensor) -> dict[str, Tensor]:
        return {"right": output.mean(0).argmax(1) == target}


def test_the_best_of_a_model_with_metrics_of_its_own_alone() -> None:
    found = problems("--save x --keep-best --eval-interval 5", model=OwnMetrics)
    assert len(found) == 1 and "--keep-best" in found[0] and OwnMetrics.name in found[0], found


def test_all_problems_are_told_at_once() -> None:
    (problem,) = problems("", length="")
    assert "--train-iters" in problem and "--train-epochs" in problem
    flags = "--min-lr 1 --micro-batch-size 65 --pipeline-model-parallel-size 2 --num-heads 5"
    found = problems(flags, world_size=3)
    assert [problem.split()[0] for problem in found] == ["--embed-dim", "--micro-batch-size", "--min-lr", "world"]


def test_a_schedule_longer_than_the_training_is_known_without_data() -> None:
    epochs = "--lr-warmup-epochs 2 --lr-cooldown-epochs 2"
    (problem,) = problems(epochs, length="--train-epochs 3")
    assert "--lr-warmup-epochs 2 and --lr-cooldown-epochs 2" in problem and "--train-epochs 3" in problem
    (problem,) = problems("--lr-warmup-iters 11")
    assert "--lr-warmup-iters 11" in problem and "--train-iters 10" in problem
    assert problems(epochs, length="--train-epochs 4") == problems("--lr-warmup-iters 10") == []
    # Epochs beside iterations: the data decide.
    assert problems(epochs) == []


def test_objects_made_in_python_are_checked_too() -> None:
    config = parse(run_config(Spikformer), ["--train-iters", "1"])
    with pytest.raises(ConfigError, match="--depth"):
        validate(replace(config, model=Spikformer(depth="4")), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="huber"):
        TrainingConfig(train_iters=1, loss="huber")


OF_GPUS = ("--cuda-graphs on", "--precision tf32", "--device cuda", "--neuron-backend triton")


@pytest.mark.parametrize("flags", OF_GPUS)
def test_flags_of_gpus_are_wrong_flags_without_one(monkeypatch, flags: str, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pretrain("spikformer", [*"--config spikformer/digits --train-iters 10".split(), *flags.split()]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and (flags.split()[0] in told or flags.split()[1] in told), told
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    if flags != OF_GPUS[-1]:  # whose kernels have to be there
        refuse_other_device(parse(run_config(Spikformer), [*flags.split(), "--train-iters", "1"]))
