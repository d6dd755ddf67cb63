"""The task `word_problems`: stories of `tlt.tasks.stories` as a dataset of reasoning-gym.

Importing this module registers the task.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from reasoning_gym.factory import ProceduralDataset, register_dataset

from tlt.tasks.stories import tell

NAME = "word_problems"


@dataclass
class WordProblemsConfig:
    """Parameters of the task, checked as reasoning-gym checks its own."""

    min_events: int = 2
    """Fewest events of a story."""
    max_events: int = 6
    """Most events of a story."""
    max_change: int = 3
    """Most things that one event brings or takes."""
    max_total: int = 9
    """Most things that are ever in stock."""
    check_share: float = 0.3
    """Chance that a solution checks itself, and that a check is checked."""
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        assert 1 <= self.min_events <= self.max_events, "1 <= min_events <= max_events"
        assert 2 <= self.max_change <= self.max_total // 2, "2 <= max_change <= max_total / 2"
        assert 0 <= self.check_share < 1, "0 <= check_share < 1"


class WordProblemsDataset(ProceduralDataset):  # type: ignore[misc]  # reasoning-gym has no types
    """Stories by index, each from its own random generator."""

    def __init__(self, config: WordProblemsConfig) -> None:
        super().__init__(config=config, seed=config.seed, size=config.size)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        rng = random.Random(self.seed + idx)
        num_events = rng.randint(self.config.min_events, self.config.max_events)
        of = self.config
        story = tell(num_events, rng, of.max_change, of.max_total, of.check_share)
        return {
            "question": story.question,
            "answer": str(story.answer),
            "metadata": {
                "source_dataset": NAME,
                "source_index": idx,
                "num_events": num_events,
                "worked": story.worked,
                "first": story.first,
                "changes": list(story.changes),
            },
        }


register_dataset(NAME, WordProblemsDataset, WordProblemsConfig)
