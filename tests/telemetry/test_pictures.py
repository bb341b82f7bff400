"""Pictures of samples, looked at pixel by pixel."""

from __future__ import annotations

import numpy as np
import pytest

from megasnn.telemetry.pictures import frames_to_rgb, image_to_rgb, sample_sheet

WHITE, RED, BLUE, BLACK = (255, 255, 255), (255, 0, 0), (0, 0, 255), (0, 0, 0)


def test_polarities_have_their_colours() -> None:
    frames = np.zeros((3, 2, 4, 5), np.uint8)
    frames[0, 1, 0, 1] = frames[1, 0, 2, 3] = 7
    frames[2, :, 3, 4] = 7
    pictures = frames_to_rgb(frames)
    assert pictures.shape == (3, 4, 5, 3) and pictures.dtype == np.uint8
    assert tuple(pictures[0, 0, 1]) == RED and tuple(pictures[1, 2, 3]) == BLUE and tuple(pictures[2, 3, 4]) == BLACK
    assert (pictures == WHITE).all(-1).sum() == 3 * 20 - 3


def test_a_hot_pixel_leaves_the_others_visible_and_nothing_is_white() -> None:
    frames = np.ones((1, 2, 30, 30), np.float32)
    frames[:, 0] = 0
    frames[0, 1, 5, 5] = 1000
    assert (frames_to_rgb(frames) == RED).all()
    assert (frames_to_rgb(np.zeros((2, 2, 3, 3))) == 255).all()


def test_images_of_all_kinds() -> None:
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    for image in (grey, grey[..., None], np.stack([grey] * 3, -1)):
        assert np.array_equal(image_to_rgb(image), np.stack([grey] * 3, -1))
    stretched = image_to_rgb(np.linspace(-2, 2, 12, dtype=np.float32).reshape(1, 3, 4))
    assert stretched.shape == (3, 4, 3) and stretched[0, 0, 0] == 0 and stretched[2, 3, 0] == 255


def test_a_sheet_shows_every_frame_magnified_and_in_order() -> None:
    frames = np.zeros((2, 3, 2, 32, 32), np.uint8)
    for sample in range(2):
        for step in range(3):
            frames[sample, step, 1, 5 * sample + step, 7] = 1
    sheet = sample_sheet(list(frames), ["first", "second"], width=100)
    red = np.argwhere((sheet == RED).all(-1))
    assert len(red) == 6 * 4, "six pixels, twice as large"
    rows = {(int(y), int(x)) for y, x in red[::1]}
    tops = sorted((y, x) for y, x in rows if (y - 1, x) not in rows and (y, x - 1) not in rows)
    first, second = tops[:3], tops[3:]
    assert [(y - first[0][0], x - first[0][1]) for y, x in first] == [(0, 0), (2, 68), (4, 136)]
    assert second[0][0] - first[0][0] == 64 + 14 + 4 + 2 * 5, "the second sample is below the first"
    assert second[0][1] == first[0][1]
    assert (sheet < 100).all(-1).sum() > 30, "captions"


def test_large_images_are_reduced_and_laid_side_by_side() -> None:
    sheet = sample_sheet([np.zeros((300, 600, 3), np.uint8)] * 3, ["a", "b", "c"], width=600)
    assert sheet.shape == (2 * (128 + 14) + 3 * 4, 2 * 256 + 3 * 4, 3)


@pytest.mark.parametrize("shape", [(3, 3, 4, 4), (4, 4, 7), (5,)])
def test_what_is_no_picture_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not"):
        sample_sheet([np.zeros(shape, np.uint8)], ["caption"])
    with pytest.raises(ValueError, match="0 samples"):
        sample_sheet([], [])
