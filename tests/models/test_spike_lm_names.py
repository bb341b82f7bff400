"""SpikeLM's tensors under the names that SpikingJelly exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from megasnn import CausalAttention
from megasnn.checkpoint.exchange import import_weights, weights_as
from megasnn.checkpoint.source import open_source
from megasnn.common.files import CheckpointError
from megasnn.models.build import describe_model
from megasnn.models.registry import dialect_for, dialect_of
from megasnn.models.spike_lm.model import SpikeLM, SpikeLMNeuronConfig
from megasnn.models.weight_names import translated_tensors

DIM = 8
HEADS = 2
WORDS = 11
STEPS = 3
CALIBRATED = {"amplitude": "first-batch"}
# Their file for two layers (benchmark/snn_llm/sglang_models/spikelm.py, SpikingJelly commit 4b547f00).
SHAPES = {
    "attn_norm.norm.weight": (DIM,),
    "attn_norm.norm.bias": (DIM,),
    "attn_norm.amplitude": (STEPS,),
    "attn.qkv.weight": (3 * DIM, DIM),
    "attn.qkv.bias": (3 * DIM,),
    "attn.proj.weight": (DIM, DIM),
    "attn.proj.bias": (DIM,),
    "mlp_norm.norm.weight": (DIM,),
    "mlp_norm.norm.bias": (DIM,),
    "mlp_norm.amplitude": (STEPS,),
    "mlp.fc1.weight": (4 * DIM, DIM),
    "mlp.fc1.bias": (4 * DIM,),
    "mlp.fc2.weight": (DIM, 4 * DIM),
    "mlp.fc2.bias": (DIM,),
}


def exported() -> dict[str, Tensor]:
    found = {f"model.final_norm.{tensor}": torch.rand(DIM) for tensor in ("weight", "bias")}
    found |= {name: torch.rand(WORDS, DIM) for name in ("model.embedding.weight", "lm_head.weight")}
    for layer in range(2):
        found |= {f"model.layers.{layer}.{name}": torch.rand(shape) for name, shape in SHAPES.items()}
    return found


def model_of(**dimensions: object) -> SpikeLM:
    return SpikeLM(embed_dim=DIM, num_heads=HEADS, vocab_size=WORDS, time_steps=STEPS, depth=2, **dimensions)


def names_here(**dimensions: object) -> dict[str, tuple[int, ...]]:
    description = describe_model(model_of(**dimensions), SpikeLMNeuronConfig().spec)
    return {entry.name: tuple(entry.shard.global_shape) for entry in description.tensors}


def test_an_exported_file_fits_the_model_and_goes_back() -> None:
    theirs = exported()
    mine = translated_tensors(dialect_of(theirs).to_ours(theirs), theirs)
    assert {name: tuple(value.shape) for name, value in mine.items()} == names_here(amplitude="first-batch")
    back = translated_tensors(dialect_for("spikingjelly", mine).from_ours(mine), mine)
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], value) for name, value in theirs.items())


def test_a_tied_model_has_its_words_twice_in_their_file() -> None:
    ours = names_here(amplitude="first-batch", tied=True)
    recipe = dialect_for("spikingjelly", ours).from_ours(ours)
    assert recipe.keys() == exported().keys()
    assert recipe["lm_head.weight"].sources == recipe["model.embedding.weight"].sources == ("embedding.weight",)


def with_one_tensor(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in theirs.items() if name != "lm_head.weight"}


def test_a_tied_model_takes_its_file_with_the_words_twice_or_once() -> None:
    theirs = exported()
    theirs["lm_head.weight"] = theirs["model.embedding.weight"].clone()
    tied = model_of(tied=True)
    for file in (theirs, with_one_tensor(theirs)):
        mine = tied.from_spikingjelly(file)
        assert {name: tuple(value.shape) for name, value in mine.items()} == names_here(**CALIBRATED, tied=True)
        assert torch.equal(mine["embedding.weight"], theirs["model.embedding.weight"])
    apart = model_of().from_spikingjelly(theirs)
    assert apart.keys() == names_here(**CALIBRATED).keys()
    assert torch.equal(apart["head.weight"], apart["embedding.weight"])


def test_a_file_that_is_tied_where_the_model_is_not_is_refused_with_the_flag() -> None:
    theirs = exported()
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embedding\.weight: .* --tied"):
        model_of(tied=True).from_spikingjelly(theirs)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing.* --tied"):
        model_of().from_spikingjelly(with_one_tensor(theirs))


def test_an_imported_checkpoint_of_a_tied_model_goes_back_to_the_same_file(tmp_path: Path) -> None:
    theirs = exported()
    theirs["lm_head.weight"] = theirs["model.embedding.weight"].clone()
    save_file(theirs, tmp_path / "theirs.safetensors")
    import_weights(open_source(tmp_path / "theirs.safetensors"), tmp_path / "ours")
    ours = open_source(tmp_path / "ours")
    assert ours.tensors.keys() == names_here(**CALIBRATED, tied=True).keys()
    back = weights_as(ours, "spikingjelly").tensors
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[name], value) for name, value in theirs.items())


def test_a_fixed_amplitude_is_that_of_each_time_step_in_their_file() -> None:
    theirs = {name: value for name, value in exported().items() if not name.endswith("amplitude")}
    whole = {name: value for name, value in exported().items() if name.endswith("amplitude")} | theirs
    mine = translated_tensors(dialect_of(whole).to_ours(whole), whole)
    mine = {name: value for name, value in mine.items() if not name.endswith("amplitude")}
    values = {"time_steps": STEPS, "neuron": "bispike", "v_threshold": 0.75}
    back = translated_tensors(dialect_for("spikingjelly", mine).from_ours(mine, values), mine)
    assert {name: tuple(value.shape) for name, value in back.items()} == {k: tuple(v.shape) for k, v in whole.items()}
    assert all(torch.equal(back[name], value) for name, value in theirs.items())
    assert back["model.layers.1.mlp_norm.amplitude"].tolist() == STEPS * [0.75]
    with pytest.raises(CheckpointError, match="give a checkpoint of --neuron bispike"):
        dialect_for("spikingjelly", mine).from_ours(mine, values | {"neuron": "lif"})


def test_heads_of_megatron_are_the_heads_here() -> None:
    # Megatron Core's rows are [heads, (q, k, v), d]; the exporter writes [(q, k, v), heads, d].
    megatron = torch.rand(HEADS, 3, DIM // HEADS, DIM, dtype=torch.float64)
    theirs = exported()
    theirs["model.layers.1.attn.qkv.weight"] = megatron.transpose(0, 1).flatten(0, 2)
    mine = translated_tensors(dialect_of(theirs).to_ours(theirs), theirs)
    tokens = torch.rand(STEPS, 2, 5, DIM, dtype=torch.float64)
    heads = []
    for of_head in megatron:
        q, k, v = (tokens @ each.T for each in of_head)
        heads.append(F.scaled_dot_product_attention(q, k, v, is_causal=True))
    qkv = tokens @ mine["blocks.1.attention.qkv.weight"].squeeze(-1).T
    found = CausalAttention(DIM, HEADS, rotary_base=None)(qkv.transpose(2, 3))
    torch.testing.assert_close(found.transpose(2, 3), torch.cat(heads, -1), rtol=0, atol=1e-12)


def test_other_tensors_are_refused() -> None:
    theirs = exported().keys()
    for names, told in (
        (theirs - {"model.layers.1.attn.qkv.bias"}, r"model\.layers\.1\.attn\.qkv\.bias: missing"),
        ({*theirs, "model.layers.0.attn.gate"}, r"model\.layers\.0\.attn\.gate: unexpected"),
    ):
        with pytest.raises(CheckpointError, match=told):
            dialect_of(theirs).to_ours(names)
    for dimensions, told in (
        ({}, "give a checkpoint of --neuron bispike"),
        ({"amplitude": "first-batch", "positions": "learned"}, r"embedding\.positions: unexpected"),
    ):
        ours = names_here(**dimensions)
        with pytest.raises(CheckpointError, match=told):
            dialect_for("spikingjelly", ours).from_ours(ours)
