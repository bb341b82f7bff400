# shellcheck shell=bash
# Sourced by the pretrain scripts beside it, which set $SCRIPT to their own path. A script starts its ranks with `on_ranks`
# or `in_one_process`, and trains with `train` by a recipe, megasnn/models/<model>/recipes/<name>.json.

source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"

# on_ranks NUMBER: starts this number of ranks on this machine.
on_ranks() {
    prepare_python
    choose_device "$1"
    START=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$1")
}

# on_ranks_of FLAGS...: starts tensor size x pipeline size ranks.
on_ranks_of() {
    local ranks
    ranks=$(($(option --tensor-model-parallel-size 1 "$@") * $(option --pipeline-model-parallel-size 1 "$@")))
    on_ranks "$ranks"
}

in_one_process() {
    prepare_python
    START=("$PYTHON")
}

# train RUN MODEL/RECIPE FLAGS...: trains in the folder RUN. Flags win over the recipe, later flags over earlier ones.
train() {
    local run=$1 recipe=$2 length=--train-iters status=0 each file checkpoints tensorboard before program
    shift 2
    # Models without a file of their own start by their name.
    program=("$ROOT/pretrain_${recipe%%/*}.py")
    if [[ ! -e ${program[0]} ]]; then program=(-m megasnn "${recipe%%/*}"); fi
    if asks_for_help "$@"; then exec "$PYTHON" "${program[@]}" --config "$recipe" "$@"; fi
    set -- --tensorboard-dir "$run/tensorboard" "$@"
    if ! evaluates "$@"; then set -- --save "$run/checkpoints" "$@"; fi
    checkpoints=$(option --save "" "$@") tensorboard=$(option --tensorboard-dir "" "$@")
    before=$(last_saved "$checkpoints")
    "${START[@]}" "${program[@]}" --config "$recipe" "$@" || status=$?
    if ((status != 0)) && [[ $(last_saved "$checkpoints") == "$before" ]]; then return "$status"; fi
    file=$ROOT/megasnn/models/${recipe/\//\/recipes\/}.json
    if grep -q '"train_epochs"' "$file"; then length=--train-epochs; fi
    report "$length" "$checkpoints" "$tensorboard"
    return "$status"
}

# asks_for_help FLAGS...: true with --help or -h among them.
asks_for_help() {
    [[ " $* " == *" --help "* || " $* " == *" -h "* ]]
}

# evaluates FLAGS...: true with --evaluate-only, which saves nothing.
evaluates() {
    local each
    for each in "$@"; do
        if [[ $each == --evaluate-only ]]; then return 0; fi
    done
    return 1
}

# saving_every INTERVAL FLAGS...: prints the flag --save-interval, unless the flags only evaluate.
saving_every() {
    local interval=$1
    shift
    if ! evaluates "$@"; then printf -- '--save-interval %s' "$interval"; fi
}

# last_saved CHECKPOINTS: prints the last saved iteration, or nothing.
last_saved() {
    if [[ -f $1/latest_checkpointed_iteration.txt ]]; then cat "$1/latest_checkpointed_iteration.txt"; fi
}

# unfinished CHECKPOINTS: true if the last saved iteration is before the end of the run.
unfinished() {
    local saved all
    saved=$(last_saved "$1")
    all=$(sed -n 's/.*"kind": "start".*"iterations": \([0-9]*\).*/\1/p' "$1/log.jsonl" 2>/dev/null | tail -n 1)
    [[ -n $saved && -n $all ]] && ((saved < all))
}

# ask_for_data NAME FLAGS ARGUMENTS...: prints the flags that name the data and ends the script, unless --help is given.
ask_for_data() {
    if asks_for_help "${@:3}"; then return; fi
    say "Say where $1 is: bash $SCRIPT $2"
    exit 2
}

# evaluation_every INTERVAL FLAGS...: prints the flag --eval-interval if there are validation data.
evaluation_every() {
    local interval=$1
    shift
    if [[ -n $(option --valid-data-path "" "$@") ]]; then printf -- '--eval-interval %s' "$interval"; fi
}

# option NAME DEFAULT ARGUMENTS...: prints the value of the last `NAME value` or `NAME=value`, otherwise DEFAULT.
option() {
    local name=$1 value=$2
    shift 2
    while [[ $# -gt 0 ]]; do
        case $1 in
            "$name") value=${2-} ;;
            "$name"=*) value=${1#*=} ;;
        esac
        shift
    done
    printf '%s' "$value"
}

# new_run NAME: prints the path of an unused folder under runs/.
new_run() {
    local folder=$ROOT/runs/$1 number=1
    while [[ -e $folder ]]; do
        number=$((number + 1))
        folder=$ROOT/runs/$1-$number
    done
    printf '%s' "$folder"
}

# choose_device RANKS: takes one GPU a rank, or the CPU with one thread a rank if there are too few GPUs.
choose_device() {
    local gpus
    gpus=$("$PYTHON" -c 'from signal import *; signal(SIGINT, SIG_DFL); import torch; print(torch.cuda.device_count())')
    if ((gpus >= $1)); then
        say "Training on $1 of $gpus GPUs, over NCCL."
        return
    fi
    say "Training on the CPU, over Gloo: $1 ranks, $gpus GPUs."
    export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}
}

# report LENGTH_FLAG CHECKPOINTS TENSORBOARD: prints where the results are and how to continue. $SUBMIT is the command
# that starts the script, by default bash.
report() {
    local again="${SUBMIT:-bash} $SCRIPT <the same arguments> --load $2 --save $2 --tensorboard-dir $3"
    say ""
    if [[ -n $2 ]]; then say "Checkpoints: $2"; fi
    say "TensorBoard: $3"
    say "Look at it:  $(dirname "$PYTHON")/tensorboard --logdir $3"
    if [[ -z $2 ]]; then return; fi
    if unfinished "$2"; then
        say "Not at the end yet. Go on: $again"
    else
        say "Train on:    $again $1 <more than before>"
    fi
}
