"""E-SpikeFormer's tensor names in github.com/BICLab/Spike-Driven-Transformer-V3. Shapes are equal."""

from __future__ import annotations

from megasnn.models.weight_names import conv_norm_prefixes, prefix_dialect

_DOWNSAMPLING = ("downsample1_1", "downsample1_2", "downsample2", "downsample3", "downsample4")
_CONV_BLOCKS = {
    "stage0.0": "ConvBlock1_1.0",
    "stage1.0": "ConvBlock1_2.0",
    "stage2.0": "ConvBlock2_1.0",
    "stage2.1": "ConvBlock2_2.0",
}
_BLOCKS = {"stage3.{}": "block3.{}", "stage4.{}": "block4.{}"}
_SEPARABLE = {**{x: f"{y}.Conv" for x, y in _CONV_BLOCKS.items()}, **{x: f"{y}.conv" for x, y in _BLOCKS.items()}}
_PATHS = {"expand": "pwconv1", "depthwise": "dwconv", "project": "pwconv2"}
_ATTENTION = {"q": "q_conv", "k": "k_conv", "v": "v_conv", "projection": "proj_conv"}

_CONV_NORMS = {  # {} stands for a number
    **{f"downsample.{i}": (path, ("encode_conv", "encode_bn")) for i, path in enumerate(_DOWNSAMPLING)},
    **{
        f"{block}.separable.{conv_norm}": (f"{theirs}.{path}", ("0", "1"))
        for block, theirs in _SEPARABLE.items()
        for conv_norm, path in _PATHS.items()
    },
    **{
        f"{block}.attention.{conv_norm}": (f"{theirs}.attn.{path}", ("0", "1"))
        for block, theirs in _BLOCKS.items()
        for conv_norm, path in _ATTENTION.items()
    },
    **{f"{x}.mlp.fc{i}": (y, (f"conv{i}", f"bn{i}")) for x, y in _CONV_BLOCKS.items() for i in (1, 2)},
    **{f"{x}.mlp.fc{i}": (f"{y}.mlp", (f"fc{i}_conv", f"fc{i}_bn")) for x, y in _BLOCKS.items() for i in (1, 2)},
}

PUBLISHED = prefix_dialect(
    "published",
    "the published E-SpikeFormer",
    marker="downsample1_1.encode_conv.weight",
    prefixes={**conv_norm_prefixes(_CONV_NORMS), "head": "head"},
)

DIALECTS = (PUBLISHED,)
