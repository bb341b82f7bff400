"""The first layer of models that look at event frames."""

from __future__ import annotations

from torch import Tensor

from megasnn.layers import ConvNormNeuron, ParallelBatchNorm, ParallelConv, ParallelNeuron


class EventBlock(ConvNormNeuron):
    """Takes event frames `[N, T, C, H, W]`, sample by sample as they are loaded, and goes on with time first.

    Args:
        input_shape: (T, C, H, W).
    Raises:
        ValueError: in forward, for input of another shape.
    """

    def __init__(
        self,
        conv: ParallelConv,
        norm: ParallelBatchNorm,
        neuron: ParallelNeuron,
        *,
        input_shape: tuple[int, ...],
        pool: bool = False,
    ) -> None:
        super().__init__(conv, norm, neuron, pool=pool)
        self.input_shape = input_shape

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 5 or tuple(x.shape[1:]) != self.input_shape:
            wanted = ", ".join(map(str, self.input_shape))
            raise ValueError(
                f"expected event frames [N, {wanted}] (N, --time-steps, --in-channels and twice --image-size), got "
                f"shape {list(x.shape)}"
            )
        return super().forward(x.transpose(0, 1))
