#!/usr/bin/env bash
# Trains a small Spikformer on scikit-learn's handwritten digits with tensor parallel 2 and pipeline parallel 2:
# four ranks, on four GPUs or on the CPU. Arguments are passed on and win over those below:
#
#     bash scripts/pretrain_spikformer_tp2_pp2.sh --train-iters 50 --lr 2e-3
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_setup.sh"

prepare_python
choose_device 4
RUN=$(new_run spikformer_tp2_pp2)

"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 "$ROOT/pretrain_spikformer.py" \
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 2 \
    --data-path sample \
    --image-size 16 \
    --in-channels 1 \
    --num-classes 10 \
    --patch-size 4 \
    --embed-dim 64 \
    --depth 2 \
    --num-heads 4 \
    --time-steps 4 \
    --micro-batch-size 16 \
    --global-batch-size 64 \
    --train-iters 200 \
    --lr 3e-3 \
    --lr-decay-style cosine \
    --lr-warmup-iters 10 \
    --log-interval 10 \
    --eval-interval 50 \
    --save-interval 50 \
    --save "$RUN/checkpoints" \
    --tensorboard-dir "$RUN/tensorboard" \
    "$@"

report "$SCRIPT" --train-iters \
    "$(option --save "$RUN/checkpoints" "$@")" "$(option --tensorboard-dir "$RUN/tensorboard" "$@")"
