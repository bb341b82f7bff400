#!/usr/bin/env bash
# Trains a small VGG on N-MNIST, or a part of it, on two ranks that share every layer (tensor parallel 2). First make
# shards of the recordings and keep their events, so that the number of time steps is chosen here:
#
#     python tools/preprocess_data.py n-mnist --input N-MNIST --output SHARDS --keep-events
#     bash scripts/pretrain_vgg_dvs_nmnist.sh \
#         --data-path "SHARDS/train-{00000..00119}.tar" --valid-data-path "SHARDS/test-{00000..00019}.tar"
#
# The length below fits a thousand training samples. As a pipeline of two stages instead:
#
#     ... --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_setup.sh"

if [[ -z $(option --data-path "" "$@") || -z $(option --valid-data-path "" "$@") ]]; then
    say "Say where N-MNIST is: bash $SCRIPT --data-path 'SHARDS/train-{00000..00001}.tar' --valid-data-path '...'"
    exit 2
fi
prepare_python
RUN=$(new_run vgg_dvs_nmnist)
train_vgg "$RUN" \
    --tensor-model-parallel-size 2 \
    --channels 16,P,32,P,64,P \
    --image-size 34 \
    --time-steps 6 \
    --split-by time \
    --num-classes 10 \
    --dropout 0.25 \
    --loss tet \
    --micro-batch-size 25 \
    --global-batch-size 50 \
    --train-samples 15000 \
    --lr 3e-3 \
    --lr-decay-style cosine \
    --lr-warmup-iters 20 \
    --weight-decay 0.05 \
    --log-interval 20 \
    --eval-interval 60 \
    --save-interval 100 \
    -- "$@"

report "$SCRIPT" --train-samples \
    "$(option --save "$RUN/checkpoints" "$@")" "$(option --tensorboard-dir "$RUN/tensorboard" "$@")"
