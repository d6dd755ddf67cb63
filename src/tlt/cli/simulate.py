"""`tlt simulate` and `tlt simulate calibrate`: simulate TLT on hardware you don't have yet."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tlt.cli.options import Json, Overrides, number, option
from tlt.cli.output import Output

SCENARIO = (
    "name the TOML file of a scenario or of a run, or give settings such as cluster.num_engines=8"
)


class _Simulate(TyperGroup):
    """Settings follow `tlt simulate` directly; only the word `calibrate` names a command."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **named: Any) -> Any:
        if args[:1] == ["calibrate"]:
            return super().make_context(info_name, args, *rest, **named)
        return self.commands["simulate"].make_context(info_name, args, *rest, **named)


app = typer.Typer(cls=_Simulate, help="Simulate TLT on hardware you don't have yet.")


@app.command()
def calibrate(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs with a timeline.")],
    out: Annotated[Path, option("File to write.")] = Path("calibration.json"),
    as_json: Json = False,
) -> None:
    """Model a machine from its runs, for `tlt simulate`."""
    from tlt.contracts import OFF
    from tlt.report.view import look_at
    from tlt.simulate.calibrate import calibrate as learn

    found = learn([look_at(run) for run in runs])
    found.save(out)
    output = Output(as_json)
    output.result(asdict(found))
    steps_ms = [1e3 * float(found.engine.step_s(OFF, requests, 500)) for requests in (1, 8, 32)]
    output.say(
        f"an engine step of 1 / 8 / 32 requests takes {' / '.join(f'{ms:.1f}' for ms in steps_ms)} "
        f"ms; the learner trains on {found.learner.tokens_per_s:,.0f} tokens/s"
    )
    for drafter, rates in found.drafting.rates.items():
        output.say(f"{drafter}: {rates[0]:.0%} of first draft tokens accepted")
    output.wrote(str(out))


@app.command(hidden=True)
def simulate(
    scenario: Annotated[
        Path | None, typer.Argument(help="TOML file of a scenario, or of a training run.")
    ] = None,
    overrides: Overrides = None,
    from_run: Annotated[
        Path | None, option("Folder of a run whose machine and lengths to simulate.")
    ] = None,
    gpus: Annotated[
        int | None,
        number("GPUs of the cluster, in place of cluster.num_engines.", 1),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        option("Values to compare, as section.key=a,b,c. Repeatable, for a grid."),
    ] = None,
    out: Annotated[Path | None, option("Folder for simulation.json and simulation.svg.")] = None,
    plot: Annotated[
        bool,
        option("Draw simulation.svg, with curves over engines, drafters and tails."),
    ] = True,
    as_json: Json = False,
) -> None:
    """Simulate RL steps: without speculation, with the best fixed arm, with TLT. Modelled.

    `tlt simulate calibrate RUN` measures a machine from its runs, for cluster.calibration.
    """
    from tlt.config.load import check, read_toml
    from tlt.errors import ConfigError
    from tlt.simulate.answer import contributions, figures, in_words, speed_ups, validity
    from tlt.simulate.plot import plot_simulation, what_if
    from tlt.simulate.recipe import scenario_tree
    from tlt.simulate.scenario import ScenarioConfig, begins_without_drafter, completed
    from tlt.simulate.scenario import simulate as play

    plot = plot and not as_json and not sweep
    changes = list(overrides or [])
    if scenario is not None and "=" in str(scenario) and not scenario.exists():
        scenario, changes = None, [str(scenario), *changes]
    folder = out or Path("runs/simulation")
    folder.mkdir(parents=True, exist_ok=True)
    if from_run is not None:
        changes = [*_like(from_run, folder, gpus is None), *changes]
    grid = [_values(text) for text in sweep or []]
    results: list[dict[str, Any]] = []
    engine_ends: dict[str, Any] = {}
    below: list[list[str]] = []
    warnings: list[str] = []
    for point in itertools.product(*grid):
        tree = read_toml(scenario, SCENARIO) if scenario is not None else {}
        if scenario is not None and not tree:
            raise ConfigError(f"{scenario} is empty; {SCENARIO}")
        where = "scenario" if scenario is None else str(scenario)
        tree = scenario_tree(tree, [*changes, *point], where, gpus)
        asked = check(ScenarioConfig, tree, where)
        config = completed(asked)
        records = play(config, lambda name, run: engine_ends.__setitem__(name, run.engine_ends))
        found = {name: figures(of) for name, of in records.items()}
        fixed_arm = f"{config.static_drafter}:{config.static_draft_tokens}"
        trust = validity(config)
        below.append(trust.lines())
        warnings += [": ".join(filter(None, (" ".join(point), each))) for each in trust.warnings]
        results.append(
            {
                "point": list(point),
                "fixed_arm": fixed_arm if "static" in config.modes else None,
                "modes": found,
                "speed_up": speed_ups(found),
                "contributions": contributions(found),
                "modelled": True,
                **asdict(trust),
            }
        )
    (folder / "simulation.json").write_text(json.dumps(results, indent=2))
    output = Output(as_json)
    output.result(results)
    columns = (">step s", ">rollout s", ">rollout share", ">idle share", ">end to end", ">rollout")
    output.table("modelled", ("", "|mode", *columns), _rows(results))
    if len(results) == 1:
        which = "the fixed arm" if asked.static_draft_tokens else "the best fixed arm"
        words = f"{which}, {results[0]['fixed_arm']}"
        output.say(in_words(found, words, begins_without_drafter(config)))
    for warning in warnings:
        output.marked("warning", "yellow", warning)
    for line in _below([" ".join(result["point"]) for result in results], below):
        output.say(line, style="dim")
    output.wrote(str(folder / "simulation.json"))
    if plot:
        with output.progress() as show:
            curves = what_if(asked, show)
        picture = folder / "simulation.svg"
        output.wrote(str(plot_simulation(engine_ends, found, curves, below[0], picture)))


def _below(points: list[str], lines: list[list[str]]) -> list[str]:
    """Return what all points of a sweep assume, then what each assumes besides."""
    common = [line for line in lines[0] if all(line in of for of in lines)]
    own = [
        f"{point}: {line}"
        for point, of in zip(points, lines, strict=True)
        for line in of
        if line not in common
    ]
    return [*common, *own]


def _rows(results: list[dict[str, Any]]) -> list[list[str]]:
    from tlt.simulate.answer import LABELS

    return [
        [
            " ".join(result["point"]),
            LABELS.get(name, name),
            f"{of['step_s']:.1f}",
            f"{of['rollout_s']:.1f}",
            f"{of['rollout_share']:.0%}",
            f"{of['idle_share']:.0%}",
            f"{result['speed_up'][name]['end_to_end']:.2f}x",
            f"{result['speed_up'][name]['rollout']:.2f}x",
        ]
        for result in results
        for name, of in result["modes"].items()
    ]


def _like(run: Path, folder: Path, with_engines: bool) -> list[str]:
    """Return settings that make a scenario of a run, with as many engines or without a number."""
    from tlt.report.view import look_at
    from tlt.simulate.calibrate import as_scenario
    from tlt.simulate.calibrate import calibrate as learn

    view = look_at(run)
    learn([view]).save(folder / "calibration.json")
    # A JSON string is also a TOML string, so any folder name works.
    own = {
        "cluster.calibration": json.dumps(str(folder / "calibration.json")),
        "workload.trace": json.dumps(str(run / "lengths.jsonl")),
        **{f"workload.{key}": value for key, value in as_scenario(view).items()},
    }
    if with_engines:
        own["cluster.num_engines"] = int(view.setting("pool.num_engines", 1))
    return [f"{key}={value}" for key, value in own.items()]


def _values(text: str) -> list[str]:
    from tlt.errors import ConfigError

    key, _, values = text.partition("=")
    if not key or not values:
        raise ConfigError(
            f"--sweep {text!r} is not section.key=a,b,c; e.g. cluster.num_engines=8,16"
        )
    return [f"{key}={value}" for value in values.split(",")]
