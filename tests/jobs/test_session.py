"""The Ray of a command on a machine that is busy."""

import subprocess
import sys
from typing import Any

import psutil
import pytest
import ray

from jobs.session import start_ray

LATE = "The current node timed out during startup. This could happen because some of the raylet failed to startup."


def test_a_ray_that_was_too_slow_to_start_is_ended_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    def init(**options: Any) -> None:
        begun.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        if len(begun) < 3:
            raise Exception(LATE)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    before = psutil.Process().children()
    start_ray(num_cpus=1)
    try:
        assert len(begun) == 3
        assert [one.wait(10) for one in begun[:2]] == [-9, -9] and begun[2].poll() is None
        assert set(before) <= set(psutil.Process().children())
    finally:
        begun[2].kill()


@pytest.mark.parametrize(("message", "tries"), [(LATE, 4), ("no space left", 1)])
def test_what_does_not_end_is_raised(monkeypatch: pytest.MonkeyPatch, message: str, tries: int) -> None:
    begun: list[str] = []

    def init(**options: Any) -> None:
        begun.append(message)
        raise Exception(message)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(Exception, match=message[:20]):
        start_ray()
    assert len(begun) == tries
