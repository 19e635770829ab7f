"""Find what a test left behind in this process: processes, threads, descriptors, ports, variables.

before = Snapshot.take()
...
assert not before.leaks()
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from phalanx._base.deadline import Deadline
from phalanx._base.processes import read_stat

# Set in this process and inherited by every program it starts: how an orphan is told from somebody else's process.
MARK = "PHALANX_LEAK_WATCH"

# Started once per process by the standard library, and kept on purpose.
_KEPT_PROGRAMS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# These are PyTorch's and gloo's own, and never joined: autograd's device threads, c10d's watchdogs, the pin-memory
# thread.
_KEPT_THREADS = ("pt_", "pin_memory")
# The first import of these starts thread pools (OpenMP, OpenBLAS) and sets variables that stay for good.
_POOLS = ("torch", "numpy", "scipy", "sklearn")
# pytest rewrites the first for each phase of a test; the first import of torch._inductor sets the last.
_KEPT_VARIABLES = ("PYTEST_CURRENT_TEST", MARK, "TORCHINDUCTOR_CACHE_DIR")

_Inode = str


@dataclass(frozen=True)
class Snapshot:
    """A snapshot is what this process held at one moment. Without Linux it has only Python's threads and variables."""

    processes: dict[int, str]
    threads: frozenset[str]
    native_threads: int
    descriptors: dict[int, str]
    variables: dict[str, str]
    pools: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        """Return what is held now. It reads a few files under /proc, and takes a millisecond or two."""
        return cls(
            processes=_processes(),
            threads=frozenset(thread.name for thread in threading.enumerate()),
            native_threads=_native_threads(),
            descriptors=_descriptors(),
            variables={name: value for name, value in os.environ.items() if name not in _KEPT_VARIABLES},
            pools=frozenset(name for name in _POOLS if name in sys.modules),
        )

    def leaks(self, *, patience_s: float = 5.0) -> list[str]:
        """Return what is held now and was not at the time of this snapshot, in words; empty if nothing.

        What is still ending on its own gets `patience_s` to do so; with nothing left behind there is no wait.
        """

        def is_clean() -> bool:
            gc.collect()  # a cycle may be all that holds a descriptor
            return not self.difference(Snapshot.take())

        if not self.difference(Snapshot.take()) or Deadline.after(patience_s).wait_until(is_clean, 0.02):
            return []
        return self.difference(Snapshot.take())

    def difference(self, now: Snapshot) -> list[str]:
        """Return what `now` holds and this snapshot does not."""
        found = [f"process {pid}: {name}" for pid, name in now.processes.items() if pid not in self.processes]
        found += [f"thread {name!r}" for name in sorted(now.threads - self.threads)]
        if not found and now.pools == self.pools and now.native_threads > self.native_threads:
            found.append(f"{now.native_threads - self.native_threads} native threads (not started by Python)")
        found += [
            f"descriptor {fd}: {what}" for fd, what in now.descriptors.items() if self.descriptors.get(fd) != what
        ]
        if now.pools == self.pools:
            found += [
                f"variable {name}: {self.variables.get(name)!r} became {now.variables.get(name)!r}"
                for name in sorted(self.variables.keys() | now.variables.keys())
                if self.variables.get(name) != now.variables.get(name)
            ]
        return found

    def restore(self) -> None:
        """End the processes and undo the variables that came since, so that the next test is not blamed for them."""
        for pid in _processes().keys() - self.processes.keys():
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError):  # it has ended, or is not our own child
                pass
        for name in os.environ.keys() - self.variables.keys() - set(_KEPT_VARIABLES):
            del os.environ[name]
        os.environ.update(self.variables)


def mark_descendants() -> None:
    """Let snapshots see programs that are started from now on even when their parent dies before them."""
    os.environ[MARK] = str(os.getpid())


_KERNEL_THREAD = 0x200000  # PF_KTHREAD of Linux's include/linux/sched.h
# Others' processes, as of the last look: their environments are read once. Two looks at each of 150 took 10 ms a test.
_foreign: set[str] = set()


def _processes() -> dict[int, str]:
    """Return our children, and marked orphans. Zombies count: their parent did not wait for them."""
    mark = f"{MARK}={os.environ[MARK]}".encode() if MARK in os.environ else None
    me, found = str(os.getpid()), {}
    running = {entry for entry in _list("/proc") if entry.isdigit() and entry != me}
    _foreign.intersection_update(running)
    for entry in running - _foreign:
        try:
            stat = read_stat(entry)
            if stat and int(stat[6]) & _KERNEL_THREAD:  # its environment cannot be read
                _foreign.add(entry)
                continue
            ours = stat[1:2] == [me] or (
                mark is not None and mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            )
            if not ours or not stat:
                _foreign.add(entry)
                continue
            command = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it ended while we looked, or is not ours to look at
            continue
        is_own = stat[1:2] == [me]  # those of a rank that is gone are leaks, and so are the workers of a forkserver
        if not (is_own and any(kept in command for kept in _KEPT_PROGRAMS)):
            found[int(entry)] = f"{command or 'no command line'} (state {stat[0]})"
    return found


def _native_threads() -> int:
    python = {thread.native_id for thread in threading.enumerate()}
    count = 0
    for task in _list("/proc/self/task"):
        try:
            name = Path(f"/proc/self/task/{task}/comm").read_text()
        except OSError:
            continue
        count += int(task) not in python and not name.startswith(_KEPT_THREADS)
    return count


def _descriptors() -> dict[int, str]:
    ports: dict[_Inode, str] | None = None
    found = {}
    kept = _pipes_of_kept_programs()
    for fd in _list("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # it is the descriptor that listed the folder
            continue
        if target.startswith("socket:["):
            ports = _listening() if ports is None else ports
            target += ports.get(target[len("socket:[") : -1], "")
        if int(fd) not in kept:
            found[int(fd)] = target
    return found


def _pipes_of_kept_programs() -> set[int | None]:
    """Return the descriptors that keep `_KEPT_PROGRAMS` alive. There is no public way to ask."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    forkserver = sys.modules.get("multiprocessing.forkserver")
    return {
        tracker._resource_tracker._fd if tracker else None,
        forkserver._forkserver._forkserver_alive_fd if forkserver else None,
    }


def _listening() -> dict[_Inode, str]:
    """Return the sockets of this network namespace that listen on a TCP port, by inode, in words."""
    found = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for columns in map(str.split, lines):
            if columns[3] == "0A":  # it is TCP_LISTEN
                found[columns[9]] = f", listening on {table} port {int(columns[1].rpartition(':')[2], 16)}"
    return found


def _list(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def files_in_shm() -> list[str]:
    """Return the names in /dev/shm that may be ours, and not those of other libraries in tests beside this one."""
    return sorted(name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "torch_", "mpich_", "psm_")))
