"""Pretrain Spikformer on images with data, tensor and pipeline parallelism.

    python pretrain_spikformer.py --train-iters 100                              one process, the bundled digits
    python pretrain_spikformer.py --config spikformer/cifar10 --data-path "cifar/train-{00..09}.tar"   a recipe
    torchrun --standalone --nproc-per-node 4 pretrain_spikformer.py --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 2 --data-path "cifar/train-{00..09}.tar" --train-iters 1000
    python pretrain_spikformer.py --help                                         all flags
"""

from __future__ import annotations

import sys

from megasnn import pretrain


def main(argv: list[str]) -> int:
    return pretrain("spikformer", argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
