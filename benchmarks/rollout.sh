#!/usr/bin/env bash
# The committed figures of `tlt bench rollout`: SmolLM2 on two engines, one per core.
# Makes the model and a first drafter when they are not there. Needs a quiet machine.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
[ -d models/smollm2 ] || tlt models smollm2
[ -d models/smollm2-eagle3 ] || tlt drafter warmup --model models/smollm2 \
    --out models/smollm2-eagle3 --num-samples 640 --draft-vocab 4096 --epochs 3 --engines 2
tlt bench rollout --model models/smollm2 --drafter models/smollm2-eagle3 --repeats 3 \
    --mode off --mode ngram:4 --mode eagle3:2 --mode eagle3:4 --mode tail:2@4 \
    --out benchmarks/results/rollout
