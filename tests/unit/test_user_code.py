"""A time limit on code that users bring, and the functions that settings name."""

import math
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tlt.errors import ConfigError
from tlt.user_code import chosen_function, time_limit


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nonsense", "one or module:function"),
        (":score", "one or module:function"),
        ("math:", "one or module:function"),
        ("no_such_module_here:score", "cannot import"),
        ("broken_code:score", "cannot import broken_code: ZeroDivisionError"),
        ("math:pi", "it has: "),
    ],
)
def test_unknown_functions_are_refused_with_the_key(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_code.py").write_text("1 / 0")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path)
    known = {"one": math.exp}
    assert chosen_function("a.key", "one", known, "m:f") is math.exp
    assert chosen_function("a.key", "math:sqrt", known, "m:f") is math.sqrt
    with pytest.raises(ConfigError, match=rf"a\.key: .*{message}"):
        chosen_function("a.key", name, known, "m:f")
