"""Print, for `phalanx stacks`, the operation of each rank in each group, and its Python stacks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import textwrap
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from phalanx._base.deadline import Deadline
from phalanx._base.processes import STACKS_SIGNAL
from phalanx._comm.diagnostics.flight_recorder import position_of
from phalanx._comm.diagnostics.observer import GroupLog, Observer
from phalanx._comm.diagnostics.printable import printable
from phalanx._job.inspect.stacks.dump import without_launcher
from phalanx._job.inspect.stacks.job_snapshot import JobSnapshot, ask, ask_others
from phalanx._job.inspect.stacks.jobs import RunningJob, choose_job, find_jobs
from phalanx.errors import LaunchError

_AGENT_TIMEOUT_S = 5.0
_OTHERS_TIMEOUT_S = 10.0  # longer than the leader's agent waits for the other hosts


def report_stacks(wanted: str | None) -> str:
    """Return where each rank of the job `wanted` is, as text (see `choose_job`); None: the only job of this user.

    Raises:
        LaunchError: there is no such job, or several to choose from, or it does not answer.
    """
    job = choose_job(wanted, "phalanx stacks")
    text, num_others = _report_here(job)
    if num_others == 0:
        return text
    answers = ask_others(job.name, _OTHERS_TIMEOUT_S)
    parts = [text, *(f"On {host.name}:\n\n{host.text}" for host in answers)]
    if not answers:
        parts.append(
            f"Ranks of {num_others} other host{'s' * (num_others > 1)} are shown on the host that leads the job, "
            "usually the first."
        )
    return "\n\n".join(parts)


def report_own_stacks() -> str:
    """Return where the ranks of this agent are, for the leader; a thread of the agent calls this."""
    try:
        return _report_here(next(job for job in find_jobs() if job.pid == os.getpid()))[0]
    except (LaunchError, StopIteration) as error:
        return str(error) or "its agent cannot be asked"


def _report_here(job: RunningJob) -> tuple[str, int]:
    """Return the text for the ranks of this host, and how many other hosts there are."""
    with ask(job.name, job.pid, _AGENT_TIMEOUT_S) as (snapshot, stacks, controls, _):
        if not snapshot.ranks:
            raise LaunchError(f"phalanx stacks: job {job.pid}: no rank is running: it is still starting, or ending")
        # operations first: a rank may be in another one once it has written its stack
        logs = []
        for group_info, control in zip(snapshot.groups, controls, strict=True):
            with contextlib.suppress(ValueError, OSError):  # a rank has overwritten the memory's header
                logs.append(Observer(group_info, control).read())
        now_ns = time.monotonic_ns()
        text = format_report(
            snapshot, logs, ask_ranks(snapshot.ranks, stacks, (snapshot.zygote, snapshot.agent)), now_ns
        )
        return text, snapshot.num_nodes - 1


def format_report(snapshot: JobSnapshot, groups: Sequence[GroupLog], stacks: Mapping[int, str], now_ns: int) -> str:
    """Return the text; `stacks` maps each rank to faulthandler's output, or to a line on why there is none.

    Line breaks and escape codes in names of scripts and files are shown as text.
    """
    here = f" on this host, {snapshot.node + 1} of {snapshot.num_nodes}" if snapshot.num_nodes > 1 else ""
    count = f"{len(snapshot.ranks)} of {snapshot.world_size} ranks running{here}"
    lines = [f"Job {snapshot.agent}: {snapshot.target}, {count}"]
    for rank, pid in snapshot.ranks:
        lines += ["", f"rank {rank} (pid {pid})"]
        members = [(group, log) for group in groups for log in group.ranks if log.pid == pid and not log.left]
        used = [member for member in members if member[1].records]  # programs often create many groups, and use few
        lines += [f"  group {group.name!r}: {position_of(log.records, now_ns)}" for group, log in used or members[:1]]
        stack = stacks[rank]
        lines += textwrap.indent(stack, "  ").splitlines() if "\n" in stack else [f"  {stack}"]
    lines += ["", f"(innermost call first; requested with {STACKS_SIGNAL.name}; the ranks continue)"]
    return "\n".join(printable(line.expandtabs()) for line in lines)


PATIENCE_S = 1.0  # a rank answers within a millisecond, unless it can't
_POLL_S = 0.01
_MAX_DUMP_BYTES = 1 << 20


def ask_ranks(ranks: Sequence[tuple[int, int]], stacks: Sequence[int], parents: Collection[int]) -> dict[int, str]:
    """Return each rank's stack from its descriptor in `stacks`, or why there is none.

    `parents` are the zygote, and the agent, which adopts ranks that outlive the zygote.

    The ranks continue undisturbed: the handler runs in C, between two instructions, whatever the rank is doing, and an
    interrupted system call resumes.
    """
    if not ranks:
        return {}
    with _one_at_a_time(stacks[0]):
        asked = {}
        answers = {}
        for (rank, pid), fd in zip(ranks, stacks, strict=True):
            os.ftruncate(fd, 0)
            why = decide_silence(_status(pid), parents)
            if why is None:
                asked[rank] = (pid, fd)
                _ask(pid)
            else:
                answers[rank] = why
        dumps = _await(asked)
        for rank, (pid, _) in asked.items():
            answers[rank] = without_launcher(dumps[rank]) if dumps[rank] else explain_silence(_status(pid))
        return answers


def decide_silence(status: Mapping[str, str], parents: Collection[int]) -> str | None:
    """Return why a process with this /proc/PID/status need not be asked; None if it should be."""
    if not status or int(status.get("PPid", "0")) not in parents or status["State"][0] in "ZX":
        return "has just ended"
    if status["State"][0] in "Tt":
        return "is stopped (SIGSTOP, Ctrl-Z or a debugger); `kill -CONT` continues it"
    if not int(status["SigCgt"], 16) >> (STACKS_SIGNAL - 1) & 1:
        return (
            f"writes no stack: it has no handler for {STACKS_SIGNAL.name}. It has only just started, is not Python "
            "(--no-python), or the script has reset the handler"
        )
    return None


def explain_silence(status: Mapping[str, str]) -> str:
    """Return why a process that was asked has not answered."""
    why = decide_silence(status, (int(status.get("PPid", "0")),))
    if why is not None:
        return why
    if status["State"][0] == "D":
        return "does not answer: it is in a system call that cannot be interrupted (a disk or a network file system?)"
    if int(status["SigBlk"], 16) >> (STACKS_SIGNAL - 1) & 1:
        return f"does not answer: the script blocks {STACKS_SIGNAL.name}"
    return (
        f"does not answer within {PATIENCE_S:g} s: the script has its own handler for {STACKS_SIGNAL.name}, or the "
        "process gets no CPU time"
    )


def _ask(pid: int) -> None:
    try:
        os.kill(pid, STACKS_SIGNAL)
    except OSError:
        pass  # it has ended since; the silence is explained later


def _await(asked: Mapping[int, tuple[int, int]]) -> dict[int, str]:
    """Return the stacks of the asked ranks as soon as all are complete, or after `PATIENCE_S`."""
    sizes: list[int] = []

    def is_written() -> bool:
        nonlocal sizes
        before, sizes = sizes, [os.fstat(fd).st_size for _, fd in asked.values()]
        return all(sizes) and sizes == before

    Deadline.after(PATIENCE_S).wait_until(is_written, _POLL_S)
    return {rank: os.pread(fd, _MAX_DUMP_BYTES, 0).decode(errors="replace") for rank, (_, fd) in asked.items()}


def _status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; empty if there is no such process."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    except OSError:
        return {}


@contextmanager
def _one_at_a_time(fd: int) -> Iterator[None]:
    """Lock the first rank's file, so that only one command asks at a time: two would mix up their answers."""
    # reopened: a lock belongs to an open file description, and the agent and all commands share the received one
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        fcntl.flock(own, fcntl.LOCK_EX)
        yield
    finally:
        os.close(own)
