#!/usr/bin/env bash
# The same small Spikformer on one GPU, or in one process with all threads where there is none.
# Arguments are passed on and win over those below.
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_setup.sh"

prepare_python
RUN=$(new_run spikformer_single)

"$PYTHON" "$ROOT/pretrain_spikformer.py" \
    "${DIGITS[@]}" \
    --save "$RUN/checkpoints" \
    --tensorboard-dir "$RUN/tensorboard" \
    "$@"

report "$SCRIPT" --train-iters \
    "$(option --save "$RUN/checkpoints" "$@")" "$(option --tensorboard-dir "$RUN/tensorboard" "$@")"
