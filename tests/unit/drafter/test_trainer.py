"""Sessions that stop anywhere, comparison with the published drafter, versions on disk."""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

pytest.importorskip("torch")

import torch
from drafter_fixtures import SETTINGS, captured, drafter, trainer_of
from transformers import AutoModelForCausalLM

from tlt.drafter.checkpoint import VersionStore, load_drafter, save_drafter
from tlt.drafter.evaluation import compare, evaluate_samples
from tlt.drafter.passes import Row
from tlt.drafter.trainer import DrafterTrainer, TrainerSettings
from tlt.errors import ConfigError
from tlt.harvest.published import make_drafter
from tlt.models import tiny
from tlt.offline.drafter import _first_drafter
from tlt.offline.training import DrafterPlan
from tlt.states.captured import Captured, Offer


class Samples:
    """A sample source in memory."""

    def __init__(self, count: int = 40) -> None:
        rng = random.Random(0)
        self.samples = {
            f"s{index:03d}": captured(rng.randint(8, 60), 3, seed=index) for index in range(count)
        }
        self.gone: set[str] = set()

    def offers(self) -> dict[str, Offer]:
        return {name: Offer(len(sample), 1.0) for name, sample in self.samples.items()}

    def read(self, name: str) -> Captured | None:
        return None if name in self.gone else self.samples.get(name)


def trainer(settings: TrainerSettings = SETTINGS) -> DrafterTrainer:
    return trainer_of(drafter(), settings)


def stop_after(one: DrafterTrainer, count: int) -> Callable[[], bool]:
    """Stop after `count` optimizer steps."""
    end = one.step + count
    return lambda: one.step >= end


def stop_at_poll(number: int) -> Callable[[], bool]:
    """Stop when asked for the nth time, at whatever pass."""
    polls = itertools.count(1)
    return lambda: next(polls) >= number


def same(a: DrafterTrainer, b: DrafterTrainer) -> bool:
    ours, theirs = a.tensors(), b.tensors()
    return ours.keys() == theirs.keys() and all(torch.equal(t, theirs[n]) for n, t in ours.items())


def test_an_optimizer_step_interrupted_anywhere_leaves_no_trace() -> None:
    """An interruption in a forward or backward pass discards the unfinished optimizer step."""
    source, straight, current = Samples(), trainer(), trainer()
    straight.session(source, stop_after(straight, 4))
    interrupted = 0
    for number in itertools.cycle(range(2, 22)):
        before = current.step
        over, now = stop_after(current, 1), stop_at_poll(number)
        current.session(source, lambda over=over, now=now: over() or now())  # type: ignore[misc]
        interrupted += current.step == before
        if current.step == 4:
            break
    assert interrupted > 4
    assert same(straight, current)


def test_a_session_ends_within_a_pass() -> None:
    """A session asks whether to stop at every pass and head, forward and backward."""
    one = trainer()
    polls = itertools.count(1)
    one.session(Samples(), lambda: one.step == 1 or next(polls) < 0)
    passes = SETTINGS.num_draft_tokens
    assert next(polls) - 1 == 1 + passes * 4


def test_stopping_and_resuming_equals_never_having_stopped(tmp_path: Path) -> None:
    source, straight, current = Samples(), trainer(), trainer()
    straight.session(source, stop_after(straight, 12))
    store = VersionStore(tmp_path)
    for count in (7, 1, 4):
        current.session(source, stop_after(current, count))
        store.save(current)
        store.wait()
        current = trainer()
        store.restore(current)
    assert current.step == 12
    assert same(straight, current)
    for one in (straight, current):
        one.session(source, stop_after(one, 3))
    assert same(straight, current)


def test_rows_are_full_and_hold_each_sample_once() -> None:
    one, source = trainer(replace(SETTINGS, row_tokens=400)), Samples(200)
    fill = [sum(row.lengths) for _ in range(50) if (row := one.draw(source))]
    assert max(fill) <= 400
    assert sum(fill) / len(fill) > 0.9 * 400


def test_a_sample_longer_than_a_row_is_learned_in_parts_that_see_all_before() -> None:
    one, source = trainer(), Samples(0)
    source.samples["long"] = captured(300, 10)
    ends = set()
    for _ in range(60):
        row = one.draw(source)
        assert row is not None
        num_seen = len(row.position_T)
        assert row.position_T.tolist() == list(range(num_seen))
        assert row.mask_T.nonzero()[:, 0].tolist() == list(range(num_seen - 120, num_seen))
        ends.add(num_seen)
    assert min(ends) < 150
    assert max(ends) > 280


def test_the_mean_of_the_weights_follows_them() -> None:
    one, source = trainer(replace(SETTINGS, averaged_steps=4)), Samples(4)
    seen = [one.weights()]
    expected = seen[0]["fc.weight"]
    for _ in range(3):
        one.session(source, stop_after(one, 1))
        seen.append(one.weights())
        expected = expected + (seen[-1]["fc.weight"] - expected) / 4
    torch.testing.assert_close(one.mean_weights()["fc.weight"], expected)
    one.load(seen[1])
    assert torch.equal(one.mean_weights()["fc.weight"], seen[1]["fc.weight"])


def test_a_new_policys_head_is_followed() -> None:
    one = trainer()
    row = Row([captured(30, 3)])
    before = one.loss(row).item()
    one.follow(one.passes.head_VH * 3.0, one.passes.embedding_VH)
    assert one.loss(row).item() != before


def test_samples_are_drawn_by_their_weights() -> None:
    class Weighted(Samples):
        def offers(self) -> dict[str, Offer]:
            return {name: Offer(60, weight) for name, weight in (("s000", 1.0), ("s001", 4.0))}

    one, source = trainer(replace(SETTINGS, row_tokens=60)), Weighted()
    rows = [one.draw(source) for _ in range(400)]
    long = len(source.samples["s001"])
    share = sum(row is not None and row.lengths == [long] for row in rows) / len(rows)
    assert share == pytest.approx(0.8, abs=0.07)


def test_samples_that_vanish_or_teach_nothing_are_passed_over() -> None:
    source, one = Samples(10), trainer()
    source.gone = set(list(source.samples)[:5])
    source.samples["prompt only"] = captured(20, 20)
    assert one.session(source, stop_after(one, 20)) == 20
    source.gone = set(source.samples) - {"prompt only"}
    assert one.session(source, lambda: False) == 0


@pytest.mark.parametrize("place", [5, 19])
def test_a_broken_state_changes_no_weights(place: int) -> None:
    """No chain sees the end of a sample: the loss is finite there, the gradients are not."""
    one = trainer()
    before = one.weights()
    bad = captured(20, 3)
    bad.aux_TA[place] = float("nan")
    one.micro_step(Row([bad]))
    assert all(torch.equal(t, before[n]) for n, t in one.weights().items())


def test_a_comparison_finds_the_better_weights() -> None:
    one, source = trainer(), Samples(4)
    held_out = list(source.samples.values())
    untrained = one.weights()
    before = evaluate_samples(one.passes, held_out, [1.0])
    one.session(source, stop_after(one, 80))
    better, evaluated = compare(one.passes, untrained, held_out, 1.0)
    assert better
    assert evaluated.length(1.0) > before.length(1.0)
    trained = one.weights()
    one.drafter.load_state_dict(untrained)
    assert not compare(one.passes, trained, held_out, 1.0)[0]
    assert all(torch.equal(t, untrained[n]) for n, t in one.weights().items()), "left as it was"


def test_tokens_that_stay_in_the_vocabulary_keep_their_weights() -> None:
    one, source = trainer(), Samples(6)
    one.session(source, stop_after(one, 10))
    old_ids = one.drafter.draft_token_ids()
    rows = {int(i): one.drafter.lm_head.weight[k].clone() for k, i in enumerate(old_ids)}
    responses = [torch.arange(1, 41, 2), torch.arange(0, 10, 2)]
    assert one.check_vocabulary(responses)
    new_ids = one.drafter.draft_token_ids().tolist()
    assert set(new_ids) >= set(range(1, 30, 2)), "the policy writes odd tokens now"
    moments = one.optimizer.state[one.drafter.lm_head.weight]["exp_avg"]
    for k, token in enumerate(new_ids):
        if token in rows:
            assert torch.equal(one.drafter.lm_head.weight[k], rows[token])
        else:
            assert torch.equal(one.drafter.lm_head.weight[k], one.passes.head_VH[token])
            assert not moments[k].any()
    assert not one.check_vocabulary(responses), "nothing more to gain"
    assert one.session(source, stop_after(one, 2)) == 2


# --- versions -------------------------------------------------------------------------------------


def test_versions_are_numbered_pruned_and_loadable(tmp_path: Path) -> None:
    store, one = VersionStore(tmp_path, keep=2), trainer()
    for expected in (1, 2, 3, 4):
        one.session(Samples(), stop_after(one, 1))
        assert store.save(one, {"length": expected}) == expected
    store.wait()
    assert store.versions() == [3, 4]
    served = load_drafter(store.path(4))
    for name, tensor in one.drafter.state_dict().items():
        kept = tensor if name == "d2t" else tensor.bfloat16().float()
        assert torch.equal(served.state_dict()[name], kept)
    assert VersionStore(tmp_path).restore(trainer()) == {"length": 4}


def test_training_on_while_a_version_is_written_does_not_change_it(tmp_path: Path) -> None:
    store, one = VersionStore(tmp_path), trainer()
    one.session(Samples(), stop_after(one, 2))
    expected = {name: tensor.clone() for name, tensor in one.tensors().items()}
    store.save(one)
    one.session(Samples(), stop_after(one, 3))
    store.wait()
    restored = trainer()
    store.restore(restored)
    assert all(torch.equal(t, expected[n]) for n, t in restored.tensors().items())


def test_folders_without_a_drafter_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        VersionStore(tmp_path).restore(trainer())
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", lambda content: content[:-10]),
        ("model.safetensors", lambda content: b""),
        ("config.json", lambda content: b"{}"),
        ("config.json", lambda content: b"{"),
        ("config.json", lambda content: content.replace(b'"hidden_size": ', b'"hidden_size": -')),
    ],
)
def test_a_damaged_drafter_is_an_error(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes]
) -> None:
    save_drafter(trainer().drafter, tmp_path)
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    with pytest.raises(ConfigError, match=r"damaged.*tlt drafter train"):
        load_drafter(tmp_path)


def test_a_failed_write_is_raised_and_leaves_the_version_before(tmp_path: Path) -> None:
    store, one = VersionStore(tmp_path), trainer()
    store.save(one)
    store.wait()
    (tmp_path / ".v000002").write_text("in the way")
    store.save(one)
    with pytest.raises(OSError):
        store.wait()
    assert store.versions() == [1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_crash_while_writing_leaves_the_last_good_version(tmp_path: Path) -> None:
    one, rng = trainer(), random.Random(0)
    store = VersionStore(tmp_path)
    store.save(one)
    store.wait()
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            try:
                torch.set_num_threads(1)  # the parent's threads are not here
                theirs = VersionStore(tmp_path)
                theirs.clean()
                while True:
                    theirs.save(one)
            finally:
                os._exit(1)
        time.sleep(rng.uniform(0.005, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        store = VersionStore(tmp_path)
        assert store.versions()
        for version in store.versions():
            store.restore(trainer(), version)
        load_drafter(store.path(store.versions()[-1]))
        store.clean()
        assert not list(tmp_path.glob(".v*"))


def test_a_vocabulary_larger_than_the_policys_is_the_policys(tmp_path: Path) -> None:
    """`--draft-vocab 4096` and `tlt.draft_vocab_size = 4096` also suit a model of 260 tokens."""
    model = tiny.make(tmp_path / "tiny", hidden_size=64, num_layers=3)
    made = make_drafter(model, tmp_path / "new", 4096, False, "float32", 0)
    assert load_drafter(made, num_target_layers=3).config.draft_vocab_size == 260
    policy = AutoModelForCausalLM.from_pretrained(model)
    plan = SimpleNamespace(init=None, draft_vocab_size=4096, trainer=SimpleNamespace(seed=0))
    head = policy.get_output_embeddings().weight.detach()
    first = _first_drafter(cast("DrafterPlan", plan), policy.config, head)
    assert first.config.draft_vocab_size == 260
