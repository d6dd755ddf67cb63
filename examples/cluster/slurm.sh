#!/bin/bash
# A run of TLT on several nodes under Slurm. Never run on a real cluster: tests/unit/test_cluster_files.py
# runs this script with stand-ins for Slurm, Ray and TLT.
#
#   sbatch examples/cluster/slurm.sh /shared/run.toml
#   sbatch examples/cluster/slurm.sh /shared/run.toml --resume
#
#SBATCH --job-name=tlt
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
set -euo pipefail
if [ $# -lt 1 ]; then
    echo "name the TOML file of the run, e.g. sbatch slurm.sh /shared/run.toml" >&2
    exit 2
fi
source "${TLT_VENV:-$HOME/tlt-env}/bin/activate"

# Ray: one token for this job, readable by you alone, on the file system that all nodes share.
export RAY_AUTH_MODE=token
export RAY_AUTH_TOKEN_PATH="$HOME/.tlt-ray-token-$SLURM_JOB_ID"
(umask 077 && python3 -c "import secrets; print(secrets.token_hex(32), end='')" > "$RAY_AUTH_TOKEN_PATH")
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT
export RAY_worker_niceness=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0

# This script runs on the first node, so Ray's head and the driver do, too.
head=$(hostname)
port=${RAY_PORT:-6379}
memory=${OBJECT_STORE_BYTES:-200000000000} # three times the policy on the driver's node
export RAY_ADDRESS="$head:$port"

wait_for() { # until so many nodes have joined, or five minutes are over
    local count="import ray, sys; ray.init(); sys.exit(sum(n['Alive'] for n in ray.nodes()) < $1)"
    for _ in $(seq 60); do
        if python3 -c "$count" > /dev/null 2>&1; then return; fi
        sleep 5
    done
    echo "fewer than $1 nodes of Ray after five minutes; see the output of ray start above" >&2
    exit 1
}

srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
    ray start --head --block --port="$port" --object-store-memory="$memory" &
wait_for 1
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    others=$((SLURM_JOB_NUM_NODES - 1))
    srun --nodes="$others" --ntasks="$others" --exclude="$head" --overlap \
        ray start --block --address="$RAY_ADDRESS" --object-store-memory="$memory" &
    wait_for "$SLURM_JOB_NUM_NODES"
fi

# Slurm sends SIGTERM to this script five minutes before the time is over. TLT then writes a
# checkpoint, and `--resume` goes on from it.
tlt train "$@" run.checkpoint_on_term=true run.term_timeout_s=240 &
driver=$!
trap 'kill -TERM "$driver"' TERM
code=0
wait "$driver" || code=$?
while kill -0 "$driver" 2> /dev/null; do # the signal ended the wait, not the driver
    code=0
    wait "$driver" || code=$?
done
exit "$code" # Slurm ends what is left of the job: Ray on all nodes
