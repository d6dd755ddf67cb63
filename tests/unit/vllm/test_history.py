"""The history of samples: which tokens a lookup finds, in which order, and which it drops."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tlt.vllm.ngram.history import History

PROMPT = [7, 8, 9]
OTHER = [9, 8, 7]
WIDTH = 64


def draft(
    history: History, requests: dict[str, tuple[list[int], list[int]]], num_wanted: int = 4
) -> dict[str, list[int]]:
    """Run one engine step, given (prompt, response) of each request in the order of the rows."""
    # vLLM's arrays have more rows than requests.
    rows: Any = np.full((len(requests) + 1, WIDTH), 999, dtype=np.int32)
    num_tokens: Any = np.zeros(len(rows), dtype=np.int32)
    for row, (prompt, response) in enumerate(requests.values()):
        num_tokens[row] = len(prompt) + len(response)
        rows[row, : num_tokens[row]] = prompt + response
    num_prompt_tokens = [len(prompt) for prompt, _ in requests.values()]
    wanted = [num_wanted] * len(requests)
    drafts = history.draft(list(requests), num_prompt_tokens, num_tokens, rows, wanted)
    return dict(zip(requests, drafts, strict=True))


def end(history: History, name: str, prompt: list[int], response: list[int]) -> None:
    history.end(name, len(prompt), np.array(prompt + response, dtype=np.int32))


class Reference:
    """The rules of `History` over plain lists, with a comparison of every occurrence."""

    def __init__(self, capacity: int, lengths: Sequence[int]) -> None:
        self.capacity, self.lengths = capacity, lengths
        self.texts: list[list[int]] = []
        self.numbers: list[list[int]] = []  # of each text's tokens, in the order of learning
        self.prompts: list[tuple[int, ...]] = []
        self.running: dict[str, int] = {}
        self.newest = self.cleared = 0

    def learn(self, name: str, prompt: list[int], response: list[int]) -> None:
        if name not in self.running:
            self.running[name] = len(self.texts)
            self.texts.append([])
            self.numbers.append([])
            self.prompts.append(tuple(prompt))
        sample = self.running[name]
        for token in (prompt + response)[len(self.texts[sample]) :]:
            self.newest += 1
            self.texts[sample].append(token)
            self.numbers[sample].append(self.newest)

    def kept(self, sample: int, index: int) -> bool:
        return self.numbers[sample][index] > self.newest - self.capacity

    def find(self, text: list[int], prompt: tuple[int, ...]) -> tuple[int, int] | None:
        for same_prompt in (True, False):
            for length in sorted(self.lengths, reverse=True):
                last: tuple[int, int, int] | None = None
                for sample, other in enumerate(self.texts):
                    if same_prompt and self.prompts[sample] != prompt:
                        continue
                    for index in range(length, len(other)):
                        numbers = self.numbers[sample]
                        # A token links to the previous one only if the ring buffer still holds it.
                        tied = numbers[index] - numbers[index - 1] < self.capacity
                        found = tied and other[index - length : index] == text[-length:]
                        if found and numbers[index] > self.cleared:
                            last = max(last or (0, 0, 0), (numbers[index], sample, index))
                if last and self.kept(last[1], last[2] - length):
                    return last[1], last[2]
        return None

    def draft(self, text: list[int], prompt: tuple[int, ...], num_wanted: int) -> list[int]:
        drafted: list[int] = []
        while len(drafted) < num_wanted:
            found = self.find(text + drafted, prompt)
            if found is None:
                break
            sample, index = found
            following = self.texts[sample][index:]
            for offset in range(1, len(following)):
                numbers = self.numbers[sample]
                if numbers[index + offset] - numbers[index + offset - 1] >= self.capacity:
                    following = following[:offset]
                    break
            drafted += following[: num_wanted - len(drafted)]
        return drafted


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    capacity=st.integers(1, 150),
    lengths=st.sampled_from([(1,), (2,), (1, 3), (2, 4), (2, 4, 8)]),
    num_tokens=st.integers(2, 5),
)
def test_like_comparing_everything(
    seed: int, capacity: int, lengths: tuple[int, ...], num_tokens: int
) -> None:
    rng = random.Random(seed)
    history = History(capacity, lengths[0], lengths[-1])
    num_bytes = history.num_bytes
    reference = Reference(capacity, lengths)
    running: dict[str, tuple[list[int], list[int]]] = {}
    for _ in range(40):
        for name in "abcd":
            if name not in running:
                running[name] = ([rng.randrange(2), 0, 1], [])
            for _ in range(rng.randrange(4)):
                running[name][1].append(rng.randrange(num_tokens))
            if rng.random() < 0.02:  # a later request may have the name
                history.forget(name)
                del running[name]
                reference.running.pop(name, None)
            elif rng.random() < 0.05 or len(running[name][1]) > WIDTH - 10:
                end(history, name, *running[name])
                reference.learn(name, *running.pop(name))
                del reference.running[name]
        if rng.random() < 0.05:
            history.clear()
            reference.cleared = reference.newest
        order = rng.sample(sorted(running), len(running))
        asked = {name: running[name] for name in order[: rng.randint(0, 3)]}
        num_wanted = rng.randint(0, 6)
        drafts = draft(history, asked, num_wanted)
        for name, (prompt, response) in asked.items():
            reference.learn(name, prompt, response)
        for name, (prompt, response) in asked.items():
            expected = reference.draft(prompt + response, tuple(prompt), num_wanted)
            assert drafts[name] == expected
    assert history.num_bytes == num_bytes
