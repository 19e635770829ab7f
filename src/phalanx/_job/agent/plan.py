"""A `JobPlan` is a job ready to be started: settings and the values that the host derived from them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from phalanx._job.agent.environment import JobEnvironment, Place
from phalanx._job.agent.placement import Pinning
from phalanx._job.agent.settings import Settings
from phalanx.errors import LaunchError


@dataclass(frozen=True)
class JobPlan:
    """A `JobPlan` is everything that was decided before the first process is started.

    `run` is unique to the job, and its first host makes it; `run_id` may come from the user, and then be that of an
    earlier run. The job began at `begun`, on this host's monotonic clock.
    """

    settings: Settings
    num_ranks: int
    placement: Pinning
    terminal: bool
    environ: dict[str, str]
    run_id: str
    master_addr: str = ""  # with several hosts, the address that was found
    master_port: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)  # what the ranks of this host inherit
    rank_variables: Mapping[str, str] = field(default_factory=dict)  # what the launcher sets besides for all of them
    run: str = ""
    verdict: str = ""  # the file for how the job ended, if a program reads it and not a user
    begun: float = field(default_factory=time.monotonic)

    def describe_job(self, place: Place, restart_count: int, store: str, agent: str) -> JobEnvironment:
        """Return the common environment of an attempt's ranks; choose a free port unless one was set."""
        settings = self.settings
        columns = None
        if self.terminal:
            prefix = len(f"[{place.world_size - 1}] ") + 1
            columns = max(20, os.get_terminal_size(1).columns - prefix)
        return JobEnvironment(
            place=place,
            master_addr=self.master_addr or settings.master_addr,
            master_port=self.master_port or settings.master_port or find_free_port(),
            run_id=self.run_id,
            restart_count=restart_count,
            max_restarts=settings.max_restarts or 0,
            role=settings.role,
            signals_to_handle=settings.signals_to_handle,
            store=store,
            agent=agent,
            columns=columns,
            terminal=self.terminal,
            rank_variables=self.rank_variables,
            environment=self.environment,
            run=self.run,
        )


def make_run_id() -> str:
    """Return a name for a job that has none: a random UUID, as torchrun makes one."""
    digits = bytearray(os.urandom(16))
    digits[6], digits[8] = digits[6] & 0x0F | 0x40, digits[8] & 0x3F | 0x80
    text = digits.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def find_free_port() -> int:
    """Return a port that is currently free on this host's loopback: of IPv4, or of IPv6 if there is no IPv4."""
    for family, loopback in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family) as sock:
                sock.bind((loopback, 0))
                port: int = sock.getsockname()[1]
                return port
        except OSError as error:
            problem = error
    raise LaunchError(f"phalanx run: this host has no loopback address, neither 127.0.0.1 nor ::1: {problem.strerror}")


def is_terminal() -> bool:
    """Return whether our stdout is a terminal that knows its size."""
    try:
        return os.isatty(1) and os.get_terminal_size(1).columns > 0
    except OSError:
        return False
