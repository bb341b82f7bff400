#!/usr/bin/env bash
# The same small Spikformer on one GPU, or in one process with all threads where there is none.
# Arguments are passed on and win over the recipe.
set -euo pipefail
SCRIPT=${BASH_SOURCE[0]}
source "$(dirname "$SCRIPT")/_launch.sh"

in_one_process
train "$(new_run spikformer_single)" spikformer/digits $(saving_every 50 "$@") "$@"
