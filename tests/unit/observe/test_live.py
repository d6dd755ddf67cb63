"""The live view, without engines."""

import asyncio
from pathlib import Path

import pytest

from tlt.observe.live import Activity, Live, read_live


class FakeRun:
    """Three workers: one generates, one trains or is idle, one is lost."""

    def __init__(self) -> None:
        self.running: dict[str, int | None] = {"engine-0": 3, "engine-1": 0, "engine-2": None}
        self.training = ["engine-1"]

    def loads(self) -> dict[str, int | None]:
        return self.running

    def leased(self) -> list[str]:
        return self.training


class FakeForecast:
    def __init__(self) -> None:
        self.told: list[str] = []
        self.seconds = 7.0

    def started(self, num_samples: int, now_s: float) -> None:
        self.told.append(f"started {num_samples}")

    def grew(self, num_samples: int) -> None:
        self.told.append(f"grew {num_samples}")

    def finished(self, num_samples: int, now_s: float) -> None:
        self.told.append("finished")

    def ended(self) -> None:
        self.told.append("ended")

    def remaining_s(self, now_s: float) -> float:
        return self.seconds


@pytest.fixture
def run() -> FakeRun:
    return FakeRun()


@pytest.fixture
def forecast() -> FakeForecast:
    return FakeForecast()


@pytest.fixture
def live(tmp_path: Path, run: FakeRun, forecast: FakeForecast) -> Live:
    return Live(tmp_path / "live.json", 9, run, run, forecast, lambda *_: None)


def states(live: Live) -> dict[str, str]:
    return {name: of["state"] for name, of in live.now()["workers"].items()}


def test_the_state_of_a_worker_follows_from_what_the_run_is_doing(live: Live, run: FakeRun) -> None:
    run.running["engine-0"] = 0
    assert live.now()["what"] == "starting"
    assert states(live) == {"engine-0": "waiting", "engine-1": "waiting", "engine-2": "lost"}
    run.running["engine-0"] = 3
    live.doing(Activity.GENERATING, 0, 8, "eval-0")
    assert states(live) == {"engine-0": "generating", "engine-1": "training", "engine-2": "lost"}
    run.training.clear()
    assert states(live)["engine-1"] == "idle"
    run.running["engine-0"] = 0
    live.doing(Activity.UPDATING, 0, 1, 3)
    assert states(live) == {"engine-0": "updating", "engine-1": "updating", "engine-2": "lost"}
    live.doing(Activity.RESTARTING_LEARNER, 0, 1)
    assert states(live)["engine-0"] == "waiting"


async def test_what_is_shown_and_written(
    tmp_path: Path, run: FakeRun, forecast: FakeForecast
) -> None:
    shown: list[tuple[str, float, float]] = []
    live = Live(tmp_path / "live.json", 9, run, run, forecast, lambda *s: shown.append(s))
    live.doing(Activity.GENERATING, 2, 8, 3)
    live.record = {"step": 2, "reward/mean": 0.5}
    now = live.now()
    assert (now["what"], now["done"], now["total"]) == ("step 3: generating", 2, 8)
    assert (now["num_steps"], now["remaining_s"]) == (9, 7.0)
    assert now["record"] == {"step": 2, "reward/mean": 0.5}
    assert now["workers"]["engine-0"] == {"state": "generating", "running": 3}
    assert now["workers"]["engine-2"] == {"state": "lost", "running": 0}
    async with live:
        while (written := read_live(tmp_path / "live.json")) is None:
            await asyncio.sleep(0.01)
    assert written.model_dump().keys() == now.keys()
    assert read_live(tmp_path / "live.json") is None
    live.doing(Activity.UPDATING, 0, 1, 3)
    live.doing(Activity.RESTARTING_LEARNER, 0, 1)
    assert [what for what, _, _ in shown] == [
        *("step 3: generating", "step 3: updating the policy", "starting the learner again")
    ]


def test_only_a_rollout_has_a_forecast(live: Live, forecast: FakeForecast) -> None:
    assert live.now()["remaining_s"] is None
    for done in range(3):
        live.doing(Activity.GENERATING, done, 2, 1)
    assert forecast.told == ["ended", "started 2", "finished", "finished"]
    forecast.seconds = float("inf")
    assert live.now()["remaining_s"] is None
    live.doing(Activity.UPDATING, 0, 1, 1)
    live.doing(Activity.UPDATING, 1, 1, 1)
    assert forecast.told[4:] == ["ended"]
    forecast.seconds = 7.0
    assert live.now()["remaining_s"] is None
    live.doing(Activity.GENERATING, 0, 5, 2)
    assert forecast.told[5:] == ["ended", "started 5"]


async def test_a_folder_that_is_gone_costs_only_the_view(
    run: FakeRun, forecast: FakeForecast, caplog: pytest.LogCaptureFixture
) -> None:
    live = Live(Path("/proc/none/live.json"), 9, run, run, forecast, lambda *_: None)
    async with live:
        await asyncio.sleep(0.05)
    assert "no live view" in caplog.text


def test_the_forecast_hears_that_a_rollout_grows(live: Live, forecast: FakeForecast) -> None:
    live.doing(Activity.GENERATING, 0, 8, 3)
    live.doing(Activity.GENERATING, 1, 12, 3)
    assert forecast.told[1:] == ["started 8", "grew 4", "finished"]


def test_an_idle_engine_whose_samples_wait_for_tools_shows_it(
    tmp_path: Path, run: FakeRun, forecast: FakeForecast
) -> None:
    live = Live(
        *(tmp_path / "live.json", 9, run, run, forecast, lambda *_: None),
        at_tools={"engine-0", "engine-1"}.__contains__,
    )
    live.doing(Activity.GENERATING, 1, 4, 3)
    run.training.clear()
    assert states(live) == {"engine-0": "generating", "engine-1": "tools", "engine-2": "lost"}
