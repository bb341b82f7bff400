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

"$PYTHON" -m megasnn.process.torchrun --standalone --nproc-per-node 4 "$ROOT/pretrain_spikformer.py" \
    --tensor-model-parallel-size 2 \
    --pipeline-model-parallel-size 2 \
    "${DIGITS[@]}" \
    --save "$RUN/checkpoints" \
    --tensorboard-dir "$RUN/tensorboard" \
    "$@"

report "$SCRIPT" --train-iters \
    "$(option --save "$RUN/checkpoints" "$@")" "$(option --tensorboard-dir "$RUN/tensorboard" "$@")"
