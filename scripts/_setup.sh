# shellcheck shell=bash
# Sourced by the scripts beside it. `prepare_python [extra]` sets $PYTHON to an interpreter that has megasnn and what
# pyproject.toml pins: the active environment's if it has them already, else that of .venv, made and filled here.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# A small Spikformer on scikit-learn's handwritten digits: the same model in every script that trains on them.
# shellcheck disable=SC2034  # used by the scripts that source this file
DIGITS=(
    --data-path sample
    --image-size 16
    --in-channels 1
    --num-classes 10
    --patch-size 4
    --embed-dim 64
    --depth 2
    --num-heads 4
    --time-steps 4
    --micro-batch-size 16
    --global-batch-size 64
    --train-iters 200
    --lr 3e-3
    --lr-decay-style cosine
    --lr-warmup-iters 10
    --log-interval 10
    --eval-interval 50
    --save-interval 50
)

# A small VGG on the same digits, moved in front of a simulated event camera.
# shellcheck disable=SC2034
EVENT_DIGITS=(
    --data-path sample
    --channels 16,P,32,P,64,P
    --image-size 32
    --time-steps 6
    --num-classes 10
    --dropout 0.1
    --micro-batch-size 16
    --global-batch-size 32
    --train-iters 200
    --lr 3e-3
    --lr-decay-style cosine
    --lr-warmup-iters 10
    --log-interval 10
    --eval-interval 50
    --save-interval 50
)

say() { printf '%s\n' "$*" >&2; }

prepare_python() {
    local extra=${1-} venv=$ROOT/.venv
    if PYTHON=$(command -v python || command -v python3) && complete "$extra"; then
        return
    fi
    PYTHON=$venv/bin/python
    if ! "$PYTHON" -m pip --version >/dev/null 2>&1; then
        make_venv "$venv"
    fi
    if ! complete "$extra"; then
        install_project "$venv" "$extra"
    fi
}

# complete [EXTRA]: whether $PYTHON has everything. -P keeps the current folder off its path: the metadata that an
# editable installation leaves in a checkout must not pass for an installation.
complete() {
    "$PYTHON" -P "$ROOT/scripts/_installed.py" ${1:+"$1"} 2>/dev/null
}

make_venv() {
    local candidate
    for candidate in python3 python python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            say "Making a virtual environment in $1 with $("$candidate" --version)."
            "$candidate" -m venv "$1"
            return
        fi
    done
    say "MegaSNN needs Python 3.11 or newer, and none was found on the PATH."
    return 1
}

# install_project VENV [EXTRA]: shows the large downloads as they begin; all that pip says is in VENV/install.log.
install_project() {
    local log=$1/install.log target=$ROOT${2:+[$2]} word file size unit
    say "Installing MegaSNN and what pyproject.toml pins into $1: PyTorch is large, this takes some minutes."
    if ! "$1/bin/python" -m pip install --disable-pip-version-check -e "$target" 2>&1 | tee "$log" |
        while read -r word file size unit; do
            if [[ $word == Downloading && $unit == [MG]B\) ]]; then say "  $file $size $unit"; fi
        done; then
        tail -n 20 "$log" >&2
        say "The installation failed; all that pip said is in $log."
        return 1
    fi
    say "Installed."
}

# option NAME DEFAULT ARGUMENTS...: the value of the last `NAME value` or `NAME=value` among the arguments.
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

# new_run NAME: a folder under runs/ that no earlier run has used.
new_run() {
    local folder=$ROOT/runs/$1 number=1
    while [[ -e $folder ]]; do
        number=$((number + 1))
        folder=$ROOT/runs/$1-$number
    done
    printf '%s' "$folder"
}

# choose_device RANKS: as many GPUs as ranks, or the CPU with one thread a rank.
choose_device() {
    local gpus
    gpus=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')
    if ((gpus >= $1)); then
        say "Training on $1 of $gpus GPUs, over NCCL."
        return
    fi
    say "Training on the CPU, over Gloo: $1 ranks, $gpus GPUs."
    export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} MKL_NUM_THREADS=${MKL_NUM_THREADS:-1}
}

# report SCRIPT LENGTH_FLAG CHECKPOINTS TENSORBOARD: where the results are, how to look at them, how to go on.
report() {
    say ""
    say "Checkpoints: $3"
    say "TensorBoard: $4"
    say "Look at it:  $(dirname "$PYTHON")/tensorboard --logdir $4"
    say "Train on:    bash $1 <the same arguments> --load $3 --save $3 --tensorboard-dir $4 $2 <more than before>"
}

# train_vgg RUN DEFAULTS... -- ARGUMENTS...: trains the VGG on as many ranks as the flags --tensor-model-parallel-size
# and --pipeline-model-parallel-size among the arguments, or else the defaults, ask for.
train_vgg() {
    local run=$1 defaults=() ranks
    shift
    while [[ $1 != -- ]]; do
        defaults+=("$1")
        shift
    done
    shift
    ranks=$(($(option --tensor-model-parallel-size 1 "${defaults[@]}" "$@") *
        $(option --pipeline-model-parallel-size 1 "${defaults[@]}" "$@")))
    choose_device "$ranks"
    "$PYTHON" -m megasnn.process.torchrun --standalone --nproc-per-node "$ranks" "$ROOT/pretrain_vgg_dvs.py" \
        "${defaults[@]}" \
        --save "$run/checkpoints" \
        --tensorboard-dir "$run/tensorboard" \
        "$@"
}
