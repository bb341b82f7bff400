#!/usr/bin/env bash
# Trains SpikingJelly's CIFAR10DVSVGG on CIFAR10-DVS with tensor parallel 2 and pipeline parallel 2, on four GPUs or on
# the CPU. First make shards of the recordings, then train; the held-out tenth of each class is in the test shards:
#
#     python tools/preprocess_data.py cifar10-dvs --input RECORDINGS --output SHARDS --time-steps 10 --size 48
#     bash scripts/pretrain_vgg_dvs_cifar10dvs.sh \
#         --data-path "SHARDS/train-{00000..00017}.tar" --valid-data-path "SHARDS/test-{00000..00001}.tar"
#
# The recipe is the one of temporal efficient training (Deng et al. 2022): 10 frames of 48 x 48, mirrored and rolled,
# Adam at 1e-3 with a cosine, 300 epochs of 9,000 samples in batches of 128. Arguments are passed on and win over those
# below. Without GPUs an iteration takes a minute: try `--global-batch-size 16 --train-samples 800` first.
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_setup.sh"

if [[ -z $(option --data-path "" "$@") ]]; then
    say "Say where CIFAR10-DVS is: bash $SCRIPT --data-path 'SHARDS/train-{00000..00017}.tar' --valid-data-path '...'"
    exit 2
fi
EVALUATE=()
if [[ -n $(option --valid-data-path "" "$@") ]]; then EVALUATE=(--eval-interval 700); fi
prepare_python
RUN=$(new_run vgg_dvs_cifar10dvs)
train_vgg "$RUN" \
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 2 \
    --channels 64,128,P,256,256,P,512,512,P,512,512,P \
    --image-size 48 \
    --time-steps 10 \
    --num-classes 10 \
    --dropout 0.25 \
    --augment dvs \
    --loss tet \
    --tet-lambda 1e-3 \
    --micro-batch-size 16 \
    --global-batch-size 128 \
    --train-samples 2700000 \
    --lr 1e-3 \
    --lr-decay-style cosine \
    --weight-decay 5e-4 \
    --log-interval 10 \
    --save-interval 700 \
    ${EVALUATE[@]+"${EVALUATE[@]}"} \
    -- "$@"

report "$SCRIPT" --train-samples \
    "$(option --save "$RUN/checkpoints" "$@")" "$(option --tensorboard-dir "$RUN/tensorboard" "$@")"
