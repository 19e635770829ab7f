"""Simulate several hosts on one machine: network namespaces joined by a switch, each with its own address.

    plx-17-0-0 ──eth0── 10.77.0.1 ┐
    plx-17-0-1 ──eth0── 10.77.0.2 ┼── bridge in plx-17-0-switch
    plx-17-0-2 ──eth0── 10.77.0.3 ┘

Processes of different namespaces can reach each other only through these interfaces, whose counters and rates are real.
The hosts share one kernel, and so memory, process ids and the machine's name. A command run on a host (`Host.command`)
sees that host's own CLOCK_MONOTONIC, which counts from the host's start.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.errors import PhalanxError

_CLONE_NEWNET = 0x40000000
# TCP passes at most this many bytes to an interface at once, including the headers that the bucket counts.
_LONGEST_PACKET = 65536 + 256
_NETWORKS = itertools.count()  # of this process: two may exist at the same time
_UP_LONGER_S = 100_000  # each host has been up for this much longer than the previous one


@dataclass(frozen=True)
class Host:
    """A `Host` is one namespace. The other hosts reach it at `address`.

    `up_s` is the number of seconds by which the host's CLOCK_MONOTONIC is ahead of the machine's. `switch` and `port`
    are the namespace and the interface at the other end of its cable. `bucket`, in tc's notation, limits the rate at
    which the host sends and, with `both_ways`, receives.
    """

    name: str
    address: str
    switch: str
    port: str
    up_s: int = 0
    bucket: tuple[str, ...] = ()
    both_ways: bool = False

    def enter(self) -> None:
        """Move the calling thread, and its future children, to this host permanently.

        Raises:
            OSError: the call is not permitted, or the host no longer exists.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}", "rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter host {self.name}")

    def signal(self, signum: int) -> None:
        """Send a signal to every process on this host."""
        network = f"net:[{os.stat(f'/run/netns/{self.name}').st_ino}]"
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # the process has ended
                if os.readlink(f"/proc/{entry}/ns/net") == network:
                    os.kill(int(entry), signum)

    def bytes_sent(self) -> int:
        """Return the number of bytes that this host has sent since its creation, including all headers."""
        link = json.loads(_ip("-n", self.name, "-s", "-j", "link", "show", "dev", "eth0"))[0]
        return int(link["stats64"]["tx"]["bytes"])

    def cut_off(self, only: Literal["sent", "received", ""] = "") -> None:
        """Pull the cable: from now on no packet arrives or leaves, and no process is notified.

        With `only`, drop only the packets that the host sends ("sent") or would receive ("received").
        """
        if only:
            self._queue(only, "blackhole")
        else:
            _ip("-n", self.name, "link", "set", "eth0", "down")

    def plug_in(self) -> None:
        """Put the cable back after `cut_off`."""
        _ip("-n", self.name, "link", "set", "eth0", "up")
        self._queue("sent", *self.bucket)
        self._queue("received", *(self.bucket if self.both_ways else ()))

    def _queue(self, way: str, *words: str) -> None:
        """Set the qdisc for packets that the host has "sent" or "received" to tc's `words`; by default, to none."""
        device = ["-n", self.name, "qdisc", "replace", "dev", "eth0"]
        if way == "received":
            device = ["-n", self.switch, "qdisc", "replace", "dev", self.port]
        _run(["tc", *device, "root", *(words or ("noqueue",))])

    @property
    def command(self) -> tuple[str, ...]:
        """Return the words that, put before a command, run it on this host, with this host's clock if possible."""
        words = ("ip", "netns", "exec", self.name)
        return (*words, "unshare", "--time", "--monotonic", str(self.up_s)) if self.up_s and _has_clocks() else words


@functools.cache
def _has_clocks() -> bool:
    """Return whether programs can be run with another CLOCK_MONOTONIC."""
    probe = ["unshare", "--time", "--monotonic", "1", "true"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@functools.cache
def why_no_hosts() -> str:
    """Return why `hosts` cannot work here, or "" if it can; for `pytest.mark.skipif`."""
    if shutil.which("ip") is None:
        return "the command ip (iproute2) is not there"
    probe = f"plx-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        try:
            _ip("-n", probe, "link", "add", "name", "one", "type", "veth", "peer", "name", "other")
        finally:
            _ip("netns", "del", probe)
    except PhalanxError as error:
        return f"network namespaces are not permitted: {str(error).replace(probe, 'NAME')}"
    return ""


def enter_own_network() -> None:
    """Move the calling thread, and its future children, to a new host that has only a loopback interface.

    Two programs that do so can use the same ports without reaching each other by accident.

    Raises:
        OSError: the call is not permitted.
        PhalanxError: the command ip (iproute2) is missing, or failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    _ip("link", "set", "lo", "up")


@contextlib.contextmanager
def hosts(
    count: int,
    *,
    rate: str | None = None,
    burst_bytes: int = 256 * 2**10,
    both_ways: bool = False,
    ipv6: bool = False,
    mtu: int | None = None,
    dead_end: bool = False,
    one_clock: bool = False,
    network: str = "10.77.0",
) -> Iterator[list[Host]]:
    """Yield `count` hosts joined by a switch; they are always removed at the end.

    Arguments:
        rate: limits the rate at which each host sends, in tc's notation ("1gbit"), by a token bucket.
        burst_bytes: the size of the bucket, and so of the burst that passes at once after a pause.
        network: the first three numbers of the hosts' IPv4 addresses.
        both_ways: limit receiving, too, as the port of a real switch does.
        ipv6: the hosts have IPv6 addresses, and no others.
        mtu: the size of the largest packet in bytes. Default: 1500. IPv6 needs at least 1280.
        one_clock: all hosts have the machine's CLOCK_MONOTONIC, so that their times can be compared.
        dead_end: each host has a second, unconnected interface with a default route; all of these share a subnet.

    Raises:
        PhalanxError: namespaces are not permitted, or ip or tc is missing (see `why_no_hosts`).
        ValueError: `count` is not in 1..250.
    """
    if not 1 <= count <= 250:
        raise ValueError(f"hosts: count must be in 1..250, got {count}")
    prefix = f"plx-{os.getpid()}-{next(_NETWORKS)}"
    switch = f"{prefix}-switch"
    bucket = () if rate is None else ("tbf", "rate", rate, "burst", f"{burst_bytes}b", "latency", "50ms")
    made: list[Host] = []
    with contextlib.ExitStack() as stack:
        _add(switch, stack)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number in range(count):
            address = f"fd77::{number + 1}" if ipv6 else f"{network}.{number + 1}"
            port, up_s = f"port{number}", 0 if one_clock else number * _UP_LONGER_S
            host = Host(f"{prefix}-{number}", address, switch, port, up_s, bucket, both_ways)
            _add(host.name, stack)
            _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
            # "nodad": use an IPv6 address at once, without detecting duplicates
            bits = ["64", "nodad"] if ipv6 else ["24"]
            _ip("-n", host.name, "address", "add", f"{host.address}/{bits[0]}", "dev", "eth0", *bits[1:])
            if mtu is not None:
                _ip("-n", switch, "link", "set", port, "mtu", str(mtu))
                _ip("-n", host.name, "link", "set", "eth0", "mtu", str(mtu))
            _ip("-n", host.name, "link", "set", "eth0", "up")
            if dead_end:
                _ip("-n", host.name, "link", "add", "ant0", "type", "veth", "peer", "name", "ant1")
                _ip("-n", host.name, "address", "add", f"192.168.77.{number + 1}/24", "dev", "ant0")
                _ip("-n", host.name, "link", "set", "ant0", "up")
                _ip("-n", host.name, "link", "set", "ant1", "up")
                _ip("-n", host.name, "route", "add", "default", "dev", "ant0")
            if rate is not None:
                if burst_bytes < _LONGEST_PACKET:  # otherwise the bucket would split each packet, at the cost of a core
                    _ip("-n", host.name, "link", "set", "eth0", "gso_max_size", str(burst_bytes * 3 // 4))
                host.plug_in()
            made.append(host)
        yield made


def _add(name: str, stack: contextlib.ExitStack) -> None:
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "del", name)


def _ip(*words: str) -> str:
    return _run(["ip", *words])


def _run(words: Sequence[str]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PhalanxError(f"hosts: the command {words[0]} (iproute2) is not there") from None
    if done.returncode != 0:
        raise PhalanxError(f"hosts: {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
