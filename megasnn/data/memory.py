"""Memory that processes share, without a name: it is gone when the last of them has let go of it."""

from __future__ import annotations

import mmap
import pickle
from typing import Any

from megasnn.child_process import shared_memory

_ALIGNMENT = 64  # bytes
Places = list[tuple[int, int]]


class SharedPlaces:
    """Numbered places in shared memory, as one of the processes that share them sees it.

    They lie in pieces that double, 1, 2, 4 places and so on: each piece has a descriptor open, and thousands of places
    need a few. A place takes memory only once it has been written to.
    """

    def __init__(self) -> None:
        self._pieces: dict[int, mmap.mmap] = {}

    def fits(self, place: int, size: int) -> bool:
        """Whether a place exists here and has `size` bytes."""
        return place_in_piece(place)[0] in self._pieces and size <= self._place_size(place)

    def add(self, place: int, descriptor: int) -> None:
        """Maps the piece that a place lies in. What was taken from a smaller one that it replaces stays valid."""
        self._pieces[place_in_piece(place)[0]] = mmap.mmap(descriptor, 0)

    def at(self, place: int, size: int) -> memoryview:
        """The first `size` bytes of a place. The memory lasts as long as any such view."""
        piece, number = place_in_piece(place)
        start = number * self._place_size(place)
        return memoryview(self._pieces[piece])[start : start + size]

    def _place_size(self, place: int) -> int:
        piece, _ = place_in_piece(place)
        return len(self._pieces[piece]) >> piece


def place_in_piece(place: int) -> tuple[int, int]:
    """The piece that a place lies in, of `2 ** piece` places, and its number in it."""
    piece = (place + 1).bit_length() - 1
    return piece, place + 1 - (1 << piece)


def new_piece(place: int, size: int) -> int:
    """A new file descriptor for the piece that a place lies in, with `size` bytes or a few more for each place."""
    piece, _ = place_in_piece(place)
    return shared_memory(_aligned(size) << piece)


def _aligned(size: int) -> int:
    return size + -size % _ALIGNMENT


def share(value: object) -> tuple[int, Places]:
    """Pickles a value into shared memory, its arrays beside it, so that all who unpickle it use the same arrays.

    Returns:
        the descriptor, and offset and length of each part: the pickle, then the arrays.
    """
    arrays: list[pickle.PickleBuffer] = []
    parts = [memoryview(pickle.dumps(value, 5, buffer_callback=arrays.append)), *(array.raw() for array in arrays)]
    places: Places = []
    size = 0
    for part in parts:
        places.append((size, len(part)))
        size += _aligned(len(part))
    descriptor = shared_memory(size)
    with mmap.mmap(descriptor, size) as memory:
        for (offset, length), part in zip(places, parts, strict=True):
            memory[offset : offset + length] = part
    return descriptor, places


def take(descriptor: int, places: Places) -> Any:
    """What `share` put there. What one process writes into its arrays, the others see."""
    memory = memoryview(mmap.mmap(descriptor, 0))
    pickled, *arrays = (memory[offset : offset + length] for offset, length in places)
    return pickle.loads(pickled, buffers=arrays)
