"""A chunk as a sequence of its layers."""

from __future__ import annotations

import pytest
import torch

from megasnn.layers import BuildContext
from megasnn.models.build import describe_model
from megasnn.pipeline.chunk import build_chunks
from tests.models.networks import Tied


def test_a_chunk_has_length_order_and_names() -> None:
    description = describe_model(Tied())
    bounds = [range(0, 2), range(2, 2), range(2, len(description.layers))]
    chunks = build_chunks(description, bounds, range(3), BuildContext(), torch.device("cpu"), seed=0)
    assert [len(chunk) for chunk in chunks.values()] == [len(span) for span in bounds]
    assert [*chunks[0]] == [chunks[0]["stem"], chunks[0]["mix"]] == [chunks[0][0], chunks[0][-1]]
    assert chunks[1], "a chunk without layers is true"
    assert chunks[2]["block.0"] is chunks[2][0]
    with pytest.raises(IndexError):
        chunks[0][2]
    with pytest.raises(KeyError, match="chunk 0 has no layer 'block.0'; it has stem, mix"):
        chunks[0]["block.0"]
    with pytest.raises(KeyError, match="chunk 1 has no layer 'stem'; it has none"):
        chunks[1]["stem"]
