"""What the timeline costs.

    python benchmarks/timeline.py [--repeats 3] [--steps 8]

By itself: time to note an engine step. And in runs of
configs/tiny_tail_cpu.toml with and without it, in turns: whole steps, whose time varies by far more
than the timeline can cost; and what of a step belongs to no stage, where the timeline is put
together and written. Its share is that, and the noting, of a step. The recipe's engine steps are
about the shortest there are, so the share is largest there. Needs models/tiny-sft (see the recipe).
Writes results/timeline.json.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import parse_options, ratios, save, spread, trained
from tlt.observe.record import read
from tlt.spans import Span, SpanLog


def noting_us(count: int = 200_000) -> float:
    """Microseconds to note an engine step, with arms and loads that change now and then."""
    log = SpanLog()
    started_s = time.perf_counter()
    for step in range(count):
        at_s = step * 0.004
        load, arm = float(step // 50 % 16), f"ngram:{step // 20 % 4}"
        log.add(Span("generating", at_s, at_s + 0.004, load, arm))
    return (time.perf_counter() - started_s) / count * 1e6


def run(timeline: bool, repeat: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    out = folder / f"{timeline}-{repeat}"
    settings = [f"run.num_steps={steps}", f"run.seed={repeat}", "engine.strategy={kind='off'}"]
    settings.append(f"metrics.timeline={str(timeline).lower()}")
    trained(out, "configs/tiny_tail_cpu.toml", *settings)
    return read(out / "metrics.jsonl")[1:]  # the first step warms up


def main() -> None:
    options = parse_options(__doc__, repeats=3, steps=8)
    result: dict[str, Any] = {"noting_us": statistics.median(noting_us() for _ in range(3))}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(result, flush=True)
        medians: list[float] = []
        records: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
        for repeat in range(options.repeats):
            order = (False, True) if repeat % 2 else (True, False)
            found = {on: run(on, repeat, options.steps, folder) for on in order}
            on_s, off_s = ([each["time/step_s"] for each in found[on]] for on in (True, False))
            medians.append(statistics.median(ratios(on_s, off_s)))
            for on, own in found.items():
                records[on] += own
            print(f"{medians[-1]:.4f}", flush=True)

    def median(name: str, timeline: bool = True) -> float:
        return statistics.median(record[name] for record in records[timeline])

    step_s, engine_steps = median("time/step_s"), median("response/longest_tokens")
    with_s, without_s = median("time/other_s"), median("time/other_s", timeline=False)
    result |= {
        "step_s": step_s,
        "other_ms": {"with": 1e3 * with_s, "without": 1e3 * without_s},
        "share": (with_s - without_s + 1e-6 * result["noting_us"] * engine_steps) / step_s,
        "with_over_without": spread(medians),
    }
    save("timeline", result)
    print(result)


if __name__ == "__main__":
    main()
