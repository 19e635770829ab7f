"""A job, ready to be started: settings and what the host made of them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from phalanx.launch.environment import Job
from phalanx.launch.placement import Placement
from phalanx.launch.settings import Settings


@dataclass(frozen=True)
class JobPlan:
    """Everything that was decided before the first process is started."""

    settings: Settings
    num_ranks: int
    placement: Placement
    terminal: bool
    environ: dict[str, str]
    verdict: str = ""  # a file for the last words of the agent, where a program reads them and not a user

    def describe_job(self, restart_count: int, store: str, agent: str) -> Job:
        """What the ranks of one attempt have in common; takes a port that is free now, unless one was asked for."""
        settings = self.settings
        columns = None
        if self.terminal:
            prefix = len(f"[{self.num_ranks - 1}] ") + 1
            columns = max(20, os.get_terminal_size(1).columns - prefix)
        return Job(
            world_size=self.num_ranks,
            master_addr=settings.master_addr,
            master_port=settings.master_port or _find_free_port(),
            run_id=settings.run_id,
            restart_count=restart_count,
            max_restarts=settings.max_restarts,
            store=store,
            agent=agent,
            columns=columns,
            terminal=self.terminal,
        )


def _find_free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def is_terminal() -> bool:
    """Whether our stdout is one, and knows its size."""
    try:
        return os.isatty(1) and os.get_terminal_size(1).columns > 0
    except OSError:
        return False
