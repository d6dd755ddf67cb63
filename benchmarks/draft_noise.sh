#!/usr/bin/env bash
# Drafts drawn with the request's noise against argmax drafts, on raw SmolLM2 and after `tlt sft`:
# about 40 minutes on one core. Writes benchmarks/results/draft_noise.json.
set -euo pipefail
cd "$(dirname "$0")/.."
tlt="${TLT:-.venv/bin/tlt}"
python="${PYTHON:-.venv/bin/python}"
work="${WORK:-runs/draft_noise}"
mkdir -p "$work"
[ -d models/smollm2 ] || "$tlt" models smollm2

"$python" benchmarks/draft_noise.py prompts natural "$work/natural.jsonl"
"$python" benchmarks/draft_noise.py drafter models/smollm2 "$work/natural.jsonl" "$work/raw-eagle3" \
  --minutes 8
"$python" benchmarks/draft_noise.py measure raw models/smollm2 "$work/raw-eagle3" \
  "$work/natural.jsonl"

"$tlt" sft --model models/smollm2 --out "$work/sft" --sizes 8,20,30 --parameter min_digits=1 \
  --parameter max_digits=1 --steps 12 --dtype float32 --compute float32
"$python" benchmarks/draft_noise.py prompts sums "$work/sums.jsonl"
"$python" benchmarks/draft_noise.py drafter "$work/sft" "$work/sums.jsonl" "$work/sft-eagle3" \
  --draft-vocab 2048
"$python" benchmarks/draft_noise.py measure sft "$work/sft" "$work/sft-eagle3" "$work/sums.jsonl"
