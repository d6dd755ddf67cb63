"""A run over two nodes with addresses of their own, one of which is cut off and comes back."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

import network
from commands import TAIL, command, records, started, titled, wait_for, wait_for_steps
from speed import limit

STEPS, PROMPTS, GROUP = 14, 4, 4
PORT = 6399
DELAY_S = 0.005
FOLDER = Path(tempfile.gettempdir()) / f"tlt-nodes-{os.getpid()}"
LIMIT_S = limit(240.0)
"""Time limit of an RL step, whatever happens to the other node."""

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.two_cores,
    pytest.mark.skipif(not network.possible(), reason="needs root, `ip` and /dev/net/tun"),
]

RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}
"""Ray gives up a node after about 5 s of silence."""


@contextmanager
def node(hosts: network.TwoHosts, host: int) -> Iterator[None]:
    """Run a Ray node of one core on a host; host 0 is the head."""
    head = network.ADDRESSES[0]
    # A folder of its own: in the default one other programs of this machine would find the cluster.
    where = ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={FOLDER}"]
    options = where if host == 0 else [f"--address={head}:{PORT}"]
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=1"]
    ray += [f"--node-ip-address={network.ADDRESSES[host]}", "--disable-usage-stats", *options]
    process = subprocess.Popen(
        hosts.command(host, ray),
        env=os.environ | RAY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert any("Ray runtime started" in line for line in process.stdout), "no Ray node"
        yield
    finally:
        for each in there(hosts, host):
            each.kill()
        process.wait()
        if host == 0:
            shutil.rmtree(FOLDER, ignore_errors=True)


def there(hosts: network.TwoHosts, host: int, title: str = "") -> list[psutil.Process]:
    """Return the processes of a kind on a host."""
    return [p for p in titled(psutil.process_iter(), title) if hosts.host_of(p.pid) == host]


def test_a_node_that_is_cut_off_and_comes_back(policy: Path) -> None:
    run = policy / "runs" / "nodes"
    settings = (
        f"train {TAIL} run.out={run} policy.model={policy}/models/tiny-sft "
        f"run.num_steps={STEPS} tlt.enabled=true "
        f"sampling.prompts_per_step={PROMPTS} sampling.group_size={GROUP} "
        "sampling.max_tokens=1200 debug.forced_lengths={median=60,p95=500,longest=1200} "
        "pool.health_timeout_s=8 pool.max_restarts=10 checkpoint.every_steps=1 "
        "debug.core_group=test-nodes"
    )
    environment = RAY | {"RAY_ADDRESS": f"{network.ADDRESSES[0]}:{PORT}"}
    with ExitStack() as stack:
        hosts = stack.enter_context(network.TwoHosts(DELAY_S))
        stack.enter_context(node(hosts, 0))
        with node(hosts, 1):
            words, log = hosts.command(0, command(settings)), policy / "nodes.log"
            training = stack.enter_context(started(words, policy, log, **environment))
            wait_for_steps(2, run, training)
            assert there(hosts, 0, "ray::EngineActor")
            assert there(hosts, 1, "ray::EngineActor")
            assert there(hosts, 0, "ray::LearnerActor"), "beside the driver"
            time.sleep(1)  # into the middle of a rollout
            hosts.cut()
            wait_for_steps(len(records(run)) + 2, run, training)
        hosts.mend()
        with node(hosts, 1):
            wait_for(lambda: bool(there(hosts, 1, "ray::EngineActor")), training, "an engine again")
            assert training.wait(3 * LIMIT_S) == 0
    found = records(run)
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    lengths = [json.loads(line) for line in (run / "lengths.jsonl").read_text().splitlines()]
    assert [len(each["tokens"]) for each in lengths] == [PROMPTS * GROUP] * STEPS
    assert sum(record["rollout/engine_restarts"] for record in found) >= 1
    assert max(record["time/step_s"] for record in found) < LIMIT_S
