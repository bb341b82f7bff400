#!/usr/bin/env bash
# Starts a torchrun on each of several hosts by ssh, and waits for all of them.
#
#     HOSTS="node0 node1" GPUS=8 bash scripts/clusters/torchrun_ssh.sh -m megasnn spikformer \
#         --config spikformer/imagenet --data-path "/data/train-{00000..01023}.tar" --save /shared/run
#
# It uses the active `python` and the current folder, which must have the same path on all hosts. The first host has the
# rendezvous. Without GPUs, GPUS is the number of ranks on a host. After Ctrl-C or SIGTERM all ranks save and end. When a
# host fails, the others are stopped.
set -euo pipefail
read -ra hosts <<<"${HOSTS:?the hosts, between spaces}"
job=${JOB:-$$-$(date +%s)}
port=${PORT:-$((20000 + $(cksum <<<"$job" | cut -d " " -f 1) % 10000))} # derived from the job, so that two jobs on a host differ
torchrun=("$(command -v python)" -m torch.distributed.run --nnodes "${#hosts[@]}"
    --nproc-per-node "${GPUS:?GPUs on each host}" --max-restarts "${RESTARTS:-0}" --rdzv-id "$job"
    --rdzv-backend c10d --rdzv-endpoint "${hosts[0]}:$port")
passed=()
for name in PYTHONPATH OMP_NUM_THREADS MEGASNN_CACHE NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME; do
    if [[ -v $name ]]; then passed+=("$name=${!name}"); fi
done
command="cd $(printf %q "$PWD") && exec $(printf '%q ' env "${passed[@]}" "${torchrun[@]}" "$@")"

# Each torchrun has a terminal (-tt), whose keyboard is a pipe of this script: it types Ctrl-C there. When the connection
# ends, the host closes the terminal, and its ranks get SIGHUP.
pipes=$(mktemp -d)
trap 'rm -rf "$pipes"' EXIT
keyboards=()
stop() {
    for keyboard in "${keyboards[@]}"; do printf '\003' >&"$keyboard"; done
}
trap stop INT TERM
for host in "${hosts[@]}"; do
    mkfifo "$pipes/$host"
    exec {keyboard}<>"$pipes/$host"
    keyboards+=("$keyboard")
    ssh -tt -o BatchMode=yes -o ConnectTimeout=30 -o ServerAliveInterval=10 -o ServerAliveCountMax=3 "$host" "$command" \
        <&"$keyboard" | sed -u "s/^/$host: /" &
done

left=${#hosts[@]} status=0
while ((left)); do
    ended=0
    wait -n || ended=$?
    running=$(jobs -rp | wc -l)
    if ((running < left && ended)); then # not a signal, which ends `wait` too
        if ((!status)); then stop; fi
        status=$ended
    fi
    left=$running
done
exit "$status"
