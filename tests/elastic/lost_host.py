"""The loss of a whole host in a test, by the hand of one of its processes: all end at once, or it leaves in order."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from phalanx.elastic.run import running_state
from phalanx.elastic.state import commits_of
from phalanx.testing.namespaces import Host

_NAME = "host-lost-"


def lose_own_host(folder: str) -> NoReturn:
    """Kill every process of the host that this one is on, this one last, and leave word of it in `folder`.

    All are stopped before the first one is killed: otherwise one that still runs tells the first host of its loss.
    """
    here = os.readlink("/proc/self/ns/net")
    Path(folder, f"{_NAME}{os.getpid()}").write_text(here)
    for sent in (signal.SIGSTOP, signal.SIGKILL):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdecimal() and int(name) != os.getpid() and os.readlink(f"/proc/{name}/ns/net") == here:
                    os.kill(int(name), sent)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process was killed")


def ask_own_agent_to_leave() -> None:
    """Send SIGTERM to the agent of this host, as a scheduler does, and wait in the step until this rank hears of it."""
    zygote = os.getppid()
    agent = int(Path(f"/proc/{zygote}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGTERM)
    state = running_state()
    assert state is not None
    runner: Any = commits_of(state).tracker.runner
    while not runner._membership.newer_than(runner.generation):
        time.sleep(0.01)


def find_lost_hosts(folder: Path, machines: Sequence[Host]) -> list[Host]:
    """Return those of the machines that have been lost so."""
    lost = {path.read_text() for path in folder.glob(f"{_NAME}*")}
    return [machine for machine in machines if f"net:[{os.stat(f'/run/netns/{machine.name}').st_ino}]" in lost]
