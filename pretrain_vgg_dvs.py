"""Pretrain a spiking VGG on event-camera recordings with data, tensor and pipeline parallelism.

    python pretrain_vgg_dvs.py --channels 16,P,32,P,64,P --image-size 32 --time-steps 4 --train-iters 100
    torchrun --standalone --nproc-per-node 4 pretrain_vgg_dvs.py --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 2 --data-path "cifar10-dvs/train-{00000..00017}.tar" --train-iters 10000
    python pretrain_vgg_dvs.py --help                                            all flags

The first command records the bundled digits with a simulated event camera. For other recordings, make shards with
tools/preprocess_data.py.
"""

from __future__ import annotations

import sys

from megasnn import pretrain


def main(argv: list[str]) -> int:
    return pretrain("vgg_dvs", argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
