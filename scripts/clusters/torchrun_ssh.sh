#!/usr/bin/env bash
# Starts a torchrun on each of several hosts by ssh, and waits for all of them; Ctrl-C reaches all ranks, which save and end.
#
#     HOSTS="node0 node1" GPUS=8 bash scripts/clusters/torchrun_ssh.sh -m megasnn spikformer \
#         --config spikformer/imagenet --data-path "/data/train-{00000..01023}.tar" --save /shared/run
#
# All hosts have the same environment at the same path: that of the active `python`, which is used in the folder where
# this is called; the first of HOSTS has the rendezvous. Without GPUs, GPUS is the number of ranks on a host.
set -euo pipefail
read -ra hosts <<<"${HOSTS:?the hosts, between spaces}"
ranks=${GPUS:?GPUs on each host}
folder=$(printf %q "$PWD")
command=$(printf '%q ' env ${PYTHONPATH:+"PYTHONPATH=$PYTHONPATH"} ${OMP_NUM_THREADS:+"OMP_NUM_THREADS=$OMP_NUM_THREADS"} \
    "$(command -v python)" -m megasnn.process.torchrun --nnodes "${#hosts[@]}" --nproc-per-node "$ranks" \
    --max-restarts "${RESTARTS:-0}" --rdzv-id "${JOB:-$$-$(date +%s)}" --rdzv-backend c10d \
    --rdzv-endpoint "${hosts[0]}:${PORT:-29500}" "$@")
started=()
# A terminal for each (-tt): when this ends, however it does, sshd hangs up and the ranks of that host end.
for host in "${hosts[@]}"; do
    ssh -tt -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4 "$host" "cd $folder && exec $command" </dev/null \
        > >(sed -u "s/^/$host: /") &
    started+=($!)
done
trap 'kill -TERM "${started[@]}" 2>/dev/null' INT TERM
status=0
for process in "${started[@]}"; do
    wait "$process" || status=$?
done
exit "$status"
