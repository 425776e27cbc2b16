#!/bin/bash
# Several nodes under Slurm: sbatch docs/cluster/slurm.sh
# One process per node starts one rank per GPU. A preempted job is asked to stop, saves, and is queued again.
#SBATCH --job-name=whet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --output=runs/slurm-%j.log
set -euo pipefail

RUN=runs/cluster-rl
export HEAD_NODE GPUS=8
HEAD_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

launch() {  # the same program on every node, one rank per GPU
  srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$GPUS" \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$HEAD_NODE:29500" -m whet "$@"
}

# Links, clocks, versions and the shared folder: 20 seconds that save hours.
launch doctor cluster --folder runs

RESUME=()
[ -d "$RUN/checkpoints" ] && RESUME=(--resume)
launch rl qwen2.5-0.5b-instruct-math --out "$RUN" "${RESUME[@]}" &
JOB=$!
trap 'kill -USR1 "$JOB"; wait "$JOB"; scontrol requeue "$SLURM_JOB_ID"' USR1
wait "$JOB"
