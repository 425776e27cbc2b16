#!/bin/bash
# Several machines without a scheduler: run this on each of them, with the same HEAD_NODE (a name that all can reach).
# bash docs/cluster/torchrun.sh HEAD_NODE NUM_NODES GPUS_PER_NODE
set -euo pipefail
HEAD_NODE=$1 NODES=$2 GPUS=$3

launch() {
  torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" --rdzv-id whet --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD_NODE:29500" --max-restarts "${RESTARTS:-0}" -m whet "$@"
}

launch doctor cluster --folder runs
# After a failure of one rank all start again from the last checkpoint, three times at most.
RESTARTS=3 launch rl qwen2.5-0.5b-instruct-math --out runs/cluster-rl
