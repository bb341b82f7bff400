#!/usr/bin/env bash
# Trains a small Spikformer on scikit-learn's handwritten digits with context parallel 2: two ranks, on two GPUs or on
# the CPU, share the samples of every micro-batch, and norms use the statistics of all of them. Arguments are passed on
# and win over the recipe:
#
#     bash scripts/pretrain_spikformer_cp2.sh --train-iters 50 --lr 2e-3
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_launch.sh"

on_ranks 2
train "$(new_run spikformer_cp2)" spikformer/digits --context-parallel-size 2 $(saving_every 50 "$@") "$@"
