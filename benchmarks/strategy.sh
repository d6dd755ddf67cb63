#!/usr/bin/env bash
# The adaptive strategy on live engines and in replay: about 45 minutes after `bash benchmarks/drafter.sh`.
# Writes benchmarks/results/strategy/: live/ (against every fixed arm and BEG-MAB),
# random_drafter/, no_drafter/, random_text/ (against no speculation), strategy.json.
set -euo pipefail
cd "$(dirname "$0")/.."
tlt="${TLT:-.venv/bin/tlt}"
python="${PYTHON:-.venv/bin/python}"
out=benchmarks/results/strategy
model=models/smollm2-sft
drafter=models/smollm2-eagle3
# Problems of 60 terms, whose answers are longer than any length asked for: the text stays natural.
work=(--model "$model" --size 60 --requests 64 --median 40 --p95 250 --longest 480
      --engine-arg max_num_seqs=64)
compiled=(--engine-arg enforce_eager=false)

"$tlt" drafter bench "${work[@]}" "${compiled[@]}" --drafter "$drafter" --engines 1 --repeats 3 \
  --mode off --mode ngram:4 --mode eagle3:1 --mode eagle3:2 --mode eagle3:3 --mode eagle3:4 \
  --mode eagle3:6 --mode beg_mab --mode adaptive --out "$out/live"
"$python" benchmarks/replay.py "$out/live/rollout.json" --rollouts 8 --seeds 3 --out "$out"

"$python" benchmarks/random_drafter.py "$drafter" models/random-eagle3
"$tlt" drafter bench "${work[@]}" --drafter models/random-eagle3 --engines 1 --repeats 5 \
  --mode off --mode adaptive --out "$out/random_drafter"
"$tlt" drafter bench "${work[@]}" --engines 1 --repeats 5 \
  --mode off --mode adaptive --out "$out/no_drafter"
"$tlt" drafter bench "${work[@]}" --drafter "$drafter" --engines 1 --repeats 5 --temperature 2 \
  --mode off --mode adaptive --out "$out/random_text"
rm "$out"/*/*.svg  # the next line draws those that pages show
"$python" benchmarks/pictures.py
