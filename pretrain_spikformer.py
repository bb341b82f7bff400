"""Pretrain Spikformer on images with data, tensor and pipeline parallelism.

    python pretrain_spikformer.py --train-iters 100                              one process, the bundled digits
    torchrun --nproc-per-node 4 pretrain_spikformer.py --tensor-model-parallel-size 2 \\
        --pipeline-model-parallel-size 2 --data-path "cifar/train-{00..09}.tar" --train-iters 1000
    python pretrain_spikformer.py --help                                         all flags
"""

from __future__ import annotations

import sys

from megasnn.models.spikformer.dimensions import PretrainSpikformerConfig
from megasnn.process.launch import launch


def train(config: PretrainSpikformerConfig) -> int:
    from megasnn import training
    from megasnn.models.spikformer.model import describe_spikformer
    from megasnn.models.spikformer.spikingjelly_names import from_spikingjelly

    provider = training.ModelProvider(
        description=describe_spikformer(config.model, training.neuron_spec(config)),
        from_spikingjelly=lambda weights: from_spikingjelly(weights, config.model.depth),
    )
    return training.run(config, config.model, provider)


def main(argv: list[str]) -> int:
    return launch(PretrainSpikformerConfig, train, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
