"""The colours of all pictures. They are readable on light and dark pages."""

INK = "#7d8590"
"""Text and axes of a picture that does not know its page: in the middle, 4 to 1 on both."""
COLOURS = ("#3b6fb6", "#e08a2e", "#4b9d5b", "#b6455b", "#7a62b3", "#8a6d4f", "#4aa6b5", "#9aa0a6")
"""Colours of things without a fixed colour, in this order."""
BLUE, ORANGE, GREEN, RED, PURPLE, BROWN, TEAL, GREY = COLOURS

MODES = {
    "off": GREY,
    "ngram": GREEN,
    "eagle3": BLUE,
    "frozen": PURPLE,
    "tlt": ORANGE,
    "adaptive": ORANGE,
    "beg_mab": RED,
}
"""Colours of drafters, and of ways to generate; `arm_colour` gives others one, too."""

STAGES = {
    "rollout": BLUE,
    "reward_wait": BROWN,
    "update": ORANGE,
    "sync": RED,
    "checkpoint": PURPLE,
    "eval": TEAL,
    "other": GREY,
}
"""Colours of the stages of an RL step."""
STATES = {
    "generating": BLUE,
    "tools": TEAL,
    "training": GREEN,
    "idle": "#e5e0d3",
    "updating": ORANGE,
    "swapping": RED,
    "waiting": GREY,
    "lost": "#666a70",
}
"""Colours of what a worker does."""
RUNS = (GREY, ORANGE, BLUE, GREEN, RED, PURPLE, BROWN, TEAL)
"""Colours of runs that are compared: the first is the base."""

SHADES = (0.45, 0.6, 0.75, 0.9, 1.0)  # strength of an arm's colour, by its draft tokens


def arm_colour(drafter: str, num_draft_tokens: int) -> str:
    """Return the colour of an arm: that of its drafter, stronger with every draft token."""
    base = MODES.get(drafter, PURPLE)
    if not num_draft_tokens:
        return base
    return paler(base, SHADES[min(len(SHADES), num_draft_tokens) - 1])


def paler(colour: str, share: float) -> str:
    """Return this share of a colour, on white."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in parts)
