"""Admit only processes that know the key; count refused connections, and log them with their addresses.

ZeroMQ does the cryptography (CURVE), and asks this module whether to admit a client's public key (ZAP). A process with
a different job's key fails earlier, in the handshake, which `connection_guard` observes.
"""

from __future__ import annotations

import itertools
import socket
import sys
from collections import OrderedDict
from collections.abc import Callable

import zmq
from zmq.utils import z85

_MAX_REMEMBERED = 1024
_PAUSE_S = 10.0  # the minimum interval between two identical lines
_MAX_LINES = 20  # the maximum number of lines per interval
_MAX_GUESSES = 4
_MAX_SCANNED = 4096  # connections per table: a flood leaves tens of thousands in the kernel's tables
_ENDED = (4, 5, 6, 8, 9, 11)  # FIN_WAIT1, FIN_WAIT2, TIME_WAIT, CLOSE_WAIT, LAST_ACK, CLOSING


class RateLimitedLog:
    """A `RateLimitedLog` logs members' errors and refused connections, with a limit on the lines per interval."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        # for each line: when it was last printed, and how often it was reported since
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._window, self._num_lines = 0.0, 0
        self.num_refused = 0

    def report_refusal(self, peer: str, why: str, now: float) -> None:
        """Record that a connection from `peer` was refused."""
        self.num_refused += 1
        self.report(f"refused a connection from {peer}: {why}", now)

    def report(self, line: str, now: float) -> None:
        """Log `line`, at most once per interval; its next occurrence says how many were suppressed."""
        written_at, since = self._seen.pop(line, (-_PAUSE_S, 0))
        if now - self._window >= _PAUSE_S:
            self._window, self._num_lines = now, 0
        if now - written_at >= _PAUSE_S and self._num_lines < _MAX_LINES:
            self._num_lines += 1
            self._write(line + (f" ({since} more since the last such line)" if since else ""))
            written_at, since = now, 0
        else:
            since += 1
        self._seen[line] = written_at, since
        if len(self._seen) > _MAX_REMEMBERED:
            self._seen.popitem(last=False)


class Admission:
    """`Admission` answers the ZAP requests of one ZeroMQ context: it admits only clients with `member_key`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], member_key: bytes, log: RateLimitedLog) -> None:
        self._member_key = z85.decode(member_key)
        self._log = log
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self, now: float) -> None:
        while True:
            try:
                version, request, _, peer, _, mechanism, *credentials = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            fine = mechanism == b"CURVE" and credentials == [self._member_key]
            if not fine:
                self._log.report_refusal(peer.decode(errors="replace"), "it does not know the job's key", now)
            status = (b"200", b"OK") if fine else (b"400", b"another key")
            self.socket.send_multipart((version, request, *status, b"", b""))

    def close(self) -> None:
        """Close the socket; no process is admitted afterwards."""
        self.socket.close()


def recent_peers(port: int) -> str:
    """Return up to four addresses whose connections to our `port` have just ended, from the kernel's TCP tables."""
    found: dict[str, None] = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            with open(f"/proc/self/net/{table}") as file:
                lines = list(itertools.islice(file, 1, 1 + _MAX_SCANNED))
        except OSError:  # not Linux
            continue
        for local, remote, state in (line.split()[1:4] for line in lines):
            if int(local.rpartition(":")[2], 16) == port and int(state, 16) in _ENDED:
                words = bytes.fromhex(remote.partition(":")[0])
                raw = b"".join(
                    words[at : at + 4][:: -1 if sys.byteorder == "little" else 1] for at in range(0, len(words), 4)
                )
                found[socket.inet_ntop(family, raw).removeprefix("::ffff:")] = None
    return " or ".join(list(found)[:_MAX_GUESSES])
