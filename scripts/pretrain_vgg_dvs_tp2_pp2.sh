#!/usr/bin/env bash
# The same small VGG on recorded digits as scripts/pretrain_vgg_dvs.sh, with tensor parallel 2 and pipeline parallel 2:
# four ranks, on four GPUs or on the CPU. Arguments are passed on and win over those below.
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_setup.sh"

prepare_python
RUN=$(new_run vgg_dvs_tp2_pp2)
train_vgg "$RUN" --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "${EVENT_DIGITS[@]}" -- "$@"

report "$SCRIPT" --train-iters \
    "$(option --save "$RUN/checkpoints" "$@")" "$(option --tensorboard-dir "$RUN/tensorboard" "$@")"
