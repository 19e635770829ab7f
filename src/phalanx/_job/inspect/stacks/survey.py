"""Ask every rank for its Python stacks, wait a short while for those who answer, and say why the others do not."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from phalanx._base.deadline import Deadline
from phalanx._base.processes import STACKS_SIGNAL
from phalanx._job.inspect.stacks.dump import without_launcher

PATIENCE_S = 1.0  # a rank answers within a millisecond, unless it can't
_POLL_S = 0.01
_MAX_DUMP_BYTES = 1 << 20


def ask_ranks(ranks: Sequence[tuple[int, int]], stacks: Sequence[int], parents: Collection[int]) -> dict[int, str]:
    """Return what each rank (number and process) wrote to its descriptor of `stacks`, or why it wrote nothing.

    `parents` are the zygote, and the agent, which adopts ranks that outlive the zygote.

    The ranks go on as if nothing had happened: the handler runs in C, between two instructions, whatever the rank is
    doing, and the system call that it was in goes on.
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
        return "is stopped (SIGSTOP, Ctrl-Z or a debugger); `kill -CONT` lets it go on"
    if not int(status["SigCgt"], 16) >> (STACKS_SIGNAL - 1) & 1:
        return (
            f"writes no stack: nothing handles {STACKS_SIGNAL.name} in it. It has only just started, is not Python "
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
        f"does not answer within {PATIENCE_S:g} s: the script has put a handler of its own on {STACKS_SIGNAL.name}, "
        "or the process gets no processor"
    )


def _ask(pid: int) -> None:
    try:
        os.kill(pid, STACKS_SIGNAL)
    except OSError:
        pass  # it has ended since; the silence is explained later


def _await(asked: Mapping[int, tuple[int, int]]) -> dict[int, str]:
    """Return what the asked ranks have written, once all have answered and add nothing more, or the time is up."""
    sizes: list[int] = []

    def is_written() -> bool:
        nonlocal sizes
        before, sizes = sizes, [os.fstat(fd).st_size for _, fd in asked.values()]
        return all(sizes) and sizes == before

    Deadline.after(PATIENCE_S).wait_until(is_written, _POLL_S)
    return {rank: os.pread(fd, _MAX_DUMP_BYTES, 0).decode(errors="replace") for rank, (_, fd) in asked.items()}


def _status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; it is empty when there is no such process."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    except OSError:
        return {}


@contextmanager
def _one_at_a_time(fd: int) -> Iterator[None]:
    """Let only one command ask at a time, since two would mix up their answers: they queue at the first rank's file."""
    # opened anew, because a lock belongs to an open file, and the one that we were handed is everybody's
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        fcntl.flock(own, fcntl.LOCK_EX)
        yield
    finally:
        os.close(own)
