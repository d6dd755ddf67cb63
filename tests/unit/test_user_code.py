"""A time limit on code that users bring."""

import signal
import threading
import time

import pytest

from tlt.errors import ConfigError
from tlt.user_code import time_limit


def forever() -> None:
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            continue


def twice_forever() -> None:
    try:
        forever()
    except BaseException:
        forever()


def test_what_takes_too_long_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match="too slow; do less"),
        time_limit(0.05, "too slow; do less"),
    ):
        forever()


def test_what_catches_the_end_is_ended_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlt.user_code.AGAIN_S", 0.05)
    with pytest.raises(ConfigError, match="too slow"), time_limit(0.05, "too slow"):
        twice_forever()


def test_an_error_of_the_code_is_its_own() -> None:
    with pytest.raises(KeyError), time_limit(5.0, "too slow"):
        raise KeyError("x")


def test_the_timer_of_another_goes_on() -> None:
    fired: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda number, frame: fired.append(number))
    before = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with time_limit(5.0, "too slow"):
            pass
        assert 0.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2
        time.sleep(0.3)
        assert fired
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *before)


def test_in_another_thread_there_is_no_limit() -> None:
    def work() -> None:
        with time_limit(0.01, "too slow"):
            time.sleep(0.05)
        ended.append(True)

    ended: list[bool] = []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended
