#!/usr/bin/env bash
# Trains SpikingJelly's spikformer_cifar10 on CIFAR-10 with tensor parallel 2 and pipeline parallel 2, on four GPUs or
# on the CPU, by the published recipe (docs/recipes.md) but in micro-batches of 32: a pipeline needs several. The images
# are webdataset shards, of any number of files, .tar or .tar.gz:
#
#     bash scripts/pretrain_spikformer_cifar10.sh \
#         --data-path "cifar10/train-{00000..00009}.tar" --valid-data-path "cifar10/test-{00000..00001}.tar"
#
# Further arguments are passed on and win over the recipe. Without GPUs one iteration takes many seconds: try
# `--precision fp32 --global-batch-size 32 --micro-batch-size 8 --exit-interval 300` first.
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_launch.sh"

if [[ -z $(option --data-path "" "$@") ]]; then
    ask_for_data CIFAR-10 "--data-path 'DIR/train-{00000..00009}.tar' --valid-data-path '...'" "$@"
fi
on_ranks 4
train "$(new_run spikformer_cifar10)" spikformer/cifar10 \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 32 \
    $(evaluation_every 400 "$@") $(saving_every 400 "$@") "$@"
