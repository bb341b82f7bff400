"""An error of the first rank reaches the others as what it is; those of several ranks become one that lists them."""

from __future__ import annotations

import errno

import pytest
import requests
import torch.distributed as dist

from megasnn.common.files import CheckpointError, DamagedError
from megasnn.config import ConfigError
from megasnn.data.remote import FetchError
from megasnn.parallel.agreement import broadcast_result, run_on_all_ranks

ERRORS = {
    "fetch": FetchError("cannot fetch http://host/a.tar: it is not there"),
    "damaged": DamagedError("a is cut", "b is cut"),
    "flags": ConfigError(["--lr 0 is too small", "--depth 0 is too small"]),
    "system": FileNotFoundError(errno.ENOENT, "No such file", "a.tar"),
    "bug": KeyError("a"),
}


class Unsendable(requests.HTTPError):
    """Of another package, with an argument that cannot be pickled."""


def decided(name: str) -> tuple[str, str, str]:
    def decide() -> None:
        if name == "foreign":
            raise Unsendable("refused", lambda: None)
        raise ERRORS[name]

    with pytest.raises(Exception) as raised:
        broadcast_result(dist.group.WORLD, decide)
    error = raised.value
    return type(error).__name__, str(error), repr(getattr(error, "problems", error.args))


@pytest.mark.parametrize("name", ERRORS)
def test_type_and_arguments_are_the_same_on_every_rank(ranks, name):
    first, second = ranks(2, decided, name)
    error = ERRORS[name]
    assert first == second == (type(error).__name__, str(error), repr(getattr(error, "problems", error.args)))


def test_an_error_that_cannot_be_sent_is_named(ranks):
    first, second = ranks(2, decided, "foreign")
    assert first[0] == "Unsendable" and second[:2] == ("RuntimeError", f"Unsendable: {first[1]}")


def worked(_: object) -> tuple[str, str]:
    def work() -> None:
        if dist.get_rank() == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        raise DamagedError("a is cut", "b is cut")

    with pytest.raises(CheckpointError) as raised:
        run_on_all_ranks(dist.group.WORLD, work, "cannot load:")
    return type(raised.value).__name__, str(raised.value)


def test_errors_of_several_ranks_are_listed(ranks):
    first, second = ranks(2, worked, None)
    lines = ["cannot load:", "  OSError: [Errno 28] No space left on device", "  a is cut", "  b is cut"]
    assert first == second == ("CheckpointError", "\n".join(lines))
