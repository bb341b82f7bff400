"""The launch scripts: each starts its program with the flags of its recipe, and what a user adds wins.

The scripts run with a `python` that prints its arguments, in place of one that trains.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from megasnn.config import CheckpointConfig, PretrainConfig, parse, validate
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS

ROOT = Path(__file__).parents[1]
PROGRAMS = {
    "python": 'case $1 in -P) ;; -c) echo 0 ;; *) printf "%s\\n" "$@" ;; esac',
    "srun": 'exec "$@"',
    "scontrol": "echo node0",
}
SLURM = {
    "SLURM_SUBMIT_DIR": str(ROOT),
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_NNODES": "2",
    "SLURM_CPUS_PER_TASK": "64",
}
DATA = "--data-path d --valid-data-path v"
TP2 = "--tensor-model-parallel-size 2"
TP2_PP2 = f"{TP2} --pipeline-model-parallel-size 2"
DIGITS = (
    "--data-path sample --image-size 16 --in-channels 1 --num-classes 10 --patch-size 4 --embed-dim 64 --depth 2 "
    "--num-heads 4 --time-steps 4 --micro-batch-size 16 --global-batch-size 64 --train-iters 200 --lr 3e-3 "
    "--lr-decay-style cosine --lr-warmup-iters 10 --log-interval 10 --eval-interval 50 --save-interval 50"
)
EVENT_DIGITS = (
    "--data-path sample --channels 16,P,32,P,64,P --image-size 32 --time-steps 6 --num-classes 10 --dropout 0.1 "
    "--micro-batch-size 16 --global-batch-size 32 --train-iters 200 --lr 3e-3 --lr-decay-style cosine "
    "--lr-warmup-iters 10 --log-interval 10 --eval-interval 50 --save-interval 50"
)
TIMM = (
    "--augment crop --crop-scale 1 --random-erasing 0.25 --last-batch drop "
    "--precision bf16 --label-smoothing 0.1 --train-epochs 310 --lr 5e-4 --min-lr 1e-5 --lr-warmup-epochs 20 "
    "--lr-cooldown-epochs 10 --lr-interval epoch --clip-grad 0"
)
CIFAR10 = (
    f"{TIMM} --variant spikformer_cifar10 --image-size 32 --in-channels 3 --num-classes 10 --time-steps 4 "
    "--rand-augment rand-m9-n1-mstd0.4-inc1:equalize,rotate,shear-x,translate-x,translate-y "
    "--normalize-images cifar10 --mixup-alpha 0.5 "
    "--mixup-off-epoch 200 --micro-batch-size 32 --global-batch-size 128 --lr-warmup-init 1e-5 --weight-decay 0.06 "
    "--save-interval 400"
)
IMAGENET = (
    f"{TIMM} --embed-dim 512 --depth 8 --num-heads 8 --patch-size 16 --image-size 224 --in-channels 3 "
    "--num-classes 1000 --time-steps 4 --rand-augment rand-m9-mstd0.5-inc1 --mixup-alpha 0.8 --cutmix-alpha 1 "
    "--micro-batch-size 24 --global-batch-size 192 --lr-warmup-init 1e-6 --weight-decay 0.05 --log-interval 50 "
    "--save-interval 2500"
)
CIFAR10_DVS = (
    "--channels 64,128,P,256,256,P,512,512,P,512,512,P --image-size 48 --time-steps 10 --num-classes 10 "
    "--dropout 0.25 --augment dvs --loss tet --micro-batch-size 16 --global-batch-size 128 "
    "--train-epochs 300 --lr 1e-3 --lr-decay-style cosine --weight-decay 5e-4 --log-interval 10 "
    "--save-interval 700"
)
NMNIST = (
    "--channels 16,P,32,P,64,P --image-size 34 --time-steps 6 --split-by time --num-classes 10 --dropout 0.25 "
    "--loss tet --micro-batch-size 25 --global-batch-size 50 --train-iters 300 --lr 3e-3 --lr-decay-style cosine "
    "--lr-warmup-iters 20 --weight-decay 0.05 --log-interval 20 --eval-interval 60 --save-interval 100"
)
# Script, arguments, ranks on a machine (0: no torchrun), folder of the run, flags that it stands for.
SCRIPTS = [
    ("spikformer_single", "", 0, "spikformer_single", DIGITS),
    ("spikformer_tp2_pp2", "--lr 2e-3 --depth=1", 4, "spikformer_tp2_pp2", f"{TP2_PP2} {DIGITS}"),
    ("spikformer_cp2", "", 2, "spikformer_cp2", f"--context-parallel-size 2 {DIGITS}"),
    ("spikformer_cifar10", DATA, 4, "spikformer_cifar10", f"{TP2_PP2} {CIFAR10} --eval-interval 400"),
    ("spikformer_slurm", DATA, 8, "spikformer_slurm_7", f"{TP2_PP2} {IMAGENET} --eval-interval 2500"),
    ("vgg_dvs", "", 2, "vgg_dvs", f"{TP2} {EVENT_DIGITS}"),
    ("vgg_dvs", "--tensor-model-parallel-size 1", 1, "vgg_dvs", f"{TP2} {EVENT_DIGITS}"),
    ("vgg_dvs", "--data-path d", 2, "vgg_dvs_cifar10dvs", f"{TP2} {CIFAR10_DVS}"),
    ("vgg_dvs_tp2_pp2", "--pipeline-model-parallel-size=3", 6, "vgg_dvs_tp2_pp2", f"{TP2_PP2} {EVENT_DIGITS}"),
    ("vgg_dvs_cifar10dvs", DATA, 4, "vgg_dvs_cifar10dvs", f"{TP2_PP2} {CIFAR10_DVS} --eval-interval 700"),
    ("vgg_dvs_nmnist", DATA, 2, "vgg_dvs_nmnist", f"{TP2} {NMNIST}"),
]


class Started(NamedTuple):
    status: int
    words: list[str]
    said: str


def start(folder: Path, script: str, arguments: str, python: str = PROGRAMS["python"]) -> Started:
    """What the script starts, and what it says. With `python` for the program of this name."""
    for name, text in {**PROGRAMS, "python": python}.items():
        program = folder / name
        program.write_text(f"#!/usr/bin/env bash\n{text}\n")
        program.chmod(0o755)
    path = ROOT / "scripts" / f"pretrain_{script}.sh"
    environment = os.environ | SLURM | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("SLURM_GPUS_ON_NODE", None)
    run = ["bash", str(path), *arguments.split()]
    ended = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60)
    return Started(ended.returncode, ended.stdout.splitlines(), ended.stderr)


def configuration(model: str, words: list[str]) -> PretrainConfig:
    chosen = MODELS[model]
    return parse(run_config(chosen), words, recipes=chosen.recipes())


@pytest.mark.parametrize(("script", "arguments", "ranks", "run", "flags"), SCRIPTS)
def test_a_script_gives_its_recipe_and_the_users_flags(script, arguments, ranks, run, flags, tmp_path) -> None:
    started = start(tmp_path, script, arguments)
    assert started.status == 0, started.said
    model = "vgg_dvs" if script.startswith("vgg") else "spikformer"
    place = started.words.index(str(ROOT / f"pretrain_{model}.py"))
    starter, given = started.words[:place], started.words[place + 1 :]
    assert starter[:2] == (["-m", "torch.distributed.run"] if ranks else [])
    assert not ranks or starter[starter.index("--nproc-per-node") + 1] == str(ranks)
    assert not ranks or "slurm" in script or "--standalone" in starter  # a rendezvous of its own
    found = configuration(model, given)
    folder = Path(str(found.checkpoint.save)).parent
    assert folder.parent == ROOT / "runs" and folder.name.startswith(run)  # a number follows where it is there already
    places = ["--save", str(folder / "checkpoints"), "--tensorboard-dir", str(folder / "tensorboard")]
    assert found == configuration(model, [*flags.split(), *places, *arguments.split()])
    length = next(each for each in ("--train-epochs", "--train-iters") if each in flags)
    assert f"--load {folder}/checkpoints --save {folder}/checkpoints" in started.said
    assert f"{length} <more than before>" in started.said
    start_again = "sbatch" if script.endswith("slurm") else "bash"
    script = ROOT / "scripts" / f"pretrain_{run.removesuffix('_7')}.sh"
    assert f"{start_again} {script} <the same arguments>" in started.said


@pytest.mark.parametrize("script", [*dict.fromkeys(script for script, *_ in SCRIPTS)])
def test_a_script_evaluates_and_saves_nothing_and_has_its_programs_help(script, tmp_path) -> None:
    started = start(tmp_path, script, "--help")
    assert started.status == 0 and started.words[-1] == "--help" and "runs/" not in started.said
    started = start(tmp_path, script, f"{DATA} --evaluate-only --load l")
    assert started.status == 0, started.said
    model = "vgg_dvs" if script.startswith("vgg") else "spikformer"
    found = configuration(model, started.words[started.words.index(str(ROOT / f"pretrain_{model}.py")) + 1 :])
    assert found.training.evaluate_only and found.checkpoint == CheckpointConfig(load="l")
    assert "TensorBoard:" in started.said and "Checkpoints:" not in started.said and "Train on:" not in started.said


@pytest.mark.parametrize(
    ("saved", "all_of_them", "status", "told"),
    [(4, 4, 0, "Train on: "), (4, 200, 0, "Go on: "), (4, 200, 1, "Go on: "), (None, 200, 1, None)],
)
def test_a_script_says_how_to_go_on(saved, all_of_them, status, told, tmp_path) -> None:
    """Also where its program was interrupted, with what it has saved."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "log.jsonl").write_text(
        '{"time": "t", "kind": "start", "iterations": 7, "ranks": 1}\n'
        f'{{"time": "t", "kind": "start", "iteration": 0, "iterations": {all_of_them}, "ranks": 1}}\n'
        '{"time": "t", "kind": "iteration", "iteration": 4}\n'
    )
    latest = run / "latest_checkpointed_iteration.txt"
    saves = f"echo {saved} > {latest}" if saved else ":"
    trains = f"case $1 in -P) ;; -c) echo 0 ;; *) {saves}; exit {status} ;; esac"
    started = start(tmp_path, "spikformer_single", f"--save {run}", trains)
    again = f"bash {ROOT}/scripts/pretrain_spikformer_single.sh <the same arguments> --load {run} --save {run} "
    assert started.status == status
    assert [line for line in started.said.splitlines() if again in line] == [
        line for line in started.said.splitlines() if told and told in line
    ]
    assert (again in started.said) == (told is not None)
    assert ("--train-iters <more than before>" in started.said) == (told == "Train on: ")


def test_slurm_names_the_nodes_and_jobs_of_one_host_do_not_meet(tmp_path) -> None:
    words = start(tmp_path, "spikformer_slurm", DATA).words
    assert words[2:8] == ["--nnodes", "2", "--nproc-per-node", "8", "--rdzv-id", "7"]
    assert words[8:12] == ["--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:20007"]
    assert "--standalone" in start(tmp_path, "spikformer_cp2", "").words


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("spikformer_cifar10", ""), ("vgg_dvs_cifar10dvs", ""), ("vgg_dvs_nmnist", "--data-path d")],
)
def test_a_script_asks_for_its_data(script, arguments, tmp_path) -> None:
    started = start(tmp_path, script, arguments)
    assert (started.status, started.words) == (2, []) and "--valid-data-path" in started.said


@pytest.mark.parametrize("name", [name for model in MODELS.values() for name in model.recipes()])
def test_a_recipe_is_complete(name) -> None:
    """It trains on one rank, with nothing but data."""
    model = name.partition("/")[0]
    data = [] if name.endswith("/digits") else ["--data-path", "d"]
    validate(configuration(model, ["--config", name, *data]), 1)
