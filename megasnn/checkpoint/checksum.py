"""CRC-32 of files, block by block, and how the sums of parts make the sum of the whole.

A block is the unit in which a file can be read and trusted: a rank that needs a slice of a large saved tensor reads
and checks the blocks that cover it. CRC-32 finds every single flipped bit and every burst up to 32 bits. The sum of a
whole file is the usual one, which other tools can compute as well.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable
from functools import lru_cache

BLOCK = 1 << 20
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # the polynomial 1; the highest power is the lowest bit


def block_lengths(length: int) -> list[int]:
    """The lengths of the blocks of a piece of so many bytes."""
    full, rest = divmod(length, BLOCK)
    return [BLOCK] * full + [rest] * (rest > 0)


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of bytes one after the other, from (CRC-32, length) of each part; the bytes are not needed.

    Appending n bytes multiplies what came before by x^8n in the field of polynomials over two elements, modulo the
    checksum's polynomial.
    """
    whole = 0
    for checksum, length in parts:
        whole = _multiply(_power(8 * length), whole) ^ checksum
    return whole


@lru_cache(maxsize=4096)
def _power(exponent: int) -> int:
    """x^exponent."""
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        exponent >>= 1
    return result


def _multiply(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def file_checksum(file: io.FileIO) -> int:
    """The CRC-32 of the rest of a file, read in blocks."""
    checksum = 0
    while block := file.read(BLOCK):
        checksum = zlib.crc32(block, checksum)
    return checksum
