"""Query, signal and kill processes (descendants, orphans, sessions), and observe the exception that ends this one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType

from phalanx._base.deadline import Deadline

SUPPORTED = sys.platform == "linux"  # other systems have no death signal, no adoption of orphans and no /proc

# Makes a rank write its Python stacks. A process without a handler ignores this signal, so it never ends a process by
# mistake. Scripts rarely use it, because its purpose is to report urgent data on a socket.
STACKS_SIGNAL = signal.SIGURG

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE)  # they end a job
# The agent forwards these to the ranks. The zygote survives them: a scheduler may signal every process of a job.
RELAYED_SIGNALS = frozenset(
    (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
)

_AUTOGRAD = b"pt_autograd"  # torch's name of the threads that run backward for devices
_PR_SET_PDEATHSIG = 1
_KILL_LIMIT_S = 5.0
_PR_SET_CHILD_SUBREAPER = 36

_MEANINGS = {
    "SIGSEGV": "segmentation fault",
    "SIGBUS": "bus error; often /dev/shm or a mapped file is full",
    "SIGABRT": "abort; the program or a library aborted, and usually printed why",
    "SIGFPE": "arithmetic fault",
    "SIGILL": "illegal instruction; built for another processor?",
    "SIGKILL": "killed; out of memory? see `dmesg` or the job's memory limit",
    "SIGTERM": "asked to stop",
    "SIGINT": "interrupted",
    "SIGPIPE": "wrote to a closed pipe",
    "SIGHUP": "the terminal was closed",
}


def name_signal(number: int) -> str:
    """Return `SIGSEGV (segmentation fault)`; without a description only the name, without a name only the number."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} ({_MEANINGS[name]})" if name in _MEANINGS else name


def has_working_directory() -> bool:
    """Return whether this process's working directory still exists."""
    try:
        os.getcwd()
    except OSError:
        return False
    return True


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose parent dies, including daemons."""
    if SUPPORTED:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Make the kernel send `signum` to this process when its parent `parent` dies; exit if it is already dead."""
    if SUPPORTED:
        _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:
        os._exit(128 + signum)


def outlive_parent() -> None:
    """Undo `die_with_parent`. A stopped process continues when its parent dies, and can then detect the death."""
    if SUPPORTED:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def observe_uncaught(listener: Callable[[BaseException], object]) -> None:
    """Call `listener` with the exception that ends this process, before the current `sys.excepthook` prints it."""
    hook = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        listener(error)
        hook(kind, error, trace)

    sys.excepthook = note


@contextlib.contextmanager
def blocked_signals(numbers: Iterable[int]) -> Iterator[None]:
    """Block signals in this thread, and in processes that it starts here, where they stay blocked until unblocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def read_stat(pid: int | str) -> list[str]:
    """Return the fields of /proc/PID/stat after the command's name, from the state on; [] if there is no such process.

    Field N of proc(5) has the index N - 3.
    """
    try:
        return _split_stat(f"/proc/{pid}/stat")[1]
    except OSError:
        return []


_EXITING = 0x4  # PF_EXITING of Linux's include/linux/sched.h


def find_exit_status(stat: Sequence[str]) -> int | None:
    """Return the wait status of a process that has ended, or is being ended; None while it runs, or once it is reaped.

    `stat` is the result of `read_stat`. A process that is being ended no longer runs. The kernel reports its end after
    freeing its memory, which takes a tenth of a second or more per gigabyte.
    """
    if len(stat) < 50:
        return None
    status, is_exiting = int(stat[49]), int(stat[6]) & _EXITING
    return status if stat[0] in "ZX" or (is_exiting and status) else None


def _split_stat(path: str) -> tuple[bytes, list[str]]:
    """Return the command's name, which may have any characters, and the fields after it."""
    with open(path, "rb") as file:
        name, _, fields = file.read().partition(b"(")[2].rpartition(b")")
    return name, fields.decode().split()


def read_start_ticks(pid: int | str) -> int | None:
    """Return when a process started, in clock ticks since the system started; None if there is no such process."""
    fields = read_stat(pid)
    return int(fields[19]) if fields else None


def read_state(pid: int) -> str:
    """Return the state letter of /proc/PID/stat; "" if unknown.

    R running, S sleeping, D in an uninterruptible system call, T stopped by a signal, t by a debugger, Z ended.
    """
    return "".join(read_stat(pid)[:1])


def read_processor_ns(pid: int) -> int | None:
    """Return the CPU time of a process's main thread and its autograd threads.

    The resolution is the system's clock (usually 10 ms); None if unknown.
    """
    ticks = 0
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            name, fields = _split_stat(f"/proc/{pid}/task/{thread}/stat")
            if int(thread) == pid or name.startswith(_AUTOGRAD):
                ticks += sum(map(int, fields[11:13]))
    except OSError:  # a thread or the process has ended
        return None
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def find_session(session: int) -> list[int]:
    """Return every process of a session, zombies included. Cost: one scan of /proc."""
    found = []
    for entry in os.listdir("/proc") if SUPPORTED else ():
        if entry.isdigit():
            try:
                if os.getsid(int(entry)) == session:
                    found.append(int(entry))
            except OSError:
                continue  # it ended during the scan
    return found


def kill_sessions(sessions: Iterable[int]) -> None:
    """Kill every process of these sessions with SIGKILL, repeatedly while a live one is found.

    The caller's own session must not be among them.
    """
    for session in sessions:
        for _ in range(1000):
            living = [pid for pid in find_session(session) if read_state(pid) not in ("Z", "")]
            if not living:
                break
            for pid in living:
                try:
                    os.kill(pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            time.sleep(0.002)


def find_descendants(ancestor: int, spared: int | None = None) -> list[int]:
    """Return every process below `ancestor`, zombies included, parents before children. Cost: one scan of /proc.

    `spared`, one of its children, and all of that child's descendants are left out.
    """
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc") if SUPPORTED else ():
        if not entry.isdigit():
            continue
        fields = read_stat(entry)
        if fields and int(entry) != spared:  # without fields it ended during the scan
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = []
    level = [ancestor]
    while level:
        level = [child for pid in level for child in children.get(pid, ())]
        found += level
    return found


def kill_descendants(groups: Iterable[int] = (), *, spared: int | None = None) -> dict[int, int]:
    """Kill every descendant of this process with SIGKILL, and reap it; return the wait statuses by process number.

    `spared`, a child, and its descendants are not killed.

    The scan repeats until no descendant is left, because a process can fork between the scan and its death; to find
    orphans, this process must have called `adopt_orphans`. After five seconds, this returns even if the kernel cannot
    end a process (a hung disk). If /proc cannot be read, because it is missing or no descriptor is free, only the
    process groups `groups`, led by children of this process, are killed.
    """
    reaped: dict[int, int] = {}
    deadline = Deadline.after(_KILL_LIMIT_S)
    while True:
        doomed, kill = groups, os.killpg
        if SUPPORTED:
            with contextlib.suppress(OSError):  # all descriptors may be in use; the next scan may find a free one
                doomed, kill = find_descendants(os.getpid(), spared), os.kill
        for pid in doomed:
            try:
                kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # already gone, or a set-uid program that only root may kill
        try:
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                reaped[found[0]] = found[1]
        except ChildProcessError:
            return reaped
        if deadline.passed or (spared is not None and not doomed):
            return reaped
        time.sleep(0.002)


def signal_children(pids: Iterable[int], signum: int, *, group: bool) -> None:
    """Send `signum` to children of this process, or to the process groups that they lead.

    Only the parent can do this safely: an unreaped child's number is not reused. A stopped child is continued if the
    signal should end it; otherwise it would not receive the signal.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if group else os.kill)(pid, signum)
            if signum in ENDING_SIGNALS:
                os.kill(pid, signal.SIGCONT)


def reap_children(spared: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield the process number and exit code (negative for a signal) of each child that has ended.

    A child is reaped only when the caller requests the next one, so that until then the numbers of the child and of its
    process group are not reused (on Linux). `spared` is a child that other code waits for; this stops if it has ended.
    """
    while True:
        try:
            if not SUPPORTED:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                yield pid, os.waitstatus_to_exitcode(status)
                continue
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if found is None or found.si_pid == spared:
            return
        yield found.si_pid, found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        os.waitpid(found.si_pid, 0)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def describe_address_space() -> str:
    """Return the limit of this process's address space, with advice; "" without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return ""
    return f"This process may use {soft // 1024} KiB of address space (RLIMIT_AS). Raise the limit (ulimit -v)."
