"""Pictures of samples and rasters."""

from __future__ import annotations

import numpy as np

from megasnn.telemetry.pictures import raster_picture, to_rgb

WHITE, RED, BLUE, BLACK = (255, 255, 255), (255, 0, 0), (0, 0, 255), (0, 0, 0)


def test_polarities_have_their_colours_and_frames_stand_side_by_side() -> None:
    frames = np.zeros((3, 2, 4, 5), np.uint8)
    frames[0, 1, 0, 1] = frames[1, 0, 2, 3] = 7
    frames[2, :, 3, 4] = 7
    picture = to_rgb(frames)
    assert picture.shape == (4, 3 * 6, 3) and picture.dtype == np.uint8
    assert tuple(picture[0, 1]) == RED and tuple(picture[2, 6 + 3]) == BLUE and tuple(picture[3, 12 + 4]) == BLACK
    assert (picture == WHITE).all(-1).sum() == 3 * 20 - 3


def test_images_of_all_kinds() -> None:
    grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    for image in (grey, grey[..., None], np.stack([grey] * 3, -1)):
        assert np.array_equal(to_rgb(image), np.stack([grey] * 3, -1))
    stretched = to_rgb(np.linspace(-2, 2, 12, dtype=np.float32).reshape(1, 3, 4))
    assert stretched.shape == (3, 4, 3) and stretched[0, 0, 0] == 0 and stretched[2, 3, 0] == 255


def test_a_raster_has_a_row_for_each_neuron_and_a_column_for_each_step() -> None:
    raster = np.zeros((2, 3, 4), bool)
    raster[1, 2, 0] = True  # the second sample's third neuron at the first step
    picture = raster_picture(raster)
    assert picture.shape == (3, 9, 3) and np.argwhere(picture[..., 0] == 0).tolist() == [[2, 5]]
    assert set(np.unique(picture[:, 4])) == {160}
