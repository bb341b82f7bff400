import pytest

from megasnn.config import ConfigError, parse, validate
from megasnn.models.model import run_config
from megasnn.models.spikformer.dimensions import Spikformer


def problems(*argv: str, world_size: int = 1, length: str = "--train-iters 10") -> tuple[str, ...]:
    config = parse(run_config(Spikformer), [*length.split(), *argv])
    try:
        validate(config, world_size)
    except ConfigError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(
    ("argv", "world_size"),
    [
        ("", 1),
        ("", 8),
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", 8),
        ("--tensor-model-parallel-size 4 --variant spikformer_ti", 4),
        ("--pipeline-model-parallel-size 14", 14),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 3|3", 2),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 5,9", 2),
        ("--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout 3|0|3", 3),
        ("--global-batch-size 10 --micro-batch-size 4", 3),
        ("--neuron plif --v-reset none --surrogate atan", 1),
        ("--neuron if", 1),
        ("--context-parallel-size 4 --micro-batch-size 4 --global-batch-size 12 --tensor-model-parallel-size 2", 8),
        ("--context-parallel-size 2 --micro-batch-size 3 --global-batch-size 8 --context-parallel-cut samples", 2),
        ("--context-parallel-size 4 --micro-batch-size 2", 4),
        ("--depth 126", 1),
        ("--lr-decay-style constant --lr-warmup-fraction 0.1 --clip-grad 0", 1),
        ("--surrogate log_tailed_relu --surrogate-alpha 0", 1),
    ],
)
def test_sound_configurations_pass(argv: str, world_size: int) -> None:
    assert problems(*argv.split(), world_size=world_size) == ()


# Flags, and what the message about them must contain.
REFUSED = [
    ("--embed-dim 100 --num-heads 10", "--embed-dim 100 must be a multiple of 8"),
    ("--embed-dim 64 --num-heads 12", "--embed-dim 64 must be a multiple of --num-heads 12"),
    ("--embed-dim 64 --num-heads 8 --mlp-ratio 0.01", "--mlp-ratio 0.01 of --embed-dim 64 leaves no hidden"),
    ("--image-size 30", "--image-size 30 must be a multiple of --patch-size 4"),
    ("--depth 127", "--depth 127: the residual stream counts up to 2 + 2 x depth = 256"),
    ("--depth 0", "--depth must be at least 1, got 0"),
    ("--time-steps 0", "--time-steps must be at least 1, got 0"),
    ("--in-channels 0", "--in-channels must be at least 1"),
    ("--num-classes -1", "--num-classes must be at least 1, got -1"),
    ("--mlp-ratio 0", "--mlp-ratio must be greater than 0"),
    ("--mixup-alpha 0", "--mixup-alpha must be greater than 0, got 0.0"),
    ("--augment crop --crop-scale 1.5", "--crop-scale must be at most 1, got 1.5"),
    ("--rand-augment-ops rotate", "--rand-augment-ops rotate needs --rand-augment"),
    ("--rand-augment rand --rand-augment-ops rotate,spin", "--rand-augment-ops: there is no 'spin'; there are auto-"),
    ("--center-crop 1.5", "--center-crop must be at most 1, got 1.5"),
    ("--augment crop --crop-ratio 0.5", "--crop-ratio must be at least 1, got 0.5"),
    ("--random-erasing nan", "--random-erasing must be greater than 0 and finite, got nan"),
    ("--rand-augment rand-w0", "--rand-augment rand-w0: it is written like rand-m9-mstd0.5-inc1"),
    ("--tau 1", "--tau must be greater than 1, got 1.0"),
    ("--neuron plif --tau 0.5", "--tau must be greater than 1, got 0.5"),
    ("--neuron if --tau 3", "--tau 3.0 has no meaning for --neuron if"),
    ("--neuron if --no-decay-input", "--no-decay-input has no meaning for --neuron if"),
    ("--v-threshold 0", "--v-threshold must be greater than 0"),
    ("--v-reset 1.5", "--v-reset 1.5 must be below --v-threshold 1.0"),
    ("--v-reset nan", "--v-reset nan"),
    ("--surrogate-alpha -1", "--surrogate-alpha must be greater than 0"),
    ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size must be at least 1, got 0"),
    ("--pipeline-model-parallel-size 0", "--pipeline-model-parallel-size must be at least 1, got 0"),
    (
        "--pipeline-schedule 1f1b --num-virtual-stages-per-pipeline-rank 2",
        "--num-virtual-stages-per-pipeline-rank 2: --pipeline-schedule 1f1b computes 1",
    ),
    (
        "--pipeline-schedule zbv --num-virtual-stages-per-pipeline-rank 3",
        "--num-virtual-stages-per-pipeline-rank 3: --pipeline-schedule zbv computes 2",
    ),
    (
        "--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 1",
        "--num-virtual-stages-per-pipeline-rank 1: --pipeline-schedule interleaved needs 2",
    ),
    ("--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 20", "are more chunks than"),
    ("--pipeline-schedule zbv --pipeline-model-parallel-layout 1|2|3", "has 3 entries for 2 chunks"),
    ("--pipeline-memory-limit 0.5", "--pipeline-memory-limit must be at least 1, got 0.5"),
    ("--num-virtual-stages-per-pipeline-rank 0", "--num-virtual-stages-per-pipeline-rank must be at least 1"),
    ("--backend nccl --device cpu", "--backend nccl cannot serve --device cpu"),
    ("--distributed-timeout-minutes 0", "--distributed-timeout-minutes must be greater than 0"),
    ("--pipeline-model-parallel-layout 1|x", '"1|x" is no list of whole numbers'),
    ("--pipeline-model-parallel-layout 3|3", "has 2 entries for 1 chunks"),
    ("--pipeline-model-parallel-layout 5", "sums to 5; the model has 6 units"),
    ("--micro-batch-size 65", "--micro-batch-size 65 is larger than --global-batch-size 64"),
    ("--global-batch-size 0", "--global-batch-size must be at least 1, got 0"),
    ("--micro-batch-size 0", "--micro-batch-size must be at least 1, got 0"),
    (
        "--train-samples 640",
        "--train-samples, --train-epochs; --train-iters 10 and --train-samples 640 were given (none takes one back)",
    ),
    ("--exit-interval 0", "--exit-interval must be at least 1"),
    ("--exit-duration-in-mins 0", "--exit-duration-in-mins must be greater than 0"),
    ("--seed -1", "--seed must be at least 0, got -1"),
    ("--label-smoothing 1", "--label-smoothing must be at least 0 and below 1, got 1.0"),
    ("--label-smoothing nan", "--label-smoothing must be at least 0 and below 1, got nan"),
    ("--lr 0", "--lr must be greater than 0"),
    ("--lr inf", "--lr must be greater than 0 and finite, got inf"),
    ("--memory-budget inf", "--memory-budget must be greater than 0 and finite, got inf"),
    ("--min-lr 0.1", "--min-lr 0.1 is greater than --lr 0.001"),
    ("--min-lr 1e-4 --lr-decay-style constant", "--min-lr 0.0001 is never reached"),
    ("--lr-warmup-iters -1", "--lr-warmup-iters must be at least 0"),
    ("--lr-warmup-iters 11", "--lr-warmup-iters 11 is more than --train-iters 10"),
    ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", "either --lr-warmup-iters or --lr-warmup-fraction"),
    ("--lr-warmup-fraction 1.5", "--lr-warmup-fraction must be at least 0 and below 1"),
    ("--weight-decay -0.1", "--weight-decay must be at least 0"),
    ("--clip-grad -1", "--clip-grad must be at least 0"),
    ("--adam-beta2 1", "--adam-beta2 must be at least 0 and below 1"),
    ("--adam-eps 0", "--adam-eps must be greater than 0"),
    ("--num-workers -1", "--num-workers must be at least 0"),
    ("--data-path=", "--data-path is empty"),
    ("--save-interval 5", "--save-interval 5 needs --save"),
    ("--save x --save-interval 0", "--save-interval must be at least 1"),
    ("--async-save", "--async-save needs --save"),
    ("--save x --keep-last 0", "--keep-last must be at least 1"),
    ("--save x --keep-every 10", "--keep-every 10 needs --keep-last"),
    ("--load x --reset-head", "--reset-head needs --finetune"),
    ("--ckpt-step 3", "--ckpt-step 3 needs --load"),
    ("--finetune", "--finetune needs --load"),
    ("--no-load-optim", "--no-load-optim needs --load"),
    ("--exit-on-missing-checkpoint", "--exit-on-missing-checkpoint needs --load"),
    ("--load a --load-spikingjelly b", "--load a and --load-spikingjelly b"),
    ("--log-interval 0", "--log-interval must be at least 1"),
    (
        "--eval-interval 0",
        "--eval-interval must be at least 1, got 0; leave it out to evaluate only at the end, --eval-iters 0 never",
    ),
    ("--eval-iters -1", "--eval-iters must be at least 0"),
    ("--eval-iters 0 --eval-interval 5", "--eval-interval 5 has no meaning with --eval-iters 0"),
]


@pytest.mark.parametrize(("argv", "message"), REFUSED)
def test_each_mistake_is_named_with_value_and_flag(argv: str, message: str) -> None:
    found = problems(*argv.split())
    assert any(message in problem for problem in found), found
    assert len(found) == 1, found  # one mistake, one message


def test_the_length_must_be_given() -> None:
    assert problems(length="") == ("give one of --train-iters, --train-samples, --train-epochs; none was given",)
    assert problems(length="--train-samples 63") == ("--train-samples 63 is less than one --global-batch-size 64",)
    assert problems(length="--train-samples 64") == ()
    assert problems("--model-summary", length="") == ()


@pytest.mark.parametrize(
    ("argv", "world_size", "message"),
    [
        (
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
            6,
            "6 is not tensor 2 x pipeline 2 x data ?",
        ),
        ("--tensor-model-parallel-size 3 --num-heads 8", 3, "--num-heads 8 must be a multiple of --tensor"),
        ("--tensor-model-parallel-size 5 --num-heads 5 --embed-dim 40 --mlp-ratio 1", 5, ""),
        ("--tensor-model-parallel-size 4 --num-heads 4 --embed-dim 48", 4, "the first stem stage's 6 channels"),
        ("--tensor-model-parallel-size 4 --mlp-ratio 0.111", 4, "the MLP's 42 hidden channels"),
        ("--pipeline-model-parallel-size 15", 15, "more chunks than the model's 14 layers"),
        ("--global-batch-size 8 --micro-batch-size 4", 3, "2 micro-batch(es), but there are 3 data parallel replicas"),
        ("--context-parallel-size 3", 4, "4 is not tensor 1 x context 3 x pipeline 1 x data ?"),
        (
            "--context-parallel-size 4 --context-parallel-cut samples --micro-batch-size 2",
            4,
            "--context-parallel-size 4 by samples with --micro-batch-size 2: each rank needs a sample",
        ),
        (
            "--context-parallel-size 2 --micro-batch-size 4 --global-batch-size 9",
            2,
            "the last micro-batch of --global-batch-size 9 with --micro-batch-size 4 has 1 sample(s)",
        ),
        ("--context-parallel-cut samples", 1, "--context-parallel-cut samples needs ranks that share a micro-batch"),
    ],
)
def test_what_depends_on_the_number_of_ranks(argv: str, world_size: int, message: str) -> None:
    found = problems(*argv.split(), world_size=world_size)
    assert len(found) == bool(message), found
    assert all(message in problem for problem in found), found


def test_all_problems_are_told_at_once() -> None:
    found = problems(
        "--lr", "0", "--time-steps", "0", "--seed", "-1", "--pipeline-model-parallel-size", "2", world_size=3
    )
    assert [problem.split()[0] for problem in found] == ["--time-steps", "--seed", "--lr", "world"]
    text = str(ConfigError(found))
    assert text.startswith("4 problems in the configuration:\n  - ")
    assert all(problem in text for problem in found)


def test_an_object_of_an_unknown_variant_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="unknown --variant 'vgg'"):
        Spikformer(variant="vgg")  # type: ignore[arg-type]
