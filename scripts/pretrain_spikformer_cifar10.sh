#!/usr/bin/env bash
# Trains SpikingJelly's spikformer_cifar10 on CIFAR-10 with tensor parallel 2 and pipeline parallel 2, on four GPUs or
# on the CPU. The images are webdataset shards, of any number of files, .tar or .tar.gz:
#
#     bash scripts/pretrain_spikformer_cifar10.sh \
#         --data-path "cifar10/train-{00000..00009}.tar" --valid-data-path "cifar10/test-{00000..00001}.tar"
#
# Further arguments are passed on and win over those below. Without GPUs one iteration takes many seconds: try
# `--global-batch-size 32 --train-samples 9600` first.
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_setup.sh"

if [[ -z $(option --data-path "" "$@") ]]; then
    say "Say where CIFAR-10 is: bash $SCRIPT --data-path 'DIR/train-{00000..00009}.tar' --valid-data-path '...'"
    exit 2
fi
prepare_python
choose_device 4
RUN=$(new_run spikformer_cifar10)

"$PYTHON" -m megasnn.process.torchrun --standalone --nproc-per-node 4 "$ROOT/pretrain_spikformer.py" \
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 2 \
    --variant spikformer_cifar10 \
    --image-size 32 \
    --in-channels 3 \
    --num-classes 10 \
    --time-steps 4 \
    --augment cifar \
    --label-smoothing 0.1 \
    --micro-batch-size 16 \
    --global-batch-size 128 \
    --train-samples 15000000 \
    --lr 1e-3 \
    --min-lr 1e-5 \
    --lr-decay-style cosine \
    --lr-warmup-fraction 0.05 \
    --weight-decay 0.06 \
    --log-interval 10 \
    --eval-interval 400 \
    --save-interval 400 \
    --save "$RUN/checkpoints" \
    --tensorboard-dir "$RUN/tensorboard" \
    "$@"

report "$SCRIPT" --train-samples \
    "$(option --save "$RUN/checkpoints" "$@")" "$(option --tensorboard-dir "$RUN/tensorboard" "$@")"
