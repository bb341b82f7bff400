"""Pretrain Spikformer on images with data, tensor and pipeline parallelism.

    python pretrain_spikformer.py --train-iters 100                              one process, the bundled digits
    torchrun --nproc-per-node 4 pretrain_spikformer.py --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 2 --data-path "cifar/train-{00..09}.tar" --train-iters 1000
    python pretrain_spikformer.py --help                                         all flags
"""

from __future__ import annotations

import os
import sys
import time

from megasnn.config import ConfigError, PretrainSpikformerConfig, parse, validate


def main(argv: list[str]) -> int:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    try:
        config = parse(PretrainSpikformerConfig, argv, console_outputs=rank == 0)
        validate(config, world_size)
    except SystemExit as end:
        if end.code and world_size > 1:
            if rank > 0:
                sys.stderr.write(f"[rank {rank}] the command line is wrong; rank 0 says where\n")
            time.sleep(3.0)  # torchrun stops the other ranks when the first one ends, and rank 0 may be slower
        raise
    except ConfigError as error:
        sys.stderr.write(f"[rank {rank}] {error}\n")
        if world_size > 1:
            time.sleep(1.0)  # torchrun stops the other ranks when the first one ends: they have the same to say
        return 2

    # Only now: a mistake in the flags is told within a moment, without waiting for torch.
    from megasnn import training
    from megasnn.checkpoint import from_spikingjelly
    from megasnn.models.spikformer import describe_spikformer

    provider = training.ModelProvider(
        description=describe_spikformer(config.model, training.neuron_spec(config)),
        unit_of_layer=config.model.unit_of_layer(),
        from_spikingjelly=lambda weights: from_spikingjelly(weights, config.model.depth),
    )
    return training.run(config, config.model, provider)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
