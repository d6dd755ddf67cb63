#!/usr/bin/env bash
# Word problems in varied prose, on one core without bfloat16 instructions: the policy, a drafter,
# and how many tokens of n-grams and of the drafter are accepted. About 45 minutes; what is there
# already is kept. Writes benchmarks/results/words/.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
model=models/smollm2-words
drafter=models/smollm2-words-eagle3
out=benchmarks/results/words
mkdir -p "$out"
[ -d models/smollm2 ] || tlt models smollm2
# First large numbers, until the prose is learned; then the task's own, until sums come out right.
sft=(tlt sft --task word_problems --dtype float32 --lr 3e-4 --row-tokens 512 --steps 1000)
[ -d "$model" ] || {
  "${sft[@]}" --model models/smollm2 --out runs/words-prose --budget-minutes 11 \
      --parameter max_change=15 --parameter max_total=99
  "${sft[@]}" --model runs/words-prose --out "$model" --budget-minutes 8 --seed 1
}
if [ ! -d "$drafter" ]; then
  tlt drafter train --model "$model" --task word_problems --out runs/words-drafter \
      --draft-vocab 2048 --draft-tokens 3 --num-samples 192 --num-held-out 12 --max-tokens 480 \
      --engines 1 --dtype float32 --budget-minutes 19
  tlt drafter export runs/words-drafter --model "$model" --out "$drafter"
  cp runs/words-drafter/report.json runs/words-drafter/report.png "$out/"
fi
tlt bench rollout --model "$model" --drafter "$drafter" --task word_problems --natural \
    --longest 640 --requests 64 --engines 1 --repeats 1 --seed 1 \
    --mode off --mode ngram:3 --mode eagle3:3 --out "$out"
