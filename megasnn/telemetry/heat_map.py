"""How the spikes of all layers change over a run, as one picture: layers against iterations, shades for shares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from megasnn.telemetry.spikes import LayerSpikes

_COLUMNS = 120  # of the history at most
_ROW, _WIDTH, _GAP, _HEAD, _FOOT = 14, 240, 56, 34, 44  # pixels
_INK, _PAPER = (20, 20, 20), (255, 255, 255)
_DARK = np.array((8, 48, 107), np.float64)  # of the largest share; white is 0
_PANELS = {"firing_rate": "firing rate (spikes per step)", "silent": "silent neurons", "saturated": "always firing"}


class SpikeHistory:
    """Keeps the statistics of the layers at a bounded number of iterations, evenly spread over what has passed."""

    def __init__(self) -> None:
        self._iterations: list[int] = []
        self._layers: list[list[LayerSpikes]] = []
        self._every, self._seen = 1, 0

    def add(self, iteration: int, layers: Sequence[LayerSpikes]) -> None:
        """The layers in the model's order, the same ones each time."""
        if layers and self._seen % self._every == 0:
            self._iterations.append(iteration)
            self._layers.append(list(layers))
        self._seen += 1
        if len(self._iterations) > _COLUMNS:
            self._iterations, self._layers = self._iterations[::2], self._layers[::2]
            self._every *= 2

    def __len__(self) -> int:
        return len(self._iterations)

    def picture(self) -> NDArray[np.uint8]:
        """uint8 `[height, width, 3]`: a panel for each statistic with a row for each layer, its last value beside it.

        Raises:
            ValueError: nothing was added.
        """
        if not self._iterations:
            raise ValueError("a history of spikes without a single iteration cannot be drawn")
        font = ImageFont.load_default()
        names = [layer.name for layer in self._layers[0]]
        left = 12 + int(max(font.getlength(name) for name in names))
        size = left + len(_PANELS) * (_WIDTH + _GAP), _HEAD + _ROW * len(names) + _FOOT
        sheet = Image.new("RGB", size, _PAPER)
        pen = ImageDraw.Draw(sheet)
        for row, name in enumerate(names):
            pen.text((4, _HEAD + _ROW * row + 1), name, _INK, font)
        for index, (statistic, title) in enumerate(_PANELS.items()):
            values = np.array([[getattr(layer, statistic) for layer in column] for column in self._layers]).T
            self._panel(sheet, pen, left + index * (_WIDTH + _GAP), title, values)
        return np.asarray(sheet)

    def _panel(
        self, sheet: Image.Image, pen: ImageDraw.ImageDraw, left: int, title: str, values: NDArray[np.float64]
    ) -> None:
        """Values `[layers, iterations]` with a title, an axis of iterations and a scale of shades."""
        font = ImageFont.load_default()
        most = max(float(values.max()), 1e-3)
        cells = Image.fromarray(_shades(values / most)).resize((_WIDTH, _ROW * len(values)), Image.Resampling.NEAREST)
        bottom = _HEAD + _ROW * len(values)
        pen.text((left, 2), title, _INK, font)
        ramp = Image.fromarray(_shades(np.linspace(0, 1, _WIDTH // 2)[None])).resize((_WIDTH // 2, 8))
        sheet.paste(ramp, (left + 14, 20))
        pen.rectangle((left + 13, 19, left + 14 + _WIDTH // 2, 28), outline=_INK)
        pen.text((left, 18), "0", _INK, font)
        pen.text((left + 20 + _WIDTH // 2, 18), f"{most:.3g}", _INK, font)
        sheet.paste(cells, (left, _HEAD))
        pen.rectangle((left - 1, _HEAD - 1, left + _WIDTH, bottom), outline=_INK)
        for row, value in enumerate(values[:, -1]):
            pen.text((left + _WIDTH + 4, _HEAD + _ROW * row + 1), f"{value:.3f}", _INK, font)
        first, last = str(self._iterations[0]), str(self._iterations[-1])
        pen.text((left, bottom + 4), first, _INK, font)
        if last != first:
            pen.text((left + _WIDTH - int(font.getlength(last)), bottom + 4), last, _INK, font)
        pen.text((left + _WIDTH // 2 - 24, bottom + 18), "iteration", _INK, font)


def _shades(shares: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Shares between 0 and 1 -> colours, with one dimension more."""
    # The root makes small shares visible beside large ones.
    depth = np.sqrt(np.clip(np.nan_to_num(shares), 0, 1))[..., None]
    return np.rint(255 + depth * (_DARK - 255)).astype(np.uint8)
