"""How the pretrain scripts begin: the command line, checked on every rank before torch is imported."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from megasnn.config import ConfigError, PretrainConfig, parse, validate

# torchrun stops the other ranks as soon as the first one ends, and they may be slower to say what is wrong.
OTHERS_SPEAK_S = 3.0

Config = TypeVar("Config", bound=PretrainConfig)


def launch(config_class: type[Config], train: Callable[[Config], int], argv: Sequence[str]) -> int:
    """Parses and validates, then trains; the exit status, 2 for a configuration that cannot work.

    A mistake in the flags is told within a moment by every rank: `train` is where torch should be imported.

    Raises:
        SystemExit: after the help, and for what is no command line at all.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        config = parse(config_class, argv, console_outputs=rank == 0)
        validate(config, world_size)
    except SystemExit as end:
        if end.code and world_size > 1:
            if rank > 0:
                sys.stderr.write(f"[rank {rank}] the command line is wrong; rank 0 says where\n")
            time.sleep(OTHERS_SPEAK_S)
        raise
    except ConfigError as error:
        sys.stderr.write(f"[rank {rank}] {error}\n")
        if world_size > 1:
            time.sleep(OTHERS_SPEAK_S)
        return 2
    return train(config)
