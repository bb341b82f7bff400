#!/usr/bin/env bash
# nir 1.0.8: a graph with a valid grouped convolution is refused, since the second size of its weight is taken for the
# number of input channels. A depthwise convolution of 4 channels is said to take 1 channel. A convolution without an
# input_shape, in a graph that is made without the check, passes when types are inferred: they come from its neighbours.

source "$(dirname "${BASH_SOURCE[0]}")/_run.sh"
packages nir==1.0.8 numpy==2.4.6
program <<'PY'
import nir
import numpy as np


def graph(groups, shape=(8, 8), **options):
    weight = np.ones((8, 4 // groups, 3, 3), np.float32)
    bias = np.zeros(8, np.float32)
    convolution = nir.Conv2d(shape, weight, stride=1, padding=1, dilation=1, groups=groups, bias=bias)
    nodes = {
        "input": nir.Input({"input": np.array([4, 8, 8])}),
        "conv": convolution,
        "output": nir.Output({"output": np.array([8, 8, 8])}),
    }
    return nir.NIRGraph(nodes, [("input", "conv"), ("conv", "output")], **options)


for groups in (1, 2, 4):
    try:
        graph(groups)
        print(f"4 channels, {groups} groups: a graph")
    except ValueError as error:
        print(f"4 channels, {groups} groups: {error}")
unchecked = graph(4, shape=None, type_check=False)
unchecked.infer_types()
inferred = unchecked.nodes["conv"].input_type["input"]
print(f"4 channels, 4 groups, no input_shape, unchecked: input inferred as {inferred.tolist()}")
PY
expected <<'OUT'
4 channels, 1 groups: a graph
4 channels, 2 groups: Type inference error: type mismatch: input.output: [[4 8 8]] -> conv.input: [[2 8 8]]
4 channels, 4 groups: Type inference error: type mismatch: input.output: [[4 8 8]] -> conv.input: [[1 8 8]]
4 channels, 4 groups, no input_shape, unchecked: input inferred as [4, 8, 8]
OUT
