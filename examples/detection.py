"""Detection of one square in a noisy image: `python examples/detection.py`, or under torchrun.

The output has five numbers a cell of a 4 x 4 grid: a score, and the box (left, top, right, bottom) as shares of the
image. The cell with the middle of the square learns its box, every cell learns whether it is that cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megasnn
from megasnn import ArraySpec, ConvNormNeuron, layer

GRID = 4


@dataclass(frozen=True, kw_only=True)
class Detector(megasnn.Model):
    image_size: int = 16
    in_channels: int = 1
    width: int = 16

    @property
    def target(self):
        return ArraySpec((4,))

    def layers(self):
        width = self.width
        yield layer("stem", ConvNormNeuron(self.in_channels, width, kernel_size=3))
        yield layer("half", ConvNormNeuron(width, 2 * width, kernel_size=3, stride=2))
        yield layer("quarter", ConvNormNeuron(2 * width, 2 * width, kernel_size=3, stride=2))
        yield layer("last", ConvNormNeuron(2 * width, 2 * width, kernel_size=3))
        yield layer("head", nn.Conv2d(2 * width, 5, 1))

    def loss(self, output, target):  # [T, N, 5, 4, 4] and [N, 4] -> [N]
        cells = output.mean(0).flatten(2)
        cell = _cell_of(target)
        score = F.cross_entropy(cells[:, 0], cell, reduction="none")
        return score + 5 * (_box_at(cells, cell) - target).abs().sum(1)

    def metrics(self, output, target):
        return {"iou": _overlap(self.predict(output), target)}

    def predict(self, output):
        cells = output.mean(0).flatten(2)
        return _box_at(cells, cells[:, 0].argmax(1))


def _cell_of(box: Tensor) -> Tensor:
    """Number of the grid's cell with the middle of a box, `[N]`."""
    across, down = ((box[:, :2] + box[:, 2:]) / 2 * GRID).long().clamp(0, GRID - 1).unbind(1)
    return down * GRID + across


def _box_at(cells: Tensor, cell: Tensor) -> Tensor:
    return cells[:, 1:].gather(2, cell[:, None, None].expand(-1, 4, 1)).squeeze(2)


def _overlap(box: Tensor, other: Tensor) -> Tensor:
    """Intersection over union, `[N]`."""
    low = torch.maximum(box[:, :2], other[:, :2])
    high = torch.minimum(box[:, 2:], other[:, 2:])
    both = (high - low).clamp(min=0).prod(1)
    areas = [(each[:, 2:] - each[:, :2]).clamp(min=0).prod(1) for each in (box, other)]
    return both / (areas[0] + areas[1] - both).clamp(min=1e-6)


def squares(count: int) -> tuple[Tensor, Tensor]:
    """Noisy images `[N, 1, 16, 16]`, and the box of each."""
    images = 0.3 * torch.randn(count, 1, 16, 16)
    boxes = torch.zeros(count, 4)
    for number in range(count):
        left, top, side = torch.randint(0, 9, (2,)).tolist() + torch.randint(4, 8, (1,)).tolist()
        images[number, 0, top : top + side, left : left + side] += 1
        boxes[number] = torch.tensor([left, top, left + side, top + side]) / 16
    return images, boxes


def main(steps: int = 200) -> None:
    torch.manual_seed(0)  # the same samples on every rank
    images, boxes = squares(1024)
    flags = {"micro_batch_size": 32, "global_batch_size": 64, "train_iters": steps, "lr": 5e-3}
    with megasnn.Engine(Detector(), **flags) as engine:
        for step in range(steps):
            begin = 64 * (step % 14)
            engine.train_step(images[begin : begin + 64], boxes[begin : begin + 64])
        record = engine.evaluate(images[896:], boxes[896:])
        if engine.state.rank == 0:
            print(f"iou {record.metrics['iou']:.3f}")


if __name__ == "__main__":
    main()
