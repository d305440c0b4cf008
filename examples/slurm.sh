#!/usr/bin/env bash
#SBATCH --job-name=nanoyatt --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive
#SBATCH --signal=TERM@600 --requeue --open-mode=append
# Several machines of 8 GPUs under Slurm: sbatch --nodes 8 examples/slurm.sh --steps 100
# Set MODEL, JUDGE and DATA in the environment. They, this folder and --out must be on a disk that all
# machines share. If they have several networks, set NETWORK to the private one's address prefix (10.1.).
# Not run on a cluster yet: tests/house/test_docs.py runs it with stand-ins for srun, scontrol and torchrun.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start it with sbatch}" # sbatch runs a copy of this file
export OMP_NUM_THREADS=1 PATH="$PWD/.venv/bin:$PATH"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300
read -r FIRST < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export FIRST
# shellcheck disable=SC2016 # each machine fills in its own address
exec srun --kill-on-bad-exit=1 bash -euc '
    ADDR=$(hostname -I | tr " " "\n" | grep -m 1 "^${NETWORK:-}")
    exec torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 --local-addr "$ADDR" \
        --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$FIRST:29400" \
        --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2 \
        run.py --host "$ADDR" --preset cuda --model "$MODEL" --judge "$JUDGE" --data "$DATA" "$@"
' slurm "$@"
