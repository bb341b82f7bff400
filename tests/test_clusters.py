"""What starts ranks on several hosts: the script for ssh, run with stand-ins, and the manifests for Kubernetes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import parse_args

from megasnn.config import parse, validate
from megasnn.models.model import run_config
from megasnn.models.registry import MODELS

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


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def program(template: dict[str, Any]) -> tuple[Any, list[str]]:
    """What a pod's command says to torchrun, and the flags of the training."""
    (container,) = template["spec"]["containers"]
    assert container["command"][:3] == ["python", "-m", "torch.distributed.run"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
    options = parse_args(container["command"][3:])
    assert options.module and options.training_script == "megasnn"
    assert options.training_script_args[0] == "spikformer"
    return options, options.training_script_args[1:]


def pods(name: str) -> tuple[dict[str, Any], int, dict[str, str]]:
    """The template of a manifest's pods, how many there are, and the variables by which the operator tells torchrun."""
    *services, job = documents(name)
    spec = job["spec"]
    if services:
        (service,) = services
        assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
        assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
        assert service["spec"]["clusterIP"] == "None"
        assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
        return spec["template"], spec["parallelism"], {}
    policy, worker = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]
    assert policy["minReplicas"] == policy["maxReplicas"] == worker["replicas"]
    told = {"PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}"}
    return worker["template"], worker["replicas"], {**told, "PET_NPROC_PER_NODE": spec["nprocPerNode"]}


@pytest.mark.parametrize("name", ["kubernetes_job.yaml", "kubernetes_pytorchjob.yaml"])
def test_a_job_names_its_size_once_and_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    template, hosts, told = pods(name)
    for variable, value in told.items():
        monkeypatch.setenv(variable, value)
    options, flags = program(template)
    (container,) = template["spec"]["containers"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert int(options.nnodes.partition(":")[0]) == hosts and int(options.nproc_per_node) == gpus
    if told:
        assert container["name"] == "pytorch"
    else:
        service, job = documents(name)
        port = service["spec"]["ports"][0]["port"]
        assert options.rdzv_endpoint == f"{job['metadata']['name']}-0.{service['metadata']['name']}:{port}"
    model = MODELS["spikformer"]
    config = parse(run_config(model), flags, recipes=model.recipes())
    validate(config, hosts * gpus)
    assert config.checkpoint.save == config.checkpoint.load
