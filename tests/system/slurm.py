"""A real Slurm of two nodes on this machine, for the tests: munged, slurmctld and two `slurmd -N`.

It has a folder and a network of its own, and is taken down afterwards:

    with cluster(folder) as slurm:
        slurm.run("srun", "-N2", "python", "train.py")

Debian and Ubuntu: apt install slurm-wlm munge. It runs as root, without control groups: the processes of a step are
those below it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
NODES = ("n1", "n2")
_PATIENCE_S = 60.0
_PAUSE_S = 0.05
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PHALANX_STORE", "PHALANX_AGENT")

CONFIGURATION = """
ClusterName=phalanx
SlurmctldHost={name}({address})
SlurmctldPort=6817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
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
NodeName=n1 NodeHostname={name} NodeAddr={address} Port=6818 CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={name} NodeAddr={address} Port=6819 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def why_not() -> str:
    """Why there can be no Slurm here; empty where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a Slurm of our own needs Linux and root"
    missing = [program for program in PROGRAMS if _find(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed (apt install slurm-wlm munge)"
    return why_no_hosts()  # it needs an address that is not the loopback's, and ports that nobody has


@dataclass(frozen=True)
class Cluster:
    """A Slurm that answers on `host`. `environment` is what its commands need."""

    folder: Path
    host: Host
    environment: dict[str, str]

    def run(self, *words: str, timeout: float = 100.0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm to its end, with its output caught."""
        return subprocess.run(
            [*_enter(self.host), *words],
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


def _enter(host: Host) -> list[str]:
    """As `Host.command`, which also puts another /sys there, where slurmd would miss the control groups."""
    return ["nsenter", f"--net=/run/netns/{host.name}"]


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A Slurm with two idle nodes; everything that it has started is gone at the end."""
    folder.chmod(0o755)  # munged refuses a folder that others may write to
    (folder / "state").mkdir()
    for node in NODES:
        (folder / f"spool-{node}").mkdir()
    configuration = folder / "slurm.conf"
    name = socket.gethostname().partition(".")[0]
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    environment = {name: value for name, value in environment.items() if not name.startswith("SLURM")}
    environment |= {"SLURM_CONF": str(configuration), "OMP_NUM_THREADS": "1"}
    daemons: list[subprocess.Popen[bytes]] = []
    with hosts(1) as (host,):
        configuration.write_text(CONFIGURATION.format(folder=folder, name=name, address=host.address))
        started = Cluster(folder, host, environment)
        try:
            daemons.append(_start_munged(started))
            daemons.append(_start(started, environment, "slurmctld", "-D", "-c", "-i"))
            daemons += [_start(started, environment, "slurmd", "-D", "-N", node) for node in NODES]
            _wait_idle(started, daemons)
            yield started
            started.run("scancel", "--me", "--signal=KILL", timeout=20)
        finally:
            for daemon in reversed(daemons):
                _end(daemon)


def _start_munged(slurm: Cluster) -> subprocess.Popen[bytes]:
    folder = slurm.folder
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    return _start(
        slurm,
        dict(os.environ),
        *["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"],
        *[f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"],
        "--num-threads=1",
    )


def _start(slurm: Cluster, environment: dict[str, str], program: str, *words: str) -> subprocess.Popen[bytes]:
    path = _find(program)
    assert path is not None
    with (slurm.folder / f"{program}.out").open("ab") as out:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig=TERM", *_enter(slurm.host), path, *words],
            cwd=slurm.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


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


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
