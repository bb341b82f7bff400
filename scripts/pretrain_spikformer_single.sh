#!/usr/bin/env bash
# The same small Spikformer on one GPU, or in one process with all threads where there is none.
# Arguments are passed on and win over those below.
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_setup.sh"

prepare_python
RUN=$(new_run spikformer_single)

"$PYTHON" "$ROOT/pretrain_spikformer.py" \
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
