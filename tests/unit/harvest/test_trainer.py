"""The trainer beside an engine: it stops when told, merges what fits, publishes what is better."""

import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from drafter_fixtures import CONFIG, captured, drafter  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from speed import limit  # noqa: E402
from tlt.config.train import TltConfig  # noqa: E402
from tlt.drafter.checkpoint import MOMENTS, save_drafter  # noqa: E402
from tlt.drafter.evaluation import evaluate, evaluate_samples  # noqa: E402
from tlt.drafter.trainer import DrafterTrainer, TrainerSettings  # noqa: E402
from tlt.harvest.contract import Weights  # noqa: E402
from tlt.harvest.published import EMBEDDING, head_and_embedding  # noqa: E402
from tlt.harvest.trainer import (  # noqa: E402
    DOUBT_TOKENS,
    MIN_WINDOWS,
    WORSE,
    HarvestTrainer,
    HarvestTrainerSettings,
    averaged,
    difference,
    trainer_settings,
)
from tlt.states.buffer import BufferSettings, SampleBuffer  # noqa: E402

LONG_S = 1000.0


@pytest.fixture
def settings(tmp_path: Path) -> HarvestTrainerSettings:
    """A drafter, a policy with a tied head, and a buffer with a few samples."""
    save_drafter(drafter(), tmp_path / "drafter", torch.float32)
    (tmp_path / "policy").mkdir()
    generator = torch.Generator().manual_seed(5)
    embedding = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=generator)
    save_file({EMBEDDING: embedding}, tmp_path / "policy" / "model.safetensors")
    buffer = BufferSettings(str(tmp_path / "buffer"), 2**30, 4096, held_out_share=0.3)
    store = SampleBuffer(buffer)
    for index in range(60):
        store.put(str(index), 1, captured(40, 4, seed=index % 4))
    return HarvestTrainerSettings(
        drafter=str(tmp_path / "drafter"),
        policy=str(tmp_path / "policy"),
        buffer=buffer,
        trainer=TrainerSettings(
            num_draft_tokens=3, row_tokens=120, lr=3e-3, temperature=1.0, seed=0, bfloat16=False
        ),
        held_out_tokens=200,
    )


@pytest.mark.parametrize(("given", "depth"), [(TltConfig(), 7), (TltConfig(num_draft_tokens=5), 5)])
def test_drafters_are_trained_and_evaluated_as_deep_as_the_strategy_drafts(
    settings: HarvestTrainerSettings, given: TltConfig, depth: int
) -> None:
    folders = Path(settings.drafter), settings.policy
    how: dict[str, Any] = {"new": True, "temperature": 1.0, "seed": 0, "on_gpu": True}
    found = trainer_settings(*folders, settings.buffer, given, num_draft_tokens=7, **how)
    assert found.trainer.num_draft_tokens == depth
    model = drafter()
    head = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size)
    trainer = DrafterTrainer(model, head, head, replace(found.trainer, bfloat16=False))
    evaluated = evaluate_samples(trainer.passes, [captured(40, 4, seed=0)], [1.0])
    assert len(evaluated.agreement) == depth


def make_trainer(settings: HarvestTrainerSettings) -> HarvestTrainer:
    return HarvestTrainer(settings, torch.device("cpu"))


@pytest.fixture
def one(settings: HarvestTrainerSettings) -> HarvestTrainer:
    """A trainer that holds lease 1."""
    trainer = make_trainer(settings)
    assert trainer.begin(1, LONG_S)
    return trainer


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def learn(trainer: HarvestTrainer, num_steps: int) -> None:
    """Train for at least this many optimizer steps, however busy the machine is."""
    done = 0
    while done < num_steps:
        done += trainer.train(1, 1.0).num_steps


def test_it_learns_while_it_holds_a_lease_and_what_is_better_counts(one: HarvestTrainer) -> None:
    learn(one, 40)
    evaluation = one.evaluate(1, LONG_S)
    assert evaluation is not None
    assert evaluation.better
    assert evaluation.length > evaluation.published_length
    one.take(published=Weights(1, one.export()))
    again = one.evaluate(1, LONG_S)
    assert again is not None
    assert not again.better, "nothing is better than itself"


def test_a_difference_is_told_from_chance() -> None:
    rng = random.Random(0)
    sizes = [rng.randint(20, 250) for _ in range(12)]
    old = [2.5 + rng.gauss(0, 0.5) for _ in sizes]
    for gain, is_sure in ((0.0, False), (0.02, False), (0.15, True), (-0.15, True)):
        new = [length + gain + rng.gauss(0, 0.1) for length in old]
        found, error = difference(new, old, sizes)
        assert found == pytest.approx(gain, abs=0.08)
        assert (abs(found) > WORSE * error) == is_sure
    # One window says little, unless it says a lot.
    assert difference([2.6], [2.5], [200]) == pytest.approx((0.1, DOUBT_TOKENS))


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chains of the windows that drafters are evaluated on, in order."""
    sizes: list[int] = []

    def counted(passes: Any, windows: Any, *args: Any) -> Any:
        sizes.extend(len(window.row.chains.starts) for window in windows)
        return evaluate(passes, windows, *args)

    monkeypatch.setattr("tlt.harvest.trainer.evaluate", counted)
    return sizes


def test_an_evaluation_ends_when_the_difference_is_clear_or_its_time_is_over(
    settings: HarvestTrainerSettings, evaluated: list[int]
) -> None:
    one = make_trainer(replace(settings, held_out_tokens=10_000))
    num_windows = sum(e.held_out for e in SampleBuffer(settings.buffer).entries())
    one.begin(1, LONG_S)
    assert one.evaluate(1, LONG_S) is not None
    assert len(evaluated) == 2 * num_windows > 4 * MIN_WINDOWS, "no difference: all windows"
    evaluated.clear()
    one.take(base=Weights(1, one.export()))
    assert one.evaluate(1, 0.0) is not None
    assert len(evaluated) == MIN_WINDOWS, "no time; the published drafter's lengths are known"
    learn(one, 60)
    evaluated.clear()
    evaluation = one.evaluate(1, LONG_S)
    assert evaluation is not None
    assert evaluation.better
    assert MIN_WINDOWS <= len(evaluated) < num_windows, "clear before the last window"


def test_nothing_is_evaluated_twice(one: HarvestTrainer, evaluated: list[int]) -> None:
    one.train(1, 1.0)
    first = one.evaluate(1, LONG_S)
    evaluated.clear()
    assert one.evaluate(1, LONG_S) == first
    one.take(published=Weights(1, one.export()))
    again = one.evaluate(1, 0.0)
    assert again is not None
    assert again.length == again.published_length
    assert evaluated == [], "the drafter that was published is the one just evaluated"


def test_without_a_lease_it_does_nothing(settings: HarvestTrainerSettings) -> None:
    one = make_trainer(settings)
    before = one.export()
    assert one.train(1, LONG_S).num_steps == 0
    assert one.evaluate(1, LONG_S) is None
    assert one.begin(2, LONG_S)
    one.end(2)
    assert one.train(2, LONG_S).num_steps == 0
    assert not one.begin(2, LONG_S)
    assert one.begin(3, LONG_S)
    one.release()
    assert one.train(3, 2.0).num_steps == 0, "a call that comes late, or twice"
    assert same(one.export(), before)


def test_it_stops_from_another_thread_in_the_middle_of_its_work(one: HarvestTrainer) -> None:
    stopped_s: list[float] = []

    def stop() -> None:
        time.sleep(0.5)
        stopped_s.append(time.monotonic())
        one.end(1)

    thread = threading.Thread(target=stop)
    thread.start()
    one.train(1, LONG_S)
    assert time.monotonic() - stopped_s[0] < limit(1.0)
    thread.join()


def test_a_lease_runs_out_by_itself(settings: HarvestTrainerSettings) -> None:
    one = make_trainer(settings)
    one.begin(1, 0.3)
    started_s = time.monotonic()
    one.train(1, LONG_S)
    assert time.monotonic() - started_s < limit(2.0)


def test_an_empty_buffer_is_said_to_be(
    one: HarvestTrainer, settings: HarvestTrainerSettings
) -> None:
    SampleBuffer(settings.buffer).clear()
    assert one.train(1, LONG_S).starved
    assert one.evaluate(1, LONG_S) is None


def test_a_loss_that_is_not_finite_is_an_error_and_the_drafter_is_safe(
    settings: HarvestTrainerSettings,
) -> None:
    one = make_trainer(settings)
    published = one.export()
    nan = float("nan")
    broken = {n: t * nan if t.is_floating_point() else t for n, t in published.items()}
    one.take(base=Weights(1, broken))
    one.begin(1, LONG_S)
    with pytest.raises(FloatingPointError):
        one.train(1, 3.0)
    assert same(one.export(), published)


def test_while_it_trains_others_get_the_weights_it_began_with(
    one: HarvestTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, micro_step = [], DrafterTrainer.micro_step

    def counted(self: DrafterTrainer, *args: Any, **kwargs: Any) -> Any:
        steps.append(micro_step(self, *args, **kwargs))
        return steps[-1]

    monkeypatch.setattr(DrafterTrainer, "micro_step", counted)
    before = one.export()
    work = threading.Thread(target=one.train, args=(1, LONG_S))
    work.start()
    while len(steps) < 2:
        time.sleep(0.01)
    during = one.export()
    one.end(1)
    work.join()
    after = one.export()
    name = "fc.weight"
    assert torch.equal(before[name], during[name])
    assert not torch.equal(before[name], after[name])


def test_a_merge_is_taken_unless_it_is_worse(one: HarvestTrainer) -> None:
    before = one.export()
    learn(one, 30)
    own = one.export()
    noise = {n: torch.randn_like(t) if t.is_floating_point() else t for n, t in own.items()}
    assert not one.merge(1, [(noise, 5.0)], 1.0, LONG_S)
    assert same(one.export(), own)
    one.take(base=Weights(1, before))
    assert one.merge(1, [(own, 3.0)], 1.0, LONG_S)
    mean = (before["fc.weight"] + 3 * own["fc.weight"]) / 4
    assert torch.allclose(one.export()["fc.weight"], mean, atol=1e-6)


def test_averages_leave_out_what_does_not_fit() -> None:
    one = {"d2t": torch.tensor([0, 1]), "w": torch.tensor([1.0])}
    two = {"d2t": torch.tensor([0, 1]), "w": torch.tensor([4.0])}
    other_words = {"d2t": torch.tensor([5, 6]), "w": torch.tensor([100.0])}
    broken = {"d2t": torch.tensor([0, 1]), "w": torch.tensor([float("nan")])}
    merged = averaged([(one, 2.0), (two, 1.0), (other_words, 9.0), (broken, 9.0)])
    assert merged is not None
    assert merged["w"].item() == pytest.approx(2.0)
    assert averaged([(one, 1.0), (broken, 1.0)]) is None


@pytest.mark.parametrize("untrained", [True, False])
def test_the_vocabulary_is_chosen_for_a_new_drafter_and_once_per_policy(
    settings: HarvestTrainerSettings, untrained: bool
) -> None:
    one = make_trainer(replace(settings, untrained=untrained))
    one.begin(1, LONG_S)
    before = one.export()
    one.train(1, 0.2)
    assert torch.equal(before["d2t"], one.export()["d2t"]) != untrained
    one.take(base=Weights(1, before))
    embedding = torch.zeros(CONFIG.vocab_size, CONFIG.hidden_size)
    one.take(policy=Weights(1, {EMBEDDING: embedding}))
    one.train(1, 0.2)
    assert not torch.equal(before["d2t"], one.export()["d2t"])
    one.take(base=Weights(2, before))
    one.train(1, 0.2)
    assert torch.equal(before["d2t"], one.export()["d2t"]), "once per policy"


def test_a_resumed_trainer_continues_with_the_moments_of_its_optimizer(
    one: HarvestTrainer, settings: HarvestTrainerSettings
) -> None:
    one.train(1, 1.0)
    moments = one.optimizer_state()
    save_file(moments, Path(settings.drafter) / MOMENTS)
    resumed = make_trainer(settings)
    assert same(resumed.optimizer_state(), moments)
    assert moments["step"] > 0, "no second warm-up"
    resumed.begin(1, LONG_S)
    assert resumed.train(1, 0.5).num_steps > 0


def test_moments_of_the_head_are_dropped_with_the_vocabulary(
    one: HarvestTrainer, settings: HarvestTrainerSettings
) -> None:
    one.train(1, 0.5)
    moments = one.optimizer_state()
    save_file(moments | {"d2t": moments["d2t"] + 1}, Path(settings.drafter) / MOMENTS)
    resumed = make_trainer(settings).optimizer_state()
    dropped = moments.keys() - resumed.keys()
    assert dropped == {name for name in moments if ".lm_head." in name} != set()


def test_a_head_may_be_tied() -> None:
    embedding, head = torch.ones(2, 2), torch.zeros(2, 2)
    assert head_and_embedding({EMBEDDING: embedding}) == (embedding, embedding)
    assert head_and_embedding({EMBEDDING: embedding, "lm_head.weight": head})[0] is head
