"""Write problems.jsonl: one question and its answer a row."""

import json
import random
from pathlib import Path

rng = random.Random(0)
letters = [rng.choice("etaoinshr") for _ in range(200)]
rows = [{"question": f"Write the letter {letter}.", "answer": letter} for letter in letters]
Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
print(f"problems.jsonl: {len(rows)} problems")
