"""`tlt demo`: the same short RL run without and with TLT, on an emulated node, in five minutes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from tlt.cli.options import Json, number, option
from tlt.cli.output import Output

if TYPE_CHECKING:
    from tlt.contracts import ShowProgress

STEPS = 12
LIMIT_S = 300.0
"""Seconds that the demo may take."""
OFF_SHARE = 0.48
"""Share of the limit after which the first run must be done."""
REPORT_S = 10.0
"""Seconds reserved for the report, and for a run that ends at its limit."""
MIN_STEPS = 4
"""Fewest RL steps of a run that is ended at its limit."""
END_S = 40.0
"""Seconds that an interrupted run may take to end; more than its own limit."""
SHARED_GIB = 0.5
"""Room in shared memory for hidden states and weights."""
NEEDED = ("torch", "vllm", "ray", "transformers", "reasoning_gym", "pebble")
"""Libraries that the demo uses."""


def demo(
    out: Annotated[Path, option("New folder for model, runs and report.")] = Path("runs/demo"),
    steps: Annotated[
        int | None,
        number(
            f"RL steps of each run; by default {STEPS}, or as many as fit into five minutes.",
            2,
            10_000,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a small model twice, without and with TLT, and show the gain and where it comes from.

    Four real engines share two CPU cores. Their work takes as long as that of a 7B policy on H100s,
    so the gain is what TLT does in that regime, not the speed of this machine. Needs no network,
    and takes at most five minutes.
    """
    from tlt.report.gain import as_data
    from tlt.report.page import as_html
    from tlt.report.view import look_at, same_samples

    _check(out)
    output = Output(as_json)
    started_s, limit_s = time.monotonic(), LIMIT_S if steps is None else math.inf
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the run under way, too
    with output.progress() as show:
        settings = _settings(out, _model(out))
        off = Job("off", settings, out / "off", steps or STEPS)
        done = off.run(output, show, (0.0, OFF_SHARE), started_s + OFF_SHARE * limit_s)
        tlt = Job("tlt", settings, out / "tlt", done, ("tlt.enabled=true",))
        tlt.run(output, show, (OFF_SHARE, 1.0), started_s + limit_s - REPORT_S)
    views = [look_at(job.out) for job in (off, tlt)]
    page = out / "report.html"
    page.write_text(as_html(views, page))
    found = as_data(*views) | {"samples": same_samples(*views)}
    output.result(found | {"seconds": time.monotonic() - started_s, "report": str(page)})
    _show(output, found)
    output.say("The two runs were:")
    for job in (off, tlt):
        output.say(f"  {shlex.join(['tlt', *job.arguments])}")
    output.wrote(f"{page}: open it in a browser")


# --- before the runs ------------------------------------------------------------------------------


def _check(out: Path) -> None:
    """Refuse what would fail minutes later, in the words of this command."""
    from tlt.errors import ConfigError

    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"tlt demo needs {', '.join(missing)}, not installed here; run: pip install "
            "'tlt-rl[cpu,train]'"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        what = "holds an earlier demo" if (out / "demo.toml").exists() else "is not empty"
        raise ConfigError(
            f"--out {out} {what}; remove it, or name a new folder, e.g. --out {out}-2"
        )
    if len(os.sched_getaffinity(0)) < 2:
        raise ConfigError(
            "tlt demo needs two CPU cores, and this process has one; allow it more, e.g. docker "
            "run --cpus=2 or taskset -c 0,1"
        )
    shared = Path("/dev/shm")
    free_gib = shutil.disk_usage(shared).free / 2**30 if shared.exists() else 0.0
    if free_gib < SHARED_GIB:
        raise ConfigError(
            f"tlt demo needs {SHARED_GIB:g} GiB in /dev/shm, which has {free_gib:.2f} free; give "
            "the container more, e.g. docker run --shm-size=2g"
        )


def _model(out: Path) -> Path:
    """Write the small policy for word problems."""
    from tlt.models import words

    return words.make(out / "model")


def _settings(out: Path, model: Path) -> Path:
    """Write the settings of the runs, with the folders of this demo."""
    text = files("tlt.cli").joinpath("demo.toml").read_text()
    for named, path in (("runs/demo/off", out / "off"), ("runs/demo/model", model)):
        # A JSON string is also a TOML string, so any folder name works.
        text = text.replace(json.dumps(named), json.dumps(str(path)))
    path = out / "demo.toml"
    path.write_text(text)
    return path


# --- the runs -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Job:
    """One `tlt train` in its own process."""

    name: str
    settings: Path
    out: Path
    num_steps: int
    changes: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        folder = f"run.out={json.dumps(str(self.out))}"
        steps = f"run.num_steps={self.num_steps}"
        return ["train", str(self.settings), folder, steps, *self.changes]

    def run(
        self, output: Output, show: ShowProgress, shares: tuple[float, float], deadline_s: float
    ) -> int:
        """Train until all RL steps are done or the time is over; return how many were done."""
        from tlt.observe.live import read_live
        from tlt.observe.record import read_metrics

        log = self.out.with_suffix(".log")
        begin, end = shares
        begun_s = time.monotonic()
        ended_early = False
        show(f"{self.name}: starting engines and learner", begin, 1)
        with _process([sys.executable, "-m", "tlt", *self.arguments], log) as process:
            while process.poll() is None:
                time.sleep(0.5)
                if (now := read_live(self.out / "live.json")) is None:
                    continue
                done = int(now.record.get("step", 0))
                show(f"{self.name}: {now.what}", begin + (end - begin) * done / self.num_steps, 1)
                if not ended_early and time.monotonic() > deadline_s and done >= MIN_STEPS:
                    ended_early = True
                    process.terminate()
            code = process.returncode
        metrics = self.out / "metrics.jsonl"
        done = len(read_metrics(metrics)) if metrics.exists() else 0
        if (code and not ended_early) or done < 1:
            _fail(self.name, code, log)
        seconds = time.monotonic() - begun_s
        early = ", as many as fit into five minutes" if ended_early else ""
        output.note(f"{self.name}: {done} RL steps in {seconds:.0f} s{early}")
        return done


@contextlib.contextmanager
def _process(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that writes to a log; end it if this one leaves early.

    It has its own session: Ctrl-C reaches only this process, which then asks it to end, once.
    """
    quiet = os.environ | {"HF_HUB_OFFLINE": "1"}  # the runs download nothing
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env=quiet
        ) as child,
    ):
        try:
            yield child
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(END_S)
                except subprocess.TimeoutExpired:
                    child.kill()


def _fail(name: str, code: int, log: Path) -> NoReturn:
    """Fail with the last message of the run."""
    from tlt.errors import EngineError

    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = next((line for line in lines if line.startswith("error: ")), (lines or [""])[-1])
    raise EngineError(
        f"the run {name!r} of the demo ended with exit code {code}: "
        f"{said.removeprefix('error: ')[:500]}; `tlt doctor` says what is wrong with this machine, "
        f"and {log} has the whole output"
    )


# --- the result -----------------------------------------------------------------------------------


def _show(output: Output, found: dict[str, Any]) -> None:
    from tlt.report.gain import LABELS, Ratio

    if found["emulated"]:
        output.say(
            f"{found['emulated'][0].upper()}{found['emulated'][1:]}. Real: engines, scheduling, "
            "speculation, drafter training, samples. Emulated: the time of each piece of work."
        )
    output.say(found["verdict"], style="bold")
    if "rollout" in found["gain"]:
        rollout = f"The rollout alone: {Ratio(**found['gain']['rollout'])}."
        output.say(f"{rollout} {found['drift']}".rstrip())
    columns = (">engine seconds", ">tokens", ">tokens per draft", ">share of tokens saved")
    rows = []
    for name, of in found["drafts"].items():
        drafts = [f"{of['acceptance_length']:.2f}", f"{of['saved_share']:.0%}"]
        cells = [LABELS[name], f"{of['seconds']:.1f}", f"{of['tokens']:,.0f}"]
        rows.append([*cells, *(["-", "-"] if name == "off" else drafts)])
    output.table("where the gain comes from: the run with TLT, by drafter", ("", *columns), rows)
    if idle := found["leases"]:
        output.say(
            f"Harvest: idle workers trained the drafter for {idle['training_s']:.0f} of "
            f"{idle['training_s'] + idle['idle_s']:.0f} idle seconds; better drafters published: "
            f"{idle['published']:.0f}."
        )
    same, compared = found["samples"]["same"], found["samples"]["compared"]
    if compared:
        output.say(f"Samples: {same} of {compared} are the same text in both runs.")
