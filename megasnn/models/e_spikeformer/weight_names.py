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
_PATHS = {"expand": "pwconv1", "depthwise": "dwconv", "project": "pwconv2"}
_ATTENTION = {"q": "q_conv", "k": "k_conv", "v": "v_conv", "projection": "proj_conv"}


def _conv_norms() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Our path -> (their path, their names for convolution and norm). {} stands for a number."""
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for number, path in enumerate(_DOWNSAMPLING):
        found[f"downsample.{number}"] = path, ("encode_conv", "encode_bn")
    for ours, theirs in _CONV_BLOCKS.items():
        for conv, path in _PATHS.items():
            found[f"{ours}.separable.{conv}"] = f"{theirs}.Conv.{path}", ("0", "1")
        for number in (1, 2):
            # Theirs has no module for this MLP.
            found[f"{ours}.mlp.fc{number}"] = theirs, (f"conv{number}", f"bn{number}")
    for ours, theirs in _BLOCKS.items():
        for conv, path in _PATHS.items():
            found[f"{ours}.separable.{conv}"] = f"{theirs}.conv.{path}", ("0", "1")
        for conv, path in _ATTENTION.items():
            found[f"{ours}.attention.{conv}"] = f"{theirs}.attn.{path}", ("0", "1")
        for number in (1, 2):
            found[f"{ours}.mlp.fc{number}"] = f"{theirs}.mlp", (f"fc{number}_conv", f"fc{number}_bn")
    return found


PUBLISHED = prefix_dialect(
    "published",
    "the published E-SpikeFormer",
    marker="downsample1_1.encode_conv.weight",
    prefixes={**conv_norm_prefixes(_conv_norms()), "head": "head"},
)

DIALECTS = (PUBLISHED,)
