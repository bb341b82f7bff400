"""Names of QKFormer's tensors in SpikingJelly; the tensors are the same on both sides, shape by shape."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from megasnn.files.problems import CheckpointError
from megasnn.models.names import ModelValues, Recipe, prefix_dialect, unit_prefixes
from megasnn.models.qkformer.dimensions import STAGES

_EMBEDDING = {
    "patch_embed1.begin": ("conv1", "bn1", "lif1"),
    "patch_embed1.down": ("conv2", "bn2", "lif2"),
    "patch_embed1.last": ("conv3", "bn3", "lif3"),
}
for _stage in range(2, STAGES + 1):
    _EMBEDDING |= {
        f"patch_embed{_stage}.down": ("conv1", "bn1", "lif1"),
        f"patch_embed{_stage}.last": ("conv2", "bn2", "lif2"),
    }
for _stage in range(1, STAGES + 1):
    _EMBEDDING[f"patch_embed{_stage}.shortcut"] = ("shortcut.0", "shortcut.1", "shortcut.2")
_BLOCK = {
    **{
        f"attention.inner.{ours}": (f"attn.{theirs}_conv_bn.0", f"attn.{theirs}_conv_bn.1", f"attn.{theirs}_lif")
        for ours, theirs in (("qk", "qk"), ("qkv", "qkv"), ("projection", "proj"))
    },
    "mlp.fc1": ("mlp.fc1", "mlp.bn1", "mlp.lif1"),
    "mlp.fc2": ("mlp.fc2", "mlp.bn2", "mlp.lif2"),
}

_NAMES = prefix_dialect(
    "spikingjelly",
    "SpikingJelly's QKFormer",
    marker="stage1.0.attn.qk_conv_bn.0.weight",
    prefixes={
        **unit_prefixes({ours: (ours.partition(".")[0], theirs) for ours, theirs in _EMBEDDING.items()}),
        **unit_prefixes({f"stage{{}}.{{}}.{ours}": ("stage{}.{}", theirs) for ours, theirs in _BLOCK.items()}),
        "stage{}.{}.attention.inner.neuron": "stage{}.{}.attn.attn_lif",
        "head": "head",
    },
)


def _outgoing(names: Collection[str], model: ModelValues | None) -> Recipe:
    if model is not None and model.get("patch_embedding", "imagenet") != "imagenet":
        raise CheckpointError("SpikingJelly's QKFormer has no --patch-embedding cifar")
    return _NAMES.outgoing(names, model)


SPIKINGJELLY = replace(_NAMES, outgoing=_outgoing)
