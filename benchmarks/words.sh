#!/usr/bin/env bash
# Word problems in varied prose, on two cores without bfloat16 instructions: the policy, a drafter,
# and how many tokens of n-grams and of the drafter are accepted. About 40 minutes; what is there
# already is kept. Writes benchmarks/results/words/.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
model=models/smollm2-words
drafter=models/smollm2-words-eagle3
out=benchmarks/results/words
mkdir -p "$out"
[ -d models/smollm2 ] || tlt models smollm2
[ -d "$model" ] || tlt models sft --model models/smollm2 --out "$model" --task word_problems \
    --dtype float32 --lr 3e-4 --row-tokens 512 --steps 2000 --budget-minutes 22
if [ ! -d "$drafter" ]; then
  tlt drafter train --model "$model" --task word_problems --out runs/words-drafter \
      --draft-vocab 4096 --draft-tokens 3 --row-tokens 512 --num-samples 144 --num-held-out 12 \
      --max-tokens 480 --dtype float32 --budget-minutes 10
  tlt drafter export runs/words-drafter --model "$model" --out "$drafter"
fi
tlt drafter bench --model "$model" --drafter "$drafter" --task word_problems --natural \
    --longest 480 --requests 48 --engines 2 --repeats 2 --seed 1 --engine-arg enforce_eager=false \
    --mode off --mode ngram:3 --mode eagle3:3 --out "$out"
rm "$out/rollout.svg"  # no page shows it
