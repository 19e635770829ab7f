"""The loss of a whole host in a test: all its processes end at once, by the hand of one of them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from phalanx.testing.namespaces import Host

_NAME = "host-lost-"


def lose_own_host(folder: str) -> NoReturn:
    """Kill every process of the host that this one is on, this one last, and leave word of it in `folder`."""
    here = os.readlink("/proc/self/ns/net")
    Path(folder, f"{_NAME}{os.getpid()}").write_text(here)
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdecimal() and int(name) != os.getpid() and os.readlink(f"/proc/{name}/ns/net") == here:
                os.kill(int(name), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("this process was killed")


def find_lost_hosts(folder: Path, machines: Sequence[Host]) -> list[Host]:
    """Return those of the machines that have been lost so."""
    lost = {path.read_text() for path in folder.glob(f"{_NAME}*")}
    return [machine for machine in machines if f"net:[{os.stat(f'/run/netns/{machine.name}').st_ino}]" in lost]
