#!/usr/bin/env bash
# Trains spikformer_s on ImageNet-style shards on several nodes: one torchrun a node, one rank a GPU.
#
#     sbatch --nodes 4 scripts/pretrain_spikformer_slurm.sh \
#         --data-path "/data/imagenet/train-{00000..01023}.tar" --valid-data-path "/data/imagenet/val-{0000..0063}.tar"
#
# Submit it from the repository, with `.venv` made (`bash scripts/test.sh` does) or an environment with megasnn
# active, and the repository on a file system that all nodes see. Arguments are passed on and win over the recipe.
#SBATCH --job-name=spikformer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --output=spikformer-%j.log
set -euo pipefail
# Slurm runs a copy of this file from its spool folder, so the repository is where the job was submitted.
SCRIPT=${SLURM_SUBMIT_DIR:?submit this script with sbatch}/scripts/pretrain_spikformer_slurm.sh
source "$(dirname "$SCRIPT")/_launch.sh"

prepare_python
SUBMIT=sbatch
GPUS=${SLURM_GPUS_ON_NODE:-8}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / GPUS))}
START=(srun "$PYTHON" -m torch.distributed.run --nnodes "$SLURM_NNODES" --nproc-per-node "$GPUS"
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$HEAD:${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}")
train "$ROOT/runs/spikformer_slurm_$SLURM_JOB_ID" spikformer/imagenet \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
    $(evaluation_every 2500 "$@") $(saving_every 2500 "$@") "$@"
