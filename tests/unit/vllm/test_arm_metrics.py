"""Counts of arms travel inside vLLM's statistics, and are gone before vLLM reads them."""

from types import SimpleNamespace

from tlt.contracts import OFF, Arm, StepReport
from tlt.vllm.wiring import COUNTERS, attach, take


def report(arm: Arm) -> StepReport:
    return StepReport(
        step=3,
        verified=arm,
        proposed=OFF,
        num_decodes=2,
        num_prefill_tokens=0,
        num_drafts=2,
        num_draft_tokens=8,
        num_accepted_tokens=5,
        accepted_at=(2, 2, 1),
        num_output_tokens=7,
        elapsed_s=0.1,
    )


def test_counts_arrive_by_counter_and_arm() -> None:
    stats = SimpleNamespace(waiting_lora_adapters={"french": 1})
    outputs = [SimpleNamespace(scheduler_stats=None), SimpleNamespace(scheduler_stats=stats)]
    attach(outputs, report(Arm("ngram", 4)))
    found = take(stats)
    assert found == {
        ("engine_steps", "ngram:4"): 1,
        ("drafts", "ngram:4"): 2,
        ("draft_tokens", "ngram:4"): 8,
        ("accepted_tokens", "ngram:4"): 5,
        ("output_tokens", "ngram:4"): 7,
    }
    assert {name for name, _ in found} == set(COUNTERS)
    assert stats.waiting_lora_adapters == {"french": 1}  # vLLM's own counts stay
    assert take(stats) == {}


def test_without_statistics_nothing_is_counted() -> None:
    attach([SimpleNamespace(scheduler_stats=None)], report(OFF))
    assert take(None) == {}
