#!/usr/bin/env bash
# The policy and the drafter that the committed figures are made with, where they are not there yet:
# SmolLM2, its supervised start, and a drafter with a budget of 20 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
[ -d models/smollm2 ] || tlt models smollm2
[ -d models/smollm2-sft ] || tlt models sft --model models/smollm2 --out models/smollm2-sft
[ -d models/smollm2-eagle3 ] && exit
tlt drafter train --model models/smollm2-sft --out runs/drafter --draft-vocab 2048 \
    --budget-minutes 20
tlt drafter export runs/drafter --model models/smollm2-sft --out models/smollm2-eagle3
mkdir -p benchmarks/results/drafter
cp runs/drafter/report.json runs/drafter/report.svg benchmarks/results/drafter/
