"""Workers of Ray whose driver is killed end, also those that are stopped and cannot notice."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from speed import limit

pytestmark = [pytest.mark.ray, pytest.mark.gate]

DRIVER = """
import json, os, sys
import ray
from tlt.node.cluster import end_with_ray, start_ray

start_ray(1)

class Worker:
    def __init__(self):
        end_with_ray()

    def pid(self):
        return os.getpid()

workers = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(2)]
print(json.dumps([ray.get(worker.pid.remote()) for worker in workers]), flush=True)
for _ in sys.stdin:
    print(json.dumps([ray.get(worker.pid.remote()) for worker in workers]), flush=True)
"""


def test_a_stopped_worker_ends_with_its_driver() -> None:
    """Otherwise it would hold its cores, and the resumed run would find none."""
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        pids = json.loads(driver.stdout.readline())
        time.sleep(2)
        print("again", file=driver.stdin, flush=True)
        assert json.loads(driver.stdout.readline()) == pids, "they live as long as Ray does"
        workers = [psutil.Process(pid) for pid in pids]
        os.kill(pids[0], signal.SIGSTOP)
        driver.kill()
    try:
        _, alive = psutil.wait_procs(workers, timeout=limit(20))
        assert not alive
    finally:
        for worker in workers:
            if worker.is_running():
                worker.kill()
