"""Port of a SpikingJelly script: `python examples/port_spikingjelly.py`, or under torchrun on several ranks.

    torchrun --standalone --nproc-per-node 2 examples/port_spikingjelly.py --tensor-model-parallel-size 2

The network is as it was. These parts of a script for one process go away: the repetition of the image over T and the
mean over T (neurons repeat a single step, and the loss takes the mean), `functional.reset_net` (neurons start at rest
in every micro-batch), the optimizer and its schedule (flags), and the share of a rank in the batch (an Engine takes
it).
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from dataclasses import dataclass

import sklearn.datasets
import torch
from spikingjelly.activation_based import functional, layer, neuron, surrogate
from torch import nn

import megasnn


def csnn(channels: int, classes: int) -> nn.Sequential:
    """The network of SpikingJelly's tutorial on convolutional SNNs, for images of 8 x 8 pixels."""
    features = nn.Sequential(
        layer.Conv2d(1, channels, kernel_size=3, padding=1, bias=False),
        layer.BatchNorm2d(channels),
        neuron.IFNode(surrogate_function=surrogate.ATan()),
        layer.MaxPool2d(2, 2),
        layer.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False),
        layer.BatchNorm2d(channels),
        neuron.IFNode(surrogate_function=surrogate.ATan()),
        layer.MaxPool2d(2, 2),
    )
    head = nn.Sequential(
        layer.Flatten(),
        layer.Linear(channels * 2 * 2, channels * 4, bias=False),
        neuron.IFNode(surrogate_function=surrogate.ATan()),
        layer.Linear(channels * 4, classes, bias=False),
        neuron.IFNode(surrogate_function=surrogate.ATan()),
    )
    net = nn.Sequential(OrderedDict(features=features, head=head))
    functional.set_step_mode(net, "m")
    return net


@dataclass(frozen=True, kw_only=True)
class CSNN(megasnn.Model):
    image_size: int = 8
    in_channels: int = 1
    channels: int = 32

    def layers(self):
        # Each module becomes a layer, cut by channel where tensor-parallel ranks share it.
        yield from megasnn.shard(csnn(self.channels, self.num_classes))


def main() -> None:
    parser = argparse.ArgumentParser(description="SpikingJelly's CSNN on scikit-learn's digits")
    parser.add_argument("--tensor-model-parallel-size", type=int, default=1)
    parser.add_argument("--train-iters", type=int, default=80)
    options = parser.parse_args()
    digits = sklearn.datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    flags = {"micro_batch_size": 32, "global_batch_size": 64, "lr": 1e-2, **vars(options)}
    with megasnn.Engine(CSNN(time_steps=4), **flags) as engine:
        for step in range(options.train_iters):
            begin = 64 * (step % 20)  # 1280 of the 1797 images
            result = engine.train_step(images[begin : begin + 64], labels[begin : begin + 64])
        record = engine.evaluate(images[1280:], labels[1280:])
        if engine.state.rank == 0:
            print(f"loss {result.loss:.3f}, accuracy {record.top1:.1%}")


if __name__ == "__main__":
    main()
