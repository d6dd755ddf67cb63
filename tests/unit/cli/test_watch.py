"""What `tlt watch` shows of a run in progress, from its files alone."""

import json
import time
from pathlib import Path
from typing import Any

import called
import pytest
from made_up import made_up_folder

from tlt.cli import watch
from tlt.spans import STATES

ARMS = (
    *(("off", 2.0, 16, 600, 0), ("off", 2.0, 8, 300, 0), ("off", 1.0, 4, 120, 0)),
    *(("ngram:3", 1.0, 4, 300, 150), ("eagle3:4", 2.0, 2, 400, 250), ("off", 1.0, 2, 60, 0)),
    *(("eagle3:4", 1.0, 1, 200, 120), ("off", 1.0, 1, 40, 0)),
)


def tlt(*arguments: str) -> str:
    code, output, errors = called.tlt(*arguments)
    assert not code, errors
    return output


def live(folder: Path, **changes: Any) -> None:
    record = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    now = {
        **{"at_s": time.time(), "num_steps": 9, "what": "step 5: generating", "done": 12.0},
        **{"total": 16.0, "since_s": time.time() - 6, "remaining_s": 4.0, "record": record},
        "workers": {
            "engine-0": {"state": "generating", "running": 4},
            "engine-1": {"state": "training", "running": 0},
        },
    }
    (folder / "live.json").write_text(json.dumps(now | changes))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "250")
    made = made_up_folder(
        tmp_path / "run",
        arms=ARMS,
        config={"tlt": {"enabled": True}},
        steps=5,
        harvest__used_s=3.0,
        harvest__idle_s=4.5,
        harvest__published=1,
        harvest__held_out_length=1.85,
        time__reward_wait_s=5.0,
    )
    live(made)
    return made


def test_states_have_colours() -> None:
    assert {*watch.COLOURS} <= {*STATES}
    assert len({*watch.COLOURS.values()}) == len(watch.COLOURS)
    assert "tools" in watch.COLOURS


def test_everything_that_the_files_say_is_shown(folder: Path) -> None:
    shown = " ".join(tlt("watch", str(folder), "--once").split())
    # 4 s of the tail, then waiting for rewards, update, sync and the rest
    for text in (
        "step 5 of 9: generating 12 of 16",
        "about 4 s to the end of the tail 13 s to the end of the RL step",
        "engine-0 generating 4 off 1.00",
        "engine-1 training 0 off 1.00",
        "leases: 1 of 2 workers train the drafter, 3.0 of 4.5 idle seconds used",
        "1 published, held-out acceptance length 1.85",
        "x as fast as without drafts (modelled:",
        "->",
    ):
        assert text in shown


def test_the_same_as_json(folder: Path) -> None:
    found = json.loads(tlt("watch", str(folder), "--json"))
    assert found["now"]["workers"]["engine-1"]["state"] == "training"
    assert found["step_remaining_s"] == pytest.approx(4.0 + 5.0 + 3.0 + 0.5 + 0.1)
    assert found["leased"] == 1
    assert found["gain"]["modelled"] > 1.05
    assert found["findings"][0]["kind"] == "reward_bound"
    report = json.loads(tlt("report", str(folder), "--json"))["runs"][0]
    assert found["findings"][0] == report["findings"][0]


def test_a_run_that_is_over_is_still_json(folder: Path) -> None:
    (folder / "live.json").unlink()
    found = json.loads(tlt("watch", str(folder), "--json"))
    assert found["now"] is None
    assert found["step_remaining_s"] is None
    shown = " ".join(tlt("watch", str(folder), "--once").split())
    assert "no step is under way" in shown
    assert found["findings"][0]["says"] in shown


@pytest.mark.parametrize(
    ("what", "left_s"),
    [
        ("step 5: updating the policy", pytest.approx(6.6, abs=0.5)),
        ("step eval-4: generating", None),
    ],
)
def test_the_update_counts_down_and_an_evaluation_has_no_step_to_end(
    folder: Path, what: str, left_s: Any
) -> None:
    live(folder, what=what, remaining_s=None, since_s=time.time() - 2)
    assert json.loads(tlt("watch", str(folder), "--json"))["step_remaining_s"] == left_s


def test_a_damaged_file_costs_only_what_it_says(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("r+") as file:
        file.write("{{{")
    shown = tlt("watch", str(folder), "--once")
    assert "engine-0" in shown
    assert "no findings: " in shown
    assert "metrics.jsonl, line 1" in shown


def test_files_are_read_again_only_after_a_step(folder: Path) -> None:
    first = watch.read_past(folder)
    assert watch.read_past(folder) is first
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n")
    assert watch.read_past(folder) is not first
