#!/usr/bin/env bash
# SmolLM2-135M on a heavy-tailed task, two engines on two cores: about half an hour in all.
# Writes benchmarks/results/train/: metrics.jsonl, summary.json, config.toml; benchmarks/pictures.py draws run.svg.
set -euo pipefail
cd "$(dirname "$0")/.."
tlt="${TLT:-.venv/bin/tlt}"
[ -d models/smollm2 ] || "$tlt" models smollm2 --out models/smollm2
[ -d models/smollm2-start ] || "$tlt" models sft --model models/smollm2 --out models/smollm2-start \
  --sizes 4,14,30 --parameter min_digits=1 --parameter max_digits=1 --steps 30
"$tlt" train configs/smollm2_chain_sum_cpu.toml run.out=runs/smollm2
mkdir -p benchmarks/results/train
cp runs/smollm2/{metrics.jsonl,summary.json,config.toml} benchmarks/results/train/
