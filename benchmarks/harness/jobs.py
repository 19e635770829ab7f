"""Start jobs as they are typed: `phalanx run` and torchrun with the same script, here or on several hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx._comm.control.key import Key
from phalanx.testing import Host

LAUNCHERS = {"phalanx run": ["-m", "phalanx.cli", "run"], "torchrun": ["-m", "torch.distributed.run"]}
_RENDEZVOUS_PORT = 29400


@dataclass(frozen=True)
class Ended:
    """A job that has ended has printed `output`; its commands had these exit codes."""

    output: str
    codes: list[int]


def type_lines(launcher: str, ranks: int, script: Sequence[str], machines: Sequence[Host] = ()) -> list[list[str]]:
    """Return what is typed to start `script` with `ranks` on each of `machines`, or on this one: a line for each."""
    command = [sys.executable, *LAUNCHERS[launcher], "--nproc-per-node", str(ranks)]
    is_torchrun = launcher == "torchrun"
    if not machines:
        return [[*command, *(["--standalone"] if is_torchrun else []), *script]]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{machines[0].address}:{_RENDEZVOUS_PORT}"]
    lines = []
    for host in machines:
        # Namespaces have one name in common: torchrun must be told each host's address, and which one is the first.
        told = ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(host is machines[0])}"]
        options = ["--nnodes", str(len(machines)), *where, *(told if is_torchrun else [])]
        lines.append([*host.command, *command, *options, *script])
    return lines


def run_lines(lines: Sequence[Sequence[str]]) -> Ended:
    """Start all `lines` at once, and wait until they have ended."""
    # One thread is torchrun's default: the same for both. Gloo cannot tell the interface from a name that all share.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PHALANX_KEY": str(Key(bytes(32)))}
    if len(lines) > 1:
        environment["GLOO_SOCKET_IFNAME"] = "eth0"
    started = [
        subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in lines
    ]
    output = "".join(process.communicate()[0] for process in started)
    return Ended(output, [process.returncode for process in started])
