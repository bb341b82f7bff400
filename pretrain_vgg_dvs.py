"""Pretrain the VGG of the event-camera literature with data, tensor and pipeline parallelism.

    python pretrain_vgg_dvs.py --channels 16,P,32,P,64,P --image-size 32 --time-steps 4 --train-iters 100
    torchrun --nproc-per-node 4 pretrain_vgg_dvs.py --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 2 --data-path "cifar10-dvs/train-{00000..00017}.tar" --train-iters 10000
    python pretrain_vgg_dvs.py --help                                            all flags

The first one records the bundled digits with a simulated event camera; tools/preprocess_data.py makes shards of others.
"""

from __future__ import annotations

import sys

from megasnn.models.vgg_dvs.dimensions import PretrainVggDvsConfig
from megasnn.process.launch import launch


def train(config: PretrainVggDvsConfig) -> int:
    from megasnn import training
    from megasnn.models.vgg_dvs.model import describe_vgg_dvs
    from megasnn.models.vgg_dvs.spikingjelly_names import vgg_from_spikingjelly

    pools = [block.pool for block in config.model.blocks]
    provider = training.ModelProvider(
        description=describe_vgg_dvs(config.model, training.neuron_spec(config)),
        from_spikingjelly=lambda weights: vgg_from_spikingjelly(weights, pools),
    )
    return training.run(config, config.model, provider)


def main(argv: list[str]) -> int:
    return launch(PretrainVggDvsConfig, train, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
