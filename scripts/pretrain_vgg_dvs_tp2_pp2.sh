#!/usr/bin/env bash
# The same small VGG on recorded digits as scripts/pretrain_vgg_dvs.sh, with tensor parallel 2 and pipeline parallel 2:
# four ranks, on four GPUs or on the CPU. Arguments are passed on and win over the recipe.
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_launch.sh"

set -- --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 $(saving_every 50 "$@") "$@"
on_ranks_of "$@"
train "$(new_run vgg_dvs_tp2_pp2)" vgg_dvs/digits "$@"
