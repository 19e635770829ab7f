"""Broadcast the input of process 0 to all processes of an `mpiexec`: `python -m …schedulers.mpi_broadcast SECONDS`.

Each agent of an `mpiexec` that spans hosts runs this module in a child process: before their rendezvous, only MPI
connects the agents. The agent itself does not load MPI, and its ranks are not MPI processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from phalanx._base.deadline import Deadline
from phalanx.errors import PhalanxError


def broadcast(words: bytes, environ: Mapping[str, str], deadline: Deadline) -> bytes:
    """Return the `words` of process 0 in all processes of this `mpiexec`; a child process takes this one's part in MPI.

    Raises:
        PhalanxError: MPI could not be started, or process 0 was late; the message has the child's output.
    """
    # The child connects to `mpiexec` through a descriptor that this process has inherited.
    inherited = environ.get("PMI_FD", "")
    command = [sys.executable, "-m", __name__, str(deadline.left_s)]
    ended = subprocess.run(
        command,
        input=words,
        env=dict(environ),
        capture_output=True,
        pass_fds=[int(inherited)] if inherited.isdecimal() else [],
        check=False,
    )
    if ended.returncode or not ended.stdout:
        output = ended.stderr.decode(errors="replace").strip()
        raise PhalanxError(output.rpartition("\n")[2] or f"exit code {ended.returncode}")
    return ended.stdout


def main() -> None:
    """Take part in MPI as this process of the `mpiexec`, and print the standard input of process 0."""
    from phalanx._comm.engines.mpi.runtime import Launcher, start
    from phalanx._comm.rendezvous.launchers import mpi_launch

    launch = mpi_launch(os.environ)
    assert launch is not None
    runtime = start(Launcher(launch.launcher, launch.world_size, is_mpi=True))
    words = sys.stdin.buffer.read() if launch.rank == 0 else b""
    sys.stdout.buffer.write(runtime.broadcast(words, "phalanx run", Deadline.after(float(sys.argv[1]))))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
