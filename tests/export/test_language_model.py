"""torch.export follows a language model, before and after the model has computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megasnn import Engine, load_model
from megasnn.models.spike_lm.model import SpikeLM


@pytest.mark.parametrize(("attention", "positions"), [("softmax", "rotary"), ("spiking", "learned")])
def test_an_export_computes_what_the_model_does(tmp_path: Path, attention: str, positions: str) -> None:
    model = SpikeLM(
        embed_dim=16, depth=1, num_heads=2, seq_length=12, vocab_size=20, attention=attention, positions=positions
    )
    with Engine(model, precision="fp64", micro_batch_size=2, global_batch_size=2, lr_decay_style="constant") as engine:
        engine.save(tmp_path)
    trained = load_model(tmp_path)
    tokens = torch.randint(20, (2, 12), generator=torch.Generator().manual_seed(0))
    first = torch.export.export(trained, (tokens,), strict=False).module()(tokens)
    expected = trained(tokens)
    again = torch.export.export(trained, (tokens,), strict=False).module()(tokens)
    assert expected.any()
    torch.testing.assert_close(first, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again, expected, rtol=1e-12, atol=1e-12)
