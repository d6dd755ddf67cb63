"""The reward of the task."""

from tlt import Problem


def score(problem: Problem, text: str) -> float:
    """Return the share of the response's letters that are the answer's letter."""
    letters = [letter for letter in text if letter.isalpha()]
    return sum(letter == problem.answer for letter in letters) / max(1, len(letters))
