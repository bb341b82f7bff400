#!/usr/bin/env bash
# Trains a small Spikformer on scikit-learn's handwritten digits with tensor parallel 2 and pipeline parallel 2:
# four ranks, on four GPUs or on the CPU. Arguments are passed on and win over the recipe:
#
#     bash scripts/pretrain_spikformer_tp2_pp2.sh --train-iters 50 --lr 2e-3
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_launch.sh"

on_ranks 4
train "$(new_run spikformer_tp2_pp2)" spikformer/digits \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 $(saving_every 50 "$@") "$@"
