"""Worked solutions of `reasoning-gym` problems, one line a step, the answer in tags at the end.

The number of steps follows the size of the problem, so heavy-tailed sizes give heavy-tailed
lengths. What is written is what a policy learns in its supervised start (`tlt sft`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Metadata = Mapping[str, Any]


def chain_sum(metadata: Metadata) -> list[str]:
    """`4 - 1 - 7`: the running total after each term."""
    first, *rest = metadata["expression"].split()
    total = int(first)
    lines = []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        after = total + int(term) if sign == "+" else total - int(term)
        lines.append(f"{total} {sign} {term} = {after}")
        total = after
    return lines


def gcd(metadata: Metadata) -> list[str]:
    """Euclid's remainders, number by number."""
    current, *rest = metadata["numbers"]
    lines = []
    for number in rest:
        a, b = max(current, number), min(current, number)
        while b:
            lines.append(f"{a} mod {b} = {a % b}")
            a, b = b, a % b
        lines.append(f"gcd({current}, {number}) = {a}")
        current = math.gcd(current, number)
    return lines


def letter_counting(metadata: Metadata) -> list[str]:
    """The count in each word and so far."""
    letter = metadata["target_letter"]
    total = 0
    lines = []
    for word in metadata["span"]:
        count = word.lower().count(letter)
        total += count
        lines.append(f"{word}: {count}, total {total}")
    return lines


WORKED: dict[str, Callable[[Metadata], list[str]]] = {
    "chain_sum": chain_sum,
    "gcd": gcd,
    "letter_counting": letter_counting,
}


def worked_solution(task: str, metadata: Metadata, answer: str) -> str:
    return "\n".join([*WORKED[task](metadata), f"<answer>{answer}</answer>"])
