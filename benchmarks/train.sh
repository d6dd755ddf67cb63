#!/usr/bin/env bash
# SmolLM2-135M on a heavy-tailed task, two engines on two cores: about half an hour after `tlt sft`.
# Writes benchmarks/results/train/: metrics.jsonl, summary.json, config.toml, run.png.
set -euo pipefail
cd "$(dirname "$0")/.."
tlt="${TLT:-.venv/bin/tlt}"
[ -d models/smollm2 ] || "$tlt" models smollm2 --out models/smollm2
[ -d models/smollm2-sft ] || "$tlt" sft --model models/smollm2 --out models/smollm2-sft
"$tlt" train configs/smollm2_chain_sum_cpu.toml run.out=runs/smollm2
mkdir -p benchmarks/results/train
cp runs/smollm2/{metrics.jsonl,summary.json,config.toml,run.png} benchmarks/results/train/
