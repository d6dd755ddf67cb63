#!/usr/bin/env bash
# LoRA on a tiny model, two engines on two cores: a few minutes.
# Writes benchmarks/results/lora/: metrics.jsonl, summary.json, config.toml; benchmarks/pictures.py draws run.svg.
set -euo pipefail
cd "$(dirname "$0")/.."
tlt="${TLT:-.venv/bin/tlt}"
[ -d models/tiny ] || "$tlt" models tiny --out models/tiny
[ -d models/tiny-sft ] || "$tlt" models sft --model models/tiny --out models/tiny-sft --task gcd --sizes 2,2,2 \
  --parameter max_value=9 --steps 120 --row-tokens 2048 --lr 2e-3 --dtype float32
"$tlt" train configs/lora_tiny_cpu.toml
mkdir -p benchmarks/results/lora
cp runs/lora/{metrics.jsonl,summary.json,config.toml} benchmarks/results/lora/
