#!/usr/bin/env bash
# The committed figures of `tlt bench rollout`: SmolLM2 on two engines, one per core.
# Makes the model, its supervised start and a drafter when they are not there (an hour).
# Needs a quiet machine.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
bash benchmarks/drafter.sh
tlt bench rollout --model models/smollm2-sft --drafter models/smollm2-eagle3 --repeats 3 \
    --mode off --mode ngram:4 --mode eagle3:2 --mode eagle3:4 --mode tail:4@4 \
    --out benchmarks/results/rollout
