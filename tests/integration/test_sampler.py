"""The keyed sampler inside vLLM's classes, on logits made up here; no engine needed.

`generate` plays vLLM's runner: it lets requests with made-up logits draw their tokens step by step,
with drafts or without. Under the keyed sampler the drafts change how many steps that takes, and
nothing else, whatever the requests' settings are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")
scipy_stats = pytest.importorskip("scipy.stats")

VOCAB = 96  # a block and a half
LENGTH = 24
LONGEST_DRAFT = 5


@pytest.fixture(autouse=True)
def _without_compiling() -> Iterator[None]:
    """vLLM compiles a function that counts ranks, which takes longer than these tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


class FakeKeys:
    """Numbers the requests of a batch, or takes the seeds and positions that it is told."""

    def __init__(self) -> None:
        self.seeds: Any = None
        self.watch: Any = None
        self.positions: Any = None

    def of_batch(self, num_requests: int) -> tuple[Any, Any]:
        if self.seeds is None:
            return np.arange(num_requests, dtype=np.uint64), np.zeros(num_requests, np.int64)
        return np.array(self.seeds, np.uint64), np.array(self.positions, np.int64)


def verifier(logprobs_mode: Any = "raw_logprobs") -> Any:
    from vllm.v1.sample.sampler import Sampler

    from tlt.vllm.v1.sampler import KeyedSampler, KeyedVerifier

    return KeyedVerifier(KeyedSampler(FakeKeys(), Sampler(logprobs_mode)))


@dataclass
class Request:
    """One request's settings, and its tokens so far."""

    seed: int
    temperature: float = 1.0
    top_k: int = VOCAB
    top_p: float = 1.0
    frequency: float = 0.0
    min_tokens: int = 0
    stop: tuple[int, ...] = ()
    bad_words: list[list[int]] = field(default_factory=list)
    extra_args: dict[str, int] | None = None
    prompt: tuple[int, ...] = (3, 4)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)


def drafted(drafts: Sequence[Sequence[int]]) -> Any:
    """Return vLLM's description of the drafts in a batch."""
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    metadata = SpecDecodeMetadata.make_dummy([list(d) for d in drafts], torch.device("cpu"))
    ends = torch.tensor([len(d) + 1 for d in drafts]).cumsum(0)
    rows = torch.arange(int(ends[-1]))
    is_bonus = torch.zeros(len(rows), dtype=torch.bool)
    is_bonus[ends - 1] = True
    metadata.bonus_logits_indices = rows[is_bonus]
    metadata.target_logits_indices = rows[~is_bonus]
    metadata.cu_num_sampled_tokens = ends.to(torch.int32)
    return metadata


def settings(
    requests: Sequence[Request],
    drafts: Sequence[Sequence[int]] = (),
    logprobs: int | None = 0,
) -> Any:
    """Return vLLM's description of the requests' settings, as its batch writes it."""
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.sample.metadata import SamplingMetadata

    config: Any = None
    min_tokens = MinTokensLogitsProcessor(config, torch.device("cpu"), False)
    added = [
        (
            index,
            SamplingParams(min_tokens=r.min_tokens, stop_token_ids=list(r.stop), max_tokens=99),
            list(r.prompt),
            r.tokens,
        )
        for index, r in enumerate(requests)
        if r.min_tokens
    ]
    min_tokens.update_state(BatchUpdate(len(requests), (), added, ()))

    def of(name: str) -> Any:
        return torch.tensor([getattr(r, name) for r in requests])

    greedy = [r.temperature == 0 for r in requests]
    return SamplingMetadata(
        temperature=None if all(greedy) else of("temperature"),
        all_greedy=all(greedy),
        all_random=not any(greedy),
        top_p=of("top_p") if any(r.top_p < 1 for r in requests) else None,
        top_k=of("top_k").int() if any(r.top_k < VOCAB for r in requests) else None,
        generators={},
        max_num_logprobs=logprobs,
        no_penalties=not any(r.frequency for r in requests),
        prompt_token_ids=of("prompt"),
        frequency_penalties=of("frequency"),
        presence_penalties=torch.zeros(len(requests)),
        repetition_penalties=torch.ones(len(requests)),
        output_token_ids=[r.tokens for r in requests],
        spec_token_ids=[list(d) for d in drafts],
        allowed_token_ids_mask=None,
        bad_words_token_ids={i: r.bad_words for i, r in enumerate(requests) if r.bad_words},
        logitsprocs=LogitsProcessors([min_tokens]),
    )


Drafter = Callable[[Request], list[int]]


def step(
    checked: Any, requests: Sequence[Request], table: Any, draft: Drafter, logprobs: int | None
) -> None:
    """Run one engine step: the requests draft, and the sampler extends them."""
    drafts = [draft(r)[: LENGTH - 1 - len(r.tokens)] for r in requests]
    rows = torch.cat(
        [
            table[r.seed, len(r.tokens) : len(r.tokens) + len(d) + 1]
            for r, d in zip(requests, drafts, strict=True)
        ]
    )
    sampling = settings(requests, drafts, logprobs)
    keys = checked.sampler.keys
    keys.seeds, keys.positions = [r.seed for r in requests], [len(r.tokens) for r in requests]
    if any(drafts):
        probabilities = torch.full((sum(map(len, drafts)), VOCAB), 1 / VOCAB)  # not looked at
        out = checked(drafted(drafts), probabilities, rows, sampling)
    else:
        out = checked.sampler(rows, sampling)
    tokens, found = checked.parse_output(
        out.sampled_token_ids, VOCAB, logprobs_tensors=out.logprobs_tensors
    )
    for index, request in enumerate(requests):
        if found is not None:
            start = found.cu_num_generated_tokens[index] if any(drafts) else index
            of = slice(start, start + len(tokens[index]))
            request.logprobs += zip(
                *(x[of].tolist() for x in (found.logprob_token_ids, found.logprobs)),
                found.sampled_token_ranks[of].tolist(),
                strict=True,
            )
        request.tokens += tokens[index]


def generate(
    kinds: Sequence[dict[str, Any]],
    draft: Drafter = lambda request: [],
    logprobs_mode: Any = "raw_logprobs",
    logprobs: int | None = 0,
    num: int = 60,
) -> tuple[list[Request], int]:
    """Return requests of the given settings in turn, each with its tokens, and the steps taken."""
    table = torch.randn(num, LENGTH, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    requests = [Request(seed, **kinds[seed % len(kinds)]) for seed in range(num)]
    checked = verifier(logprobs_mode)
    steps = 0
    while running := [r for r in requests if len(r.tokens) < LENGTH]:
        step(checked, running, table, draft, logprobs)
        steps += 1
    return requests, steps


def informed(reference: Sequence[Request], seed: int) -> Drafter:
    """Return a drafter that is right four times in five, with drafts of all lengths."""
    rng = np.random.default_rng(seed)

    def draft(request: Request) -> list[int]:
        start = len(request.tokens)
        right = reference[request.seed].tokens[start : start + int(rng.integers(LONGEST_DRAFT + 1))]
        wrong = rng.integers(-1, VOCAB, len(right))
        return np.where(rng.random(len(right)) < 0.8, right, wrong).tolist()

    return draft


KINDS: dict[str, list[dict[str, Any]]] = {
    "temperature 0.7": [{"temperature": 0.7}],
    "greedy": [{"temperature": 0.0}],
    "greedy and random": [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.3}],
    "top-k": [{"top_k": 5}, {"top_k": 1}, {"temperature": 0.7}],
    "top-p": [{"top_p": 0.9, "temperature": 0.7}, {"top_p": 0.5}, {}],
    "top-k and top-p": [{"top_k": 9, "top_p": 0.8}, {"temperature": 0.0, "top_k": 3}],
    "penalties": [{"frequency": 0.7}, {"frequency": 0.2, "temperature": 0.7}, {}],
    "bad words": [{"bad_words": [[7], [5, 6], [1, 2, 3]]}, {}],
    "min tokens": [
        {"min_tokens": 9, "stop": tuple(range(60))},
        {"min_tokens": 15, "stop": tuple(range(30, 90)), "temperature": 0.7},
    ],
}


def check_logprobs(got: Sequence[Request], expected: Sequence[Request]) -> None:
    for one, other in zip(got, expected, strict=True):
        for (ids_a, logprobs_a, rank_a), (ids_b, logprobs_b, rank_b) in zip(
            one.logprobs, other.logprobs, strict=True
        ):
            assert (ids_a, rank_a) == (ids_b, rank_b)
            assert logprobs_a == pytest.approx(logprobs_b, abs=1e-5)


@pytest.mark.gate
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_drafts(kind: str) -> None:
    expected, plain_steps = generate(KINDS[kind])
    for seed in range(3):
        got, steps = generate(KINDS[kind], informed(expected, seed))
        assert [r.tokens for r in got] == [r.tokens for r in expected]
        assert steps < 0.8 * plain_steps
        check_logprobs(got, expected)


@pytest.mark.gate
@pytest.mark.parametrize("kind", ["temperature 0.7", "greedy and random", "penalties"])
@pytest.mark.parametrize(
    ("mode", "num_logprobs"),
    [("raw_logprobs", 3), ("processed_logprobs", 0), ("processed_logits", 3), ("raw_logits", None)],
)
def test_what_is_returned_beside_the_tokens_changes_none(
    kind: str, mode: str, num_logprobs: int | None
) -> None:
    """Whether a batch takes the short way or vLLM's, raw or processed: the same tokens."""
    expected, _ = generate(KINDS[kind])
    plain, _ = generate(KINDS[kind], logprobs_mode=mode, logprobs=num_logprobs)
    drafting, _ = generate(KINDS[kind], informed(expected, 0), mode, num_logprobs)
    for got in (plain, drafting):
        assert [r.tokens for r in got] == [r.tokens for r in expected]
    check_logprobs(drafting, plain)
    lengths = {len(ids) for r in drafting for ids, _, _ in r.logprobs}
    assert lengths == ({num_logprobs + 1} if num_logprobs is not None else set())


@pytest.mark.gate
def test_a_request_does_not_depend_on_the_settings_of_others() -> None:
    """One request with top-k sends the whole batch through vLLM's own code."""
    alone, _ = generate([{"temperature": 0.7}])
    for other in ({"top_k": 3}, {"top_p": 0.5}, {"frequency": 0.5}, {"bad_words": [[1]]}):
        mixed, _ = generate([{"temperature": 0.7}, other])
        assert [r.tokens for r in mixed[::2]] == [r.tokens for r in alone[::2]]


@pytest.mark.gate
def test_ties_are_decided_alike_with_and_without_other_settings() -> None:
    """Logits that make two tokens equal but for rounding, drawn both ways."""
    from tlt.vllm import keyed

    rows = torch.randn(400, VOCAB, generator=torch.Generator().manual_seed(1)).numpy()
    temperature = np.float32(0.7)
    inverse = np.float32(1) / temperature
    checked = verifier()
    requests = [Request(seed, temperature=float(temperature)) for seed in range(len(rows))]
    first = checked.sampler(torch.tensor(rows), settings(requests)).sampled_token_ids[:, 0]
    for seed, (row, token) in enumerate(zip(rows, first.tolist(), strict=True)):
        start = token // keyed.BLOCK * keyed.BLOCK
        rival = start if token != start else start + 1
        row[rival] += temperature * keyed.shortfall(row, np.uint64(seed), 0, inverse, rival)
    tied = checked.sampler(torch.tensor(rows), settings(requests)).sampled_token_ids
    assert 40 < (tied[:, 0] != first).sum() < 360  # rounding does decide
    requests[0].bad_words = [[1, 1]]  # excludes nothing, but takes the other way
    assert torch.equal(
        checked.sampler(torch.tensor(rows), settings(requests)).sampled_token_ids, tied
    )


@pytest.mark.gate
@pytest.mark.parametrize("top_k", [5, VOCAB])
@pytest.mark.parametrize("top_p", [0.8, 1.0])
def test_draws_follow_what_the_settings_leave(top_k: int, top_p: float) -> None:
    """Chi-squared over 20,000 requests with a draft, against float64 by hand."""
    num, temperature = 20_000, 0.7
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)).double()
    requests = [Request(seed, temperature, top_k, top_p) for seed in range(num)]
    drafts = [[5]] * num
    rows = row.float().repeat(2 * num, 1)
    out = verifier()(drafted(drafts), None, rows, settings(requests, drafts)).sampled_token_ids
    expected, order = (row / temperature).softmax(-1).sort(descending=True)
    expected[top_k:] = 0
    expected /= expected.sum()
    expected[expected.cumsum(0) - expected >= top_p] = 0
    expected /= expected.sum()
    counts = torch.bincount(out[:, 0].long(), minlength=VOCAB)[order]
    assert counts[expected == 0].sum() == 0
    likely = expected * num > 10
    rare = ~likely & (expected > 0)
    observed, wanted = counts[likely].tolist(), (expected[likely] * num).tolist()
    if rare.any():
        observed.append(int(counts[rare].sum()))
        wanted.append(float(expected[rare].sum()) * num)
    assert scipy_stats.chisquare(observed, wanted, sum_check=False).pvalue > 1e-5


# --- keys ---------------------------------------------------------------------------------------


class FakeRunner:
    """The part of vLLM's runner that holds seeds and lengths."""

    class Batch:
        req_ids = ("a", "b", "c", "d")
        num_tokens_no_spec = np.array([5, 9, 30, 7], np.int32)
        num_prompt_tokens = np.array([5, 4, 10, 7], np.int32)

    class Known:
        def __init__(self, seed: int | None) -> None:
            self.sampling_params = Request(0)
            self.sampling_params.seed = seed  # type: ignore[assignment]

    input_batch = Batch()

    def __init__(self, seeds: dict[str, int | None]) -> None:
        self.requests = {name: self.Known(seed) for name, seed in seeds.items()}


@pytest.mark.gate
def test_seeds_and_positions_of_the_runners_requests() -> None:
    from tlt.vllm.args import BEGUN
    from tlt.vllm.v1.sampler import RunnerKeys

    runner = FakeRunner({"a": 7, "b": 2**63 - 1, "c": None, "d": None})
    runner.requests["b"].sampling_params.extra_args = {BEGUN: 3}
    keys, positions = RunnerKeys(runner, engine_seed=1).of_batch(4)
    assert keys[:2].tolist() == [7, 2**63 - 1]
    assert positions.tolist() == [0, 5 + 3, 20, 0]
    # Requests without a seed: repeatable, and different between requests and engines.
    again, _ = RunnerKeys(runner, engine_seed=1).of_batch(4)
    elsewhere, _ = RunnerKeys(runner, engine_seed=2).of_batch(4)
    assert keys.tolist() == again.tolist()
    assert len({*keys.tolist(), *elsewhere.tolist()}) == 6
