"""Fine-tuning on another number of classes: `python examples/fine_tuning.py`, or under torchrun.

A network learns the digits 0 to 4. Its layers but the last one then start a network for all ten digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import sklearn.datasets
import torch
from torch import Tensor

import megasnn
from megasnn import ConvNormNeuron, MeanLinear, layer

SIZES = {"micro_batch_size": 32, "global_batch_size": 64}


@dataclass(frozen=True, kw_only=True)
class Digits(megasnn.Model):
    image_size: int = 8
    in_channels: int = 1

    def layers(self):
        yield layer("stem", ConvNormNeuron(self.in_channels, 32, kernel_size=3))
        yield layer("body", ConvNormNeuron(32, 64, kernel_size=3, stride=2))
        yield layer("head", MeanLinear(64, self.num_classes))


def train(engine: megasnn.Engine, images: Tensor, labels: Tensor, steps: int) -> None:
    for step in range(steps):
        chosen = torch.arange(64 * step, 64 * step + 64) % len(images)
        engine.train_step(images[chosen], labels[chosen])


def main() -> None:
    digits = sklearn.datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    few = labels[:1280] < 5
    with megasnn.Engine(Digits(num_classes=5), **SIZES, train_iters=60, lr=1e-2) as engine:
        train(engine, images[:1280][few], labels[:1280][few], 60)
        learned = engine.state_dict()
    # The stem moves at a tenth of the rate, the new head at the full rate.
    flags = {"train_iters": 100, "lr": 1e-2, "lr_scale": "stem.*=0.1"}
    with megasnn.Engine(Digits(num_classes=10), **SIZES, **flags) as engine:
        values = engine.state_dict()
        for name, value in learned.items():
            if value.shape == values[name].shape:
                values[name] = value
        engine.load_state_dict(values)
        train(engine, images[:1280], labels[:1280], 100)
        record = engine.evaluate(images[1280:], labels[1280:])
        if engine.state.rank == 0:
            print(f"accuracy on ten classes {record.top1:.1%}")


if __name__ == "__main__":
    main()
