"""The ports on which a process and its descendants listen, and who reaches them."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

import psutil


def listening(pid: int) -> set[tuple[str, int]]:
    """Return the addresses and TCP ports on which a process and its descendants listen."""
    root = psutil.Process(pid)
    found = set()
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip, connection.laddr.port))
    return found


def beyond_loopback(found: set[tuple[str, int]]) -> set[tuple[str, int]]:
    """Return those of the addresses that are not on the loopback interface."""
    return {(ip, port) for ip, port in found if not _is_loopback(ip)}


def _is_loopback(ip: str) -> bool:
    """Return whether an address is loopback, also as one of IPv6 (::ffff:127.0.0.1)."""
    address = ipaddress.ip_address(ip)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def reached_from_outside(ports: set[int]) -> set[tuple[str, int]]:
    """Return the ports that answer on one of this machine's network addresses."""
    addresses = {
        address.address
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family == socket.AF_INET
        and not ipaddress.ip_address(address.address).is_loopback
    }
    found = set()
    for address in addresses:
        for port in ports:
            with socket.socket() as probe:
                probe.settimeout(2)
                if probe.connect_ex((address, port)) == 0:
                    found.add((address, port))
    return found
