#!/usr/bin/env bash
# Trains a small SpikeLM on text that ships with Python, with tensor parallel 2 and pipeline parallel 2: four ranks, on
# four GPUs or on the CPU. Arguments are passed on and win over the recipe:
#
#     bash scripts/pretrain_spike_lm_tp2_pp2.sh --data-path my_texts --valid-data-path other_texts --train-iters 1000
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_launch.sh"

on_ranks 4
train "$(new_run spike_lm_tp2_pp2)" spike_lm/text \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 $(saving_every 50 "$@") "$@"
