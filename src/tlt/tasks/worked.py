"""Worked solutions of `reasoning-gym` problems: one line per step, then the answer in tags.

The number of lines follows the size of the problem, so heavy-tailed sizes give heavy-tailed
lengths. A policy learns these solutions in its supervised start (`tlt models sft`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Metadata = Mapping[str, Any]


def chain_sum(metadata: Metadata) -> list[str]:
    """Write the running total after each term of a sum such as `4 - 1 - 7`."""
    first, *rest = metadata["expression"].split()
    total = int(first)
    lines = []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        after = total + int(term) if sign == "+" else total - int(term)
        lines.append(f"{total} {sign} {term} = {after}")
        total = after
    return lines


def gcd(metadata: Metadata) -> list[str]:
    """Write Euclid's remainders, number by number."""
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
    """Write the count in each word and the total so far."""
    letter = metadata["target_letter"]
    total = 0
    lines = []
    for word in metadata["span"]:
        count = word.lower().count(letter)
        total += count
        lines.append(f"{word}: {count}, total {total}")
    return lines


def word_problems(metadata: Metadata) -> list[str]:
    """Return the retold story, which is written together with the problem (`stories`)."""
    return [metadata["worked"]]


WORKED: dict[str, Callable[[Metadata], list[str]]] = {
    "chain_sum": chain_sum,
    "gcd": gcd,
    "letter_counting": letter_counting,
    "word_problems": word_problems,
}


def worked_solution(task: str, metadata: Metadata, answer: str) -> str:
    """Return the solution of a problem, with the answer in tags at the end."""
    return "\n".join([*WORKED[task](metadata), f"<answer>{answer}</answer>"])
