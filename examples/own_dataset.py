"""Training on a `Dataset` of your own: `python examples/own_dataset.py --train-iters 200`, or under torchrun.

scikit-learn's digits, moved at random in training. The run seeds torch, NumPy and random for each sample and epoch, so
every layout and every restart sees the same images. `--help` lists all flags.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import sklearn.datasets
import torch
from torch.utils.data import Dataset, Subset

import megasnn
from megasnn import ConvNormNeuron, MeanLinear, layer


@dataclass(frozen=True, kw_only=True)
class Small(megasnn.Model):
    """Two spiking convolutions and a linear head."""

    image_size: int = 8
    """Height and width of the images."""
    in_channels: int = 1
    """Channels of the images."""

    def layers(self):
        yield layer("stem", ConvNormNeuron(self.in_channels, 16, kernel_size=3))
        yield layer("body", ConvNormNeuron(16, 32, kernel_size=3, stride=2))
        yield layer("head", MeanLinear(32, self.num_classes))


class Digits(Dataset):
    """Images `[1, 8, 8]`, normalised, with the digit as label."""

    def __init__(self, moves: bool) -> None:
        digits = sklearn.datasets.load_digits()
        self.images = torch.tensor(digits.images, dtype=torch.float32)  # 0 to 16
        self.labels = digits.target
        self.classes = [str(name) for name in digits.target_names]
        self.moves = moves

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = (self.images[index] / 16 - 0.305) / 0.376
        if self.moves:
            image = image.roll(random.choice([-1, 0, 1]), dims=1)
        return image.unsqueeze(0), int(self.labels[index])


if __name__ == "__main__":
    megasnn.pretrain(
        Small,
        dataset=Subset(Digits(moves=True), range(1500)),
        valid_dataset=Subset(Digits(moves=False), range(1500, 1797)),
    )
