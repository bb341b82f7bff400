"""The launch scripts: each starts its program with the flags of its recipe, and what a user adds wins.

The scripts run with a `python` that prints its arguments, in place of one that trains."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from torch.distributed.run import parse_args

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
# Script, arguments, ranks on a machine (0: no torchrun), folder of the run, recipe, and flags beside it.
SCRIPTS = [
    ("spikformer_single", "", 0, "spikformer_single", "spikformer/digits", "--save-interval 50"),
    ("spikformer_tp2_pp2", "--lr 2e-3", 4, "spikformer_tp2_pp2", "spikformer/digits", f"{TP2_PP2} --save-interval 50"),
    ("spikformer_cp2", "", 2, "spikformer_cp2", "spikformer/digits", "--context-parallel-size 2 --save-interval 50"),
    ("spikformer_cifar10", DATA, 4, "spikformer_cifar10", "spikformer/cifar10",
     f"{TP2_PP2} --micro-batch-size 32 --save-interval 400 --eval-interval 400"),
    ("spikformer_slurm", DATA, 8, "spikformer_slurm_7", "spikformer/imagenet",
     f"{TP2_PP2} --save-interval 2500 --eval-interval 2500"),
    ("spike_lm_tp2_pp2", "--lr 2e-3", 4, "spike_lm_tp2_pp2", "spike_lm/text", f"{TP2_PP2} --save-interval 50"),
    ("vgg_dvs", "", 2, "vgg_dvs", "vgg_dvs/digits", f"{TP2} --save-interval 50"),
    ("vgg_dvs", "--tensor-model-parallel-size 1", 1, "vgg_dvs", "vgg_dvs/digits", "--save-interval 50"),
    ("vgg_dvs", "--data-path d", 2, "vgg_dvs_cifar10dvs", "vgg_dvs/cifar10dvs", f"{TP2} --save-interval 700"),
    ("vgg_dvs_tp2_pp2", "--pipeline-model-parallel-size=3", 6, "vgg_dvs_tp2_pp2", "vgg_dvs/digits",
     f"{TP2} --save-interval 50"),
    ("vgg_dvs_cifar10dvs", DATA, 4, "vgg_dvs_cifar10dvs", "vgg_dvs/cifar10dvs",
     f"{TP2_PP2} --save-interval 700 --eval-interval 700"),
    ("vgg_dvs_nmnist", DATA, 2, "vgg_dvs_nmnist", "vgg_dvs/nmnist", f"{TP2} --save-interval 100 --eval-interval 60"),
    ("speedrun_cifar10", DATA, 2, "vgg_cifar10", "vgg_dvs/cifar10", "--eval-interval 1500"),
    ("speedrun_cifar10", f"{DATA} --device cuda", 0, "vgg_cifar10", "vgg_dvs/cifar10", "--eval-interval 1500"),
]  # fmt: skip


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
    path = ROOT / "scripts" / (f"{script}.sh" if script.startswith("speedrun") else f"pretrain_{script}.sh")
    environment = os.environ | SLURM | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("SLURM_GPUS_ON_NODE", None)
    run = ["bash", str(path), *arguments.split()]
    ended = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=60)
    return Started(ended.returncode, ended.stdout.splitlines(), ended.stderr)


def configuration(model: str, words: list[str]) -> PretrainConfig:
    chosen = MODELS[model]
    return parse(run_config(chosen), words, recipes=chosen.recipes())


@pytest.mark.parametrize(("script", "arguments", "ranks", "run", "recipe", "flags"), SCRIPTS)
def test_a_script_gives_its_recipe_and_the_users_flags(script, arguments, ranks, run, recipe, flags, tmp_path) -> None:
    started, model = start(tmp_path, script, arguments), recipe.partition("/")[0]
    assert started.status == 0, started.said
    place = started.words.index("spike_lm" if model == "spike_lm" else str(ROOT / f"pretrain_{model}.py"))
    given = started.words[place + 1 :]
    assert started.words[:2] == ["-m", "torch.distributed.run"] if ranks else place == 0
    assert model != "spike_lm" or started.words[place - 2 : place] == ["-m", "megasnn"]
    if ranks:
        options = parse_args(started.words[2:])
        assert options.nproc_per_node == str(ranks)
        meeting = options.nnodes, options.rdzv_id, options.rdzv_backend, options.rdzv_endpoint
        # On one host a rendezvous of its own, so that jobs do not meet.
        assert meeting == ("2", "7", "c10d", "node0:20007") if "slurm" in script else options.standalone
    found = configuration(model, given)
    folder = Path(str(found.checkpoint.save)).parent
    assert folder.parent == ROOT / "runs" and folder.name.startswith(run)  # a number follows where it is there already
    places = ["--save", str(folder / "checkpoints"), "--tensorboard-dir", str(folder / "tensorboard")]
    assert found == configuration(model, ["--config", recipe, *flags.split(), *places, *arguments.split()])


@pytest.mark.parametrize("script", ["spikformer_single", "vgg_dvs", "spikformer_slurm"])
def test_a_script_evaluates_and_saves_nothing_and_has_its_programs_help(script, tmp_path) -> None:
    started = start(tmp_path, script, "--help")
    assert started.status == 0 and started.words[-1] == "--help" and "Checkpoints:" not in started.said
    started = start(tmp_path, script, f"{DATA} --evaluate-only --load l")
    assert started.status == 0, started.said
    model = "vgg_dvs" if script.startswith("vgg") else "spikformer"
    found = configuration(model, started.words[started.words.index(str(ROOT / f"pretrain_{model}.py")) + 1 :])
    assert found.training.evaluate_only and found.checkpoint == CheckpointConfig(load="l")
    assert "Checkpoints:" not in started.said


@pytest.mark.parametrize(("saved", "status"), [(True, 0), (True, 1), (False, 1)])
def test_a_script_says_how_to_go_on_where_something_was_saved(saved, status, tmp_path) -> None:
    run = tmp_path / "run"
    saves = f"mkdir {run} && echo 4 > {run}/latest_checkpointed_iteration.txt" if saved else ":"
    trains = f"case $1 in -P) ;; -c) echo 0 ;; *) {saves}; exit {status} ;; esac"
    started = start(tmp_path, "spikformer_single", f"--save {run}", trains)
    assert started.status == status and (f"--load {run} --save {run} " in started.said) == saved


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("spikformer_cifar10", ""), ("vgg_dvs_nmnist", "--data-path d"), ("speedrun_cifar10", "--valid-data-path v")],
)
def test_a_script_asks_for_its_data(script, arguments, tmp_path) -> None:
    started = start(tmp_path, script, arguments)
    assert (started.status, started.words) == (2, []) and "--valid-data-path" in started.said


@pytest.mark.parametrize("name", [name for model in MODELS.values() for name in model.recipes()])
def test_a_recipe_is_complete(name) -> None:
    """It trains on one rank, with nothing but data."""
    model = name.partition("/")[0]
    data = [] if name.endswith(("/digits", "/text")) else ["--data-path", "d"]
    validate(configuration(model, ["--config", name, *data]), 1)


FOLDER = Path(__file__).parents[1] / "scripts" / "clusters"
# A host prints the words of its torchrun. `down` cannot be reached, and `stuck` waits for Ctrl-C, as it is typed.
SSH = """#!/usr/bin/env bash
command=${!#} host=${@: -2:1}
case $host in
    down) exit 255 ;;
    stuck) read -r -N 1 key; printf %q "$key"; exit 1 ;;
    *) bash -c "$command" ;;
esac
"""
PYTHON = '#!/usr/bin/env bash\nprintf "%s\\n" "in $PWD" "$OMP_NUM_THREADS" "$@"\n'


def by_ssh(folder: Path, hosts: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs the script in a folder, where its stand-ins are put, too."""
    for name, text in (("ssh", SSH), ("python", PYTHON)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "HOSTS": hosts, "GPUS": "8", "OMP_NUM_THREADS": "3"} | more
    script = ["bash", str(FOLDER / "torchrun_ssh.sh"), *words]
    return subprocess.run(script, env=environment, cwd=folder, capture_output=True, text=True, timeout=30)


def test_ssh_starts_one_torchrun_on_each_host(tmp_path) -> None:
    data = "a b/{0..9}.tar"
    ended = by_ssh(tmp_path, "one two", "-m", "megasnn", "spikformer", "--data-path", data, JOB="night", RESTARTS="3")
    assert ended.returncode == 0, ended.stderr
    endpoints = []
    for host in ("one", "two"):
        said = [line.removeprefix(f"{host}: ") for line in ended.stdout.splitlines() if line.startswith(host)]
        assert said[:4] == [f"in {tmp_path}", "3", "-m", "torch.distributed.run"]
        options = parse_args(said[4:])
        assert (options.nnodes, options.nproc_per_node, options.max_restarts) == ("2", "8", 3)
        assert (options.rdzv_id, options.rdzv_backend) == ("night", "c10d")
        endpoints.append(options.rdzv_endpoint)
        assert options.module and options.training_script == "megasnn"
        assert options.training_script_args == ["spikformer", "--data-path", data]
    other = by_ssh(tmp_path, "one", "-m", "megasnn", JOB="day").stdout
    assert len({*endpoints}) == 1 and endpoints[0].startswith("one:") and endpoints[0] not in other


def test_a_host_that_fails_stops_the_others(tmp_path) -> None:
    ended = by_ssh(tmp_path, "stuck down", "-m", "megasnn")
    assert ended.returncode != 0 and "stuck: $'\\003'" in ended.stdout


@pytest.mark.parametrize("name", ["kubernetes_job.yaml", "kubernetes_pytorchjob.yaml"])
def test_a_job_names_its_size_once_and_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The operator of PyTorchJob tells torchrun by variables; the pods of a plain job meet at a service."""
    *services, job = yaml.safe_load_all((FOLDER / name).read_text())
    spec = job["spec"]
    worker = spec if services else spec["pytorchReplicaSpecs"]["Worker"]
    hosts = worker["parallelism" if services else "replicas"]
    (container,) = worker["template"]["spec"]["containers"]
    if services:
        assert spec["completionMode"] == "Indexed" and spec["completions"] == hosts
    else:
        least, most = (spec["elasticPolicy"][name] for name in ("minReplicas", "maxReplicas"))
        assert container["name"] == "pytorch" and least == most == hosts
        monkeypatch.setenv("PET_NNODES", f"{least}:{most}")
        monkeypatch.setenv("PET_NPROC_PER_NODE", spec["nprocPerNode"])
    assert container["command"][:3] == ["python", "-m", "torch.distributed.run"]
    options = parse_args(container["command"][3:])
    for service in services:
        assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
        assert worker["template"]["spec"]["subdomain"] == service["metadata"]["name"]
        host, port = f"{job['metadata']['name']}-0.{service['metadata']['name']}", service["spec"]["ports"][0]["port"]
        assert options.rdzv_endpoint == f"{host}:{port}"
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(options.nnodes.partition(":")[0]) == hosts and int(options.nproc_per_node) == gpus
    program, *flags = options.training_script_args
    config = parse(run_config(MODELS[program]), flags, recipes=MODELS[program].recipes())
    validate(config, hosts * gpus)
    assert config.checkpoint.save == config.checkpoint.load
