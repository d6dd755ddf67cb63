"""Two hosts on one machine: network namespaces, joined by a link that delays and can be cut.

The link is a process that carries packets between a TUN device of each namespace, with a delay. A
cut link drops packets silently, as a pulled cable does. Needs root and `ip`.

    python network.py DELAY_S DEVICE DEVICE   # DEVICE: an inherited file descriptor
"""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PACKET_BYTES = 65000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


def possible() -> bool:
    """Return whether this machine allows new namespaces and devices."""
    return bool(shutil.which("ip")) and os.geteuid() == 0 and os.access("/dev/net/tun", os.W_OK)


class TwoHosts:
    """Hosts 0 and 1, each with its own address and its own commands."""

    def __init__(self, delay_s: float) -> None:
        self._names = [f"tlt-{os.getpid()}-{host}" for host in range(2)]
        self._delay_s = delay_s
        self._link: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> TwoHosts:
        devices: list[int] = []
        for name, address in zip(self._names, ADDRESSES, strict=True):
            device = f"tun{len(devices)}-{os.getpid()}"[:15]
            devices.append(_open_device(device))
            for command in (
                f"netns add {name}",
                f"link set {device} netns {name}",
                f"-n {name} address add {address}/24 dev {device}",
                f"-n {name} link set {device} mtu {PACKET_BYTES} up",
                f"-n {name} link set lo up",
                # Leads nowhere, but programs find their own address through it.
                f"-n {name} route add default dev {device}",
            ):
                subprocess.run(["ip", *command.split()], check=True)
        self._link = subprocess.Popen(
            [sys.executable, __file__, str(self._delay_s), *map(str, devices)],
            stdin=subprocess.PIPE,
            pass_fds=devices,
        )
        for device_fd in devices:
            os.close(device_fd)
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._link is not None
        self._link.kill()
        self._link.wait()
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], check=False)

    def cut(self) -> None:
        self._tell(b"x")

    def mend(self) -> None:
        self._tell(b"o")

    def _tell(self, what: bytes) -> None:
        assert self._link is not None
        assert self._link.stdin is not None
        self._link.stdin.write(what)
        self._link.stdin.flush()

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on a host."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def host_of(self, pid: int) -> int | None:
        """Return the host of a process; None if it is on neither host, or gone."""
        try:
            own = Path(f"/proc/{pid}/ns/net").stat().st_ino
        except OSError:
            return None
        for host, name in enumerate(self._names):
            if Path(f"/run/netns/{name}").stat().st_ino == own:
                return host
        return None


def _open_device(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def carry(delay_s: float, devices: Sequence[int]) -> None:
    """Carry packets between two devices until stdin ends; `x` on stdin cuts, `o` mends."""
    waiting: deque[tuple[float, int, bytes]] = deque()
    is_cut = False
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable: list[Any] = select.select([*devices, 0], [], [], timeout)[0]
        if 0 in readable:
            if not (told := os.read(0, 1)):
                return
            is_cut = told == b"x"
            waiting.clear()
        for device in readable:
            if device == 0:
                continue
            packet = os.read(device, PACKET_BYTES + 64)
            if not is_cut:
                other = devices[1 - devices.index(device)]
                waiting.append((time.monotonic() + delay_s, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, device, packet = waiting.popleft()
            os.write(device, packet)


if __name__ == "__main__":
    carry(float(sys.argv[1]), [int(device) for device in sys.argv[2:]])
