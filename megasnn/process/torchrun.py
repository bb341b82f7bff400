"""torchrun, ending with one line that says which rank failed and why.

    python -m megasnn.process.torchrun [torchrun's flags] pretrain_spikformer.py [its flags]

It takes torchrun's flags, does what torchrun does and ends with its status. When a rank fails, the ranks have printed
the error. torchrun adds warnings, a traceback of its own and a table of all ranks; here it adds one line.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress

from megasnn.process.early import signals_end_it

_LOGGERS = ("multiprocessing.api", "multiprocessing.errors.error_handler", "agent.server.api")


def main(argv: list[str]) -> int:
    """The exit status: 0, or 1 when a rank failed or a signal came."""
    with signals_end_it(status=lambda number: 1, who="torchrun:"):  # while there are no ranks yet
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    for name in _LOGGERS:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        run.main(argv)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        ended = f"signal {failure.signal_name()}" if failure.exitcode < 0 else f"status {failure.exitcode}"
        told = failure.message["message"] if isinstance(failure.message, dict) else f"ended with {ended}"
        return _failed(f"rank {rank}: {told}")
    except SignalException as error:
        return _failed(signal.Signals(error.sigval).name)
    except KeyboardInterrupt:  # before torchrun takes signals, or where it was told not to take this one
        return _failed("SIGINT")
    return 0


def _failed(why: str) -> int:
    sys.stderr.write(f"torchrun: stopped, because of {why}\n")
    return 1


def tell_torchrun(brief: str, text: str) -> None:
    """What torchrun shows of this rank when it fails; the rank that tells it first is the root cause for it.

    Nothing happens without torchrun, which expects it in a file.

    Args:
        brief: for the one line of this launcher, which follows what the rank has printed.
        text: for torchrun's table, which hides that: whole, since users look at the end of what is printed.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        message = {"message": brief, "extraInfo": extra}
        with suppress(OSError), open(file, "w") as output:
            json.dump({"message": message}, output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
