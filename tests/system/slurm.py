"""A real Slurm of two nodes on this machine, for the tests: munged, slurmctld and two `slurmd -N`.

It has a folder and ports of its own, and is taken down afterwards:

    with cluster(folder) as slurm:
        slurm.run("srun", "-N2", "python", "train.py")

By hand, until Ctrl-C: `python -m tests.system.slurm`; it prints what to set for `srun` and `sbatch` to find it. Debian
and Ubuntu: apt install slurm-wlm munge. It runs as root, without control groups: the processes of a step are those
below it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
NODES = ("n1", "n2")
_PATIENCE_S = 60.0
_PAUSE_S = 0.05
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PHALANX_STORE", "PHALANX_AGENT")

CONFIGURATION = """
ClusterName=phalanx
SlurmctldHost={name}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_min_interval=0
KillWait=10
NodeName=n1 NodeHostname={name} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={name} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def why_not() -> str:
    """Why there can be no Slurm here; empty where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm of our own needs Linux and root"
    missing = [program for program in PROGRAMS if _find(program) is None]
    return f"{', '.join(missing)} not installed (apt install slurm-wlm munge)" if missing else ""


@dataclass(frozen=True)
class Cluster:
    """A Slurm that answers. `environment` is what its commands need."""

    folder: Path
    environment: dict[str, str]

    def run(self, *words: str, timeout: float = 100.0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm to its end, with its output caught."""
        return subprocess.run(
            words,
            cwd=self.folder,
            env={**self.environment, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def wait_end(self, job: str) -> None:
        """Return when `job` has left the queue; the caller's own timeout ends the wait."""
        while self.run("squeue", "-h", "-j", job).stdout.strip():
            time.sleep(_PAUSE_S)

    def logs(self) -> str:
        """The last lines of what the daemons say."""
        return "\n".join(f"== {log.name}\n{_tail(log)}" for log in sorted(self.folder.glob("*.log")))


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A Slurm with two idle nodes; everything that it has started is gone at the end."""
    folder.chmod(0o755)  # munged refuses a folder that others may write to
    (folder / "state").mkdir()
    for node in NODES:
        (folder / f"spool-{node}").mkdir()
    configuration = folder / "slurm.conf"
    ports = _free_ports(3)
    configuration.write_text(
        CONFIGURATION.format(folder=folder, name=socket.gethostname().partition(".")[0], ports=ports)
    )
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    environment = {name: value for name, value in environment.items() if not name.startswith("SLURM")}
    environment |= {"SLURM_CONF": str(configuration), "OMP_NUM_THREADS": "1"}
    started = Cluster(folder, environment)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        daemons.append(_start_munged(folder))
        daemons.append(_start(folder, environment, "slurmctld", "-D", "-c", "-i"))
        daemons += [_start(folder, environment, "slurmd", "-D", "-N", node) for node in NODES]
        _wait_idle(started, daemons)
        yield started
    finally:
        started.run("scancel", "--me", "--signal=KILL", timeout=20)
        for daemon in reversed(daemons):
            _end(daemon)


def _start_munged(folder: Path) -> subprocess.Popen[bytes]:
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    return _start(
        folder,
        dict(os.environ),
        *["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"],
        *[f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"],
        "--num-threads=1",
    )


def _start(folder: Path, environment: dict[str, str], program: str, *words: str) -> subprocess.Popen[bytes]:
    path = _find(program)
    assert path is not None
    with (folder / f"{program}.out").open("ab") as out:
        return subprocess.Popen(
            [path, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip


def _wait_idle(slurm: Cluster, daemons: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while slurm.run("sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip() != str(len(NODES)):
        ended = [daemon.args for daemon in daemons if daemon.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise RuntimeError(f"Slurm did not come up: {ended or 'time is up'}\n{slurm.logs()}")
        time.sleep(_PAUSE_S)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(daemon.pid, signal.SIGKILL)
        daemon.wait()


def _find(program: str) -> str | None:
    return shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def _free_ports(count: int) -> list[int]:
    with_ports = [socket.socket() for _ in range(count)]
    try:
        for sock in with_ports:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in with_ports]
    finally:
        for sock in with_ports:
            sock.close()


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def main() -> None:
    """A cluster for the shell."""
    if problem := why_not():
        sys.exit(problem)
    with tempfile.TemporaryDirectory(prefix="phalanx-slurm-") as folder, cluster(Path(folder)) as slurm:
        print(f"export SLURM_CONF={slurm.environment['SLURM_CONF']}   # until Ctrl-C", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
