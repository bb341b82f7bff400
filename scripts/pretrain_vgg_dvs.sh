#!/usr/bin/env bash
# Trains a VGG on event-camera data, on two ranks that share every layer (tensor parallel 2): two GPUs, or the CPU.
#
#     bash scripts/pretrain_vgg_dvs.sh                                             # a small one on recorded digits
#     bash scripts/pretrain_vgg_dvs.sh --data-path "SHARDS/train-{00000..00017}.tar"   # CIFAR10-DVS, in full size
#
# Without --data-path, a simulated event camera records scikit-learn's digits. With it, the model is SpikingJelly's
# CIFAR10DVSVGG for frames of 48 x 48 and 10 time steps, with the recipe of scripts/pretrain_vgg_dvs_cifar10dvs.sh.
# Arguments are passed on and win, the parallel sizes included:
#
#     bash scripts/pretrain_vgg_dvs.sh --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_launch.sh"

if [[ $(option --data-path sample "$@") != sample ]]; then
    exec bash "$(dirname "$SCRIPT")/pretrain_vgg_dvs_cifar10dvs.sh" --tensor-model-parallel-size 2 \
        --pipeline-model-parallel-size 1 "$@"
fi
set -- --tensor-model-parallel-size 2 $(saving_every 50 "$@") "$@"
on_ranks_of "$@"
train "$(new_run vgg_dvs)" vgg_dvs/digits "$@"
