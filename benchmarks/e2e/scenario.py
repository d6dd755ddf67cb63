"""Scenarios: which run, in which arms. A scenario is a TOML file, like those in `scenarios/`.

config = "configs/a_run.toml"           the TOML file of the run, from the root of the repository
about = "what it measures"
steps = 20                              RL steps that count
warm_up = 1                             RL steps before them
reference = "off"                       the arm that the others are compared with
overrides = ["learner.lr=1e-6"]         settings of all arms, as `tlt train` takes them

[arms.off]
label = "no speculation"                the name in tables
overrides = ["tlt.enabled=false"]
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCENARIOS = Path(__file__).parent / "scenarios"


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to make the run."""

    label: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run, and the arms that make it."""

    name: str
    about: str
    config: str
    steps: int
    warm_up: int
    reference: str
    overrides: tuple[str, ...]
    arms: dict[str, Arm]

    @property
    def num_steps(self) -> int:
        return self.warm_up + self.steps


def load(
    name: str,
    overrides: Sequence[str] = (),
    arms: Sequence[str] = (),
    steps: int | None = None,
) -> Scenario:
    """Read a scenario by its name or path; `arms` chooses some of its arms, the reference first."""
    path = Path(name) if name.endswith(".toml") else SCENARIOS / f"{name}.toml"
    if not path.exists():
        known = ", ".join(sorted(each.stem for each in SCENARIOS.glob("*.toml")))
        raise SystemExit(f"no scenario {path}; give a path, or one of {known}")
    tree = tomllib.loads(path.read_text())
    all_arms = {
        arm: Arm(of.get("label", arm), tuple(of.get("overrides", ())))
        for arm, of in tree["arms"].items()
    }
    if unknown := [arm for arm in arms if arm not in all_arms]:
        raise SystemExit(f"{path} has no arm {unknown[0]}; it has {', '.join(all_arms)}")
    chosen = {arm: all_arms[arm] for arm in arms or all_arms}
    reference = arms[0] if arms else tree.get("reference", next(iter(all_arms)))
    return Scenario(
        name=path.stem,
        about=tree.get("about", ""),
        config=tree["config"],
        steps=steps or tree.get("steps", 20),
        warm_up=tree.get("warm_up", 1),
        reference=reference,
        overrides=(*tree.get("overrides", ()), *overrides),
        arms=chosen,
    )
