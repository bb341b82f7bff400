"""Shards that another program fetches: what its errors mean, and that it neither hangs a run nor outlives it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

from megasnn.config import parse
from megasnn.data.remote import incoming, running, shard
from megasnn.engine.faults import in_full
from megasnn.models.model import run_config
from megasnn.models.spikformer.dimensions import Spikformer
from megasnn.training.data import RunData
from tests.data.shard_files import write_shards
from tests.data.shard_server import serving
from tests.data.test_remote import CLASSES, PER_SHARD, dataset, open_on_a_rank, program, write_index
from tests.distributed.whole import everybody

URLS = {"gsutil": "gs://bucket/set", "aws": "s3://bucket/set", "ais": "ais://bucket/set", "curl": "sftp://host/set"}
OWN_WORDS = {  # of each program where there is no such file
    "gsutil": "CommandException: No URLs matched: {url}",
    "gsutil, as gcloud": "ERROR: (gcloud.storage.cat) The following URLs matched no objects or files:\n-{url}",
    "aws": 'fatal error: An error occurred (404) when calling the HeadObject operation: Key "{url}" does not exist',
    "curl": "curl: (78) Could not open remote file for reading: SFTP failure, no such file",
}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(incoming, "_FIRST_PAUSE", 0.001)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    shard._warn_once.cache_clear()


@pytest.fixture
def folder(tmp_path) -> Path:
    shards = tmp_path / "shards"
    shards.mkdir()
    write_shards(shards, 2 * PER_SHARD, PER_SHARD)
    return shards


@pytest.fixture
def install(tmp_path, monkeypatch) -> Callable[[str, str], None]:
    """Puts a program on PATH that does this; $url is what it is asked for, and $name the last part of that."""
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")

    def write(name: str, script: str) -> None:
        find = f'for each; do case "$each" in *://*) url="$each"; name=$(basename "$each");; esac; done\n{script}'
        program(programs, name, find)

    return write


def fails_on(file: str, words: str, folder: Path, status: int = 1) -> str:
    """A script that fails on one file, and gives the others."""
    says = f"cat >&2 <<END\n{words.format(url='$url')}\nEND"
    return f'if [ "$name" = {file} ]; then\n{says}\nexit {status}\nfi\nexec cat {folder}/"$name"'


@pytest.mark.parametrize("words", OWN_WORDS)
def test_a_folder_without_an_index_is_read_without_a_word(folder, install, capfd, words):
    name = words.partition(",")[0]
    install(name, fails_on("index.json", OWN_WORDS[words], folder))
    assert len(dataset(f"{URLS[name]}/train-00000.tar")) == PER_SHARD
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "words", "advice"),
    [
        ("gsutil", "AccessDeniedException: 403 a@b does not have storage.objects.get access", "BOTO_CONFIG"),
        ("aws", "fatal error: Unable to locate credentials", "AWS_ACCESS_KEY_ID"),
        ("aws", "fatal error: An error occurred (403) when calling the HeadObject operation: Forbidden", "AWS_PROFILE"),
        ("ais", "Error: unauthorized", "AIS_AUTHN_TOKEN_FILE"),
        ("curl", "curl: (67) Authentication failure", "sftp://user:password@host"),
        ("aws", "Could not connect to the endpoint URL", ""),
    ],
)
def test_an_index_that_may_be_there_is_spoken_of_once(folder, install, capfd, name, words, advice):
    write_index(folder, sha256="0" * 64)
    install(name, fails_on("index.json", words, folder))
    for _ in range(2):
        assert len(dataset(f"{URLS[name]}/train-{{00000..00001}}.tar")) == 2 * PER_SHARD
    (told,) = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    assert f"cannot fetch {URLS[name]}/index.json: `{name} " in told and words in told
    assert "shards are not compared with index.json" in told and advice in told
    assert ("log in" in told or "set " in told or "give " in told) == bool(advice)


def test_an_error_that_passes_does_not_lose_the_index(tmp_path, folder, install):
    write_index(folder, sha256="0" * 64)
    fails = f'[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; exit 1; }}\nexec cat {folder}/"$name"'
    install("gsutil", fails)
    with pytest.raises(ValueError, match="has the sha256"):
        dataset(f"{URLS['gsutil']}/train-00000.tar")


@pytest.mark.parametrize(
    ("name", "advice"),
    [("gsutil", "Google Cloud CLI"), ("aws", "pip install awscli"), ("ais", "AIStore"), ("curl", "curl.se")],
)
def test_a_program_that_is_missing_is_named_with_how_to_get_it(tmp_path, monkeypatch, capfd, name, advice):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ValueError, match=rf"cannot fetch {URLS[name]}/a.tar: {name} is not there; install.*{advice}"
    ) as error:
        dataset(f"{URLS[name]}/a.tar")
    assert in_full(error.value, with_traceback=False).startswith("ToolError: cannot fetch ")
    assert "shards are not compared with index.json" in capfd.readouterr().err


def test_a_shard_that_is_not_there_is_asked_for_once(tmp_path, folder, install):
    install("gsutil", f"echo $name >> {tmp_path}/calls\n{fails_on('a.tar', OWN_WORDS['gsutil'], folder)}")
    with pytest.raises(
        ValueError, match="cannot fetch gs://bucket/set/a.tar: .*No URLs matched: gs.*correct the addr"
    ) as error:
        dataset(f"{URLS['gsutil']}/a.tar")
    assert in_full(error.value, with_traceback=False).startswith("NotFoundError: cannot fetch ")
    assert (tmp_path / "calls").read_text().split().count("a.tar") == 1


def test_an_error_of_a_shard_has_the_last_words_and_no_secret(folder, install):
    install("curl", fails_on("a.tar", "at first\ncurl: cannot log in to {url}", folder))
    with pytest.raises(ValueError, match="ended with status 1: curl: cannot log in to sftp://host/a.tar") as error:
        dataset("sftp://user:secret@host/a.tar")
    assert "secret" not in str(error.value) and "at first" not in str(error.value)


def _checked_on_a_rank(path: str, cache: str) -> tuple[list[str], str]:
    """The files in the cache that a rank of a run reads, and what it tells."""
    world, told = everybody("world"), io.StringIO()
    changed = {"PATH": path, "LOCAL_RANK": str(world.rank), "MEGASNN_CACHE": cache}
    shard._warn_once.cache_clear()
    flags = f"--data-path gs://bucket/set/train-{{00000..00001}}.tar --num-classes {CLASSES} --train-iters 1"
    flags += " --in-channels 1 --image-size 8 --patch-size 4 --global-batch-size 2 --micro-batch-size 1"
    state = SimpleNamespace(world=world, data=world)
    quick = mock.patch.object(incoming, "_FIRST_PAUSE", 0.001)
    with mock.patch.dict(os.environ, changed), quick, redirect_stderr(told):
        data = RunData(parse(run_config(Spikformer), flags.split()), state)  # type: ignore[arg-type]
    return [each.tar.name for each in data.datasets.train.remote_shards(range(2 * PER_SHARD))], told.getvalue()


@pytest.mark.parametrize("fails", [0, 1])
def test_ranks_agree_on_the_index_where_its_program_fails_on_one_of_them(ranks, folder, install, cache, fails):
    write_index(folder)
    failing = fails_on("index.json", "Could not connect", folder)
    install("gsutil", f'if [ "$LOCAL_RANK" = {fails} ]; then\n{failing}\nfi\nexec cat {folder}/"$name"')
    (first, told), (second, other) = ranks(2, _checked_on_a_rank, os.environ["PATH"], str(cache))
    assert first == second and len(first) == 2
    assert ("shards are not compared" in told) == (fails == 0) and not other
    assert len(list((cache / "shards").glob("*.tar"))) == 2, "one copy for all ranks"


# --- programs that hang


@pytest.mark.parametrize("name", ["gsutil", "aws"])
def test_a_program_that_hangs_is_spoken_of_and_ended(install, monkeypatch, capfd, cache, name):
    monkeypatch.setattr(running, "SIGN_SECONDS", 0.1)
    monkeypatch.setattr(running, "_LOOK_SECONDS", 0.02)
    install(name, "exec sleep 600")
    began = time.monotonic()
    place = f"{URLS[name]}/index.json"
    with pytest.raises(ValueError, match=rf"cannot fetch {place}: `{name} .*{place}.*` writes nothing for 0.3 s"):
        dataset(f"{URLS[name]}/a.tar", fetch_timeout=0.3)
    assert time.monotonic() - began < 30
    assert f"waiting for `{name} " in (told := capfd.readouterr().err) and "at most 0.3 s" in told
    assert not (cache / "shards").exists()


def test_what_a_program_says_while_it_hangs_fills_no_pipe(folder, install):
    """It writes more to standard error than fits into one, before its output and behind it."""
    line = "a line of more than sixty letters, as programs write them now and then"
    says = f"i=0; while [ $i -lt 2000 ]; do echo '{line}' >&2; i=$((i+1)); done"
    install("gsutil", f'{says}\ncat {folder}/"$name" || exit 1\nexec >&-\n{says}')
    assert len(dataset(f"{URLS['gsutil']}/train-00000.tar", fetch_timeout=20)) == PER_SHARD


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def require_ended(file: Path) -> None:
    processes = [int(each) for each in file.read_text().split()]
    deadline = time.monotonic() + 20
    while running_still := [each for each in processes if is_running(each)]:
        assert time.monotonic() < deadline, f"{running_still} of {processes} go on"
        time.sleep(0.02)
    assert processes


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_what_a_program_has_started_ends_with_it(tmp_path, install):
    started = f"sleep 600 & echo $! $$ >> {tmp_path}/processes; wait"
    install("gsutil", started)
    for url in (f"{URLS['gsutil']}/a.tar", f"pipe:{started}"):
        with pytest.raises(ValueError, match="writes nothing for 0.3 s"):
            dataset(url, fetch_timeout=0.3)
        require_ended(tmp_path / "processes")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_program_ends_with_the_process_that_waits_for_it(tmp_path, number):
    command = f"pipe:sleep 600 & echo $! $$ >> {tmp_path}/processes; wait"
    # Behind `&` a shell starts programs that ignore SIGINT, and these tests may be one.
    listens = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listens}; from tests.data.test_remote import dataset; dataset({command!r})"
    waiting = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    while not (tmp_path / "processes").exists() or not (tmp_path / "processes").read_text():
        assert waiting.poll() is None
        time.sleep(0.05)
    waiting.send_signal(number)
    waiting.wait(60)
    require_ended(tmp_path / "processes")


def open_with_programs(programs: str, *args: object) -> str:
    os.environ["PATH"] = f"{programs}:{os.environ['PATH']}"
    try:
        return open_on_a_rank(*args)
    finally:
        os.environ["PATH"] = os.environ["PATH"].removeprefix(f"{programs}:")


def test_every_rank_tells_which_program_hangs(ranks, tmp_path, install, cache):
    says_no = f"{OWN_WORDS['gsutil'].format(url='$url')}"
    install("gsutil", f'[ "$name" = a.tar ] || {{ echo "{says_no}" >&2; exit 1; }}; exec sleep 600')
    url = f"{URLS['gsutil']}/a.tar"
    found = ranks(2, open_with_programs, str(tmp_path / "programs"), str(cache), url, {"fetch_timeout": 0.3})
    for message in found:
        assert message.startswith(f"cannot fetch {url}: `gsutil cat {url}` writes nothing for 0.3 s")


# --- the hub


class Hub(ModuleType):
    """Stands for huggingface_hub. It has a set, whose files are somewhere else."""

    def __init__(self, address: str) -> None:
        super().__init__("huggingface_hub")
        self.address, self.problem, self.token = address, None, "the-token"

    def HfFileSystem(self) -> Hub:
        return self

    def resolve_path(self, url: str) -> Hub:
        if self.problem:
            raise self.problem
        self.repo_id, self.path_in_repo = "user/set", url.rpartition("/")[2]
        self.repo_type, self.revision = "dataset", "main"
        return self

    def hf_hub_url(self, repo_id: str, filename: str, *, repo_type: str, revision: str) -> str:
        assert (repo_id, repo_type, revision) == ("user/set", "dataset", "main")
        return f"{self.address}/{filename}"

    def get_token(self) -> str | None:
        return self.token


@pytest.fixture
def hub(folder, monkeypatch):
    with serving(folder) as server:
        found = Hub(server.address)
        found.server = server
        monkeypatch.setitem(sys.modules, "huggingface_hub", found)
        yield found


ON_HUB = "hf://datasets/user/set/train-00000.tar"


def test_the_hub_is_asked_with_the_token(hub, folder):
    hub.server.faults.cuts = [3000]
    assert len(dataset(ON_HUB)) == PER_SHARD
    assert [start for _, start in hub.server.asked] == [0, 3000], "a broken connection goes on where it ended"
    assert set(hub.server.authorizations) == {"Bearer the-token"}
    hub.token = None
    del hub.server.authorizations[:]
    dataset(ON_HUB.replace("00000", "00001"))
    assert set(hub.server.authorizations) == {None}


def test_the_index_of_a_set_on_the_hub_is_compared(hub, folder):
    write_index(folder, sha256="0" * 64)
    with pytest.raises(ValueError, match=f"{ON_HUB} has the sha256"):
        dataset(ON_HUB)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_the_hub_refuses_has_advice_where_a_token_may_help(hub, status):
    hub.server.faults.statuses = [status] * 20
    with pytest.raises(ValueError, match=f"cannot fetch {ON_HUB}: the server answers {status} ") as error:
        dataset(ON_HUB)
    assert ("HF_TOKEN" in str(error.value)) == (status != 404)


def test_a_set_that_the_hub_does_not_have_is_named_with_what_to_do(hub):
    hub.problem = FileNotFoundError("datasets/user/set (repository not found)")
    with pytest.raises(ValueError, match=r"datasets/user/set \(repository not found\); correct .*HF_TOKEN"):
        dataset(ON_HUB)
    hub.problem = RuntimeError("Name or service not known")
    with pytest.raises(ValueError, match="the hub cannot be asked: RuntimeError: Name or service not known .*3 tries"):
        dataset(ON_HUB)


def test_without_its_library_the_hub_is_not_asked(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="pip install huggingface_hub"):
        dataset(ON_HUB)
