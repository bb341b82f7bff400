#!/usr/bin/env bash
# Trains a spiking VGG on CIFAR-10 from JPEG files, on two CPU cores with data parallelism 2, by the recipe
# vgg_dvs/cifar10 (docs/recipes.md has its accuracy). The images are webdataset shards, .tar or .tar.gz:
#
#     bash scripts/speedrun_cifar10.sh \
#         --data-path "cifar10/train-{00000..00009}.tar" --valid-data-path "cifar10/test-{00000..00001}.tar"
#
# With `--device cuda` one process trains on a GPU. Further arguments are passed on and win over the recipe.
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_launch.sh"

if [[ -z $(option --data-path "" "$@") ]]; then
    ask_for_data CIFAR-10 "--data-path 'DIR/train-{00000..00009}.tar' --valid-data-path '...'" "$@"
fi
if [[ $(option --device cpu "$@") == cpu ]]; then
    export CUDA_VISIBLE_DEVICES=''
    on_ranks 2
else
    in_one_process
fi
train "$(new_run vgg_cifar10)" vgg_dvs/cifar10 $(evaluation_every 1500 "$@") "$@"
