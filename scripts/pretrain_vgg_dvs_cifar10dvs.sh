#!/usr/bin/env bash
# Trains SpikingJelly's CIFAR10DVSVGG on CIFAR10-DVS with tensor parallel 2 and pipeline parallel 2, on four GPUs or on
# the CPU. First make shards of the recordings, then train; the held-out tenth of each class is in the test shards:
#
#     python tools/preprocess_data.py cifar10-dvs --input RECORDINGS --output SHARDS --time-steps 10 --size 48
#     bash scripts/pretrain_vgg_dvs_cifar10dvs.sh \
#         --data-path "SHARDS/train-{00000..00017}.tar" --valid-data-path "SHARDS/test-{00000..00001}.tar"
#
# The recipe is that of temporal efficient training (Deng et al. 2022): 10 frames of 48 x 48, mirrored and rolled,
# Adam at 1e-3 with a cosine, 300 epochs of 9,000 samples in batches of 128. Arguments are passed on and win over the
# recipe. Without GPUs an iteration takes a minute: try `--global-batch-size 16 --train-epochs none --train-iters 50` first.
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_launch.sh"

if [[ -z $(option --data-path "" "$@") ]]; then
    ask_for_data CIFAR10-DVS "--data-path 'SHARDS/train-{00000..00017}.tar' --valid-data-path '...'" "$@"
fi
set -- --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
    $(evaluation_every 700 "$@") $(saving_every 700 "$@") "$@"
on_ranks_of "$@"
train "$(new_run vgg_dvs_cifar10dvs)" vgg_dvs/cifar10dvs "$@"
