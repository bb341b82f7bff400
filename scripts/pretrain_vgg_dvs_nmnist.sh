#!/usr/bin/env bash
# Trains a small VGG on N-MNIST, or a part of it, on two ranks that share every layer (tensor parallel 2). First make
# shards of the recordings and keep their events, so that the number of time steps is chosen here:
#
#     python tools/preprocess_data.py n-mnist --input N-MNIST --output SHARDS --keep-events
#     bash scripts/pretrain_vgg_dvs_nmnist.sh \
#         --data-path "SHARDS/train-{00000..00119}.tar" --valid-data-path "SHARDS/test-{00000..00019}.tar"
#
# The length in the recipe fits a thousand training samples. As a pipeline of two stages instead:
#
#     ... --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_launch.sh"

if [[ -z $(option --data-path "" "$@") || -z $(option --valid-data-path "" "$@") ]]; then
    ask_for_data N-MNIST "--data-path 'SHARDS/train-{00000..00001}.tar' --valid-data-path '...'" "$@"
fi
set -- --tensor-model-parallel-size 2 --eval-interval 60 $(saving_every 100 "$@") "$@"
on_ranks_of "$@"
train "$(new_run vgg_dvs_nmnist)" vgg_dvs/nmnist "$@"
