#!/usr/bin/env bash
# Trains a small VGG on N-MNIST, or a part of it, on two ranks that share every layer (tensor parallel 2). First make
# shards with the events, so that --time-steps can be chosen in training:
#
#     python tools/preprocess_data.py n-mnist --input N-MNIST --output SHARDS --keep-events
#     bash scripts/pretrain_vgg_dvs_nmnist.sh \
#         --data-path "SHARDS/train-{00000..00119}.tar" --valid-data-path "SHARDS/test-{00000..00019}.tar"
#
# The recipe is long enough for a thousand training samples. To train as a pipeline of two stages:
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
