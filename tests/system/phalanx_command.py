"""The `phalanx` command as a user runs it, and a count of what it leaves behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "FORCE_COLOR", "NO_COLOR", "COLUMNS")

# How a script waits for a signal that Python handles. When the signal comes just before `signal.pause()` enters the
# kernel, the interpreter only notes it, and `pause` waits for another one.
WAIT = "while True: __import__('time').sleep(0.02)"

# The batches of a script whose ranks all end together, when the file is there that its first argument names.
BATCHES = """
def batches():
    while True:
        over = torch.tensor(os.path.exists(sys.argv[1]))
        dist.all_reduce(over, dist.ReduceOp.MAX)
        if over:
            return
        yield torch.ones(4, 8)
"""


@dataclass(frozen=True)
class Finished:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def by_rank(self) -> list[tuple[int, str]]:
        """Each line of each rank, sorted; equal lines are folded into one only if they come at nearly the same time."""
        said = [(said_by(line), line.partition("] ")[2]) for line in self.lines]
        return sorted((rank, text) for ranks, text in said for rank in ranks)


def said_by(line: str) -> set[int]:
    """The ranks in front of a line: 0, 1, 2 and 5 for `[0-2,5] text`, or for `[0-2,5 host] text`."""
    label = line.partition("[")[2].partition("]")[0].partition(" ")[0]
    spans = [part.partition("-") for part in label.split(",")]
    return {rank for first, _, last in spans for rank in range(int(first), int(last or first) + 1)}


@dataclass
class Running:
    """A command that has not ended; `mark` is in the environment of every process that descends from it."""

    process: subprocess.Popen[str]
    mark: str

    def read_until(self, text: str) -> str:
        """The output up to the line that contains `text`."""
        assert self.process.stdout is not None
        read = ""
        for line in self.process.stdout:
            read += line
            if text in line:
                return read
        raise AssertionError(f"the command ended without saying {text!r}; it said: {read}")

    def read_until_all(self, text: str, num_ranks: int) -> None:
        """Read until each rank has said `text`; on a busy machine one says it later, in a line of its own."""
        waiting = set(range(num_ranks))
        while waiting:
            waiting -= said_by(self.read_until(text).splitlines()[-1])

    def survivors(self) -> list[int]:
        """The living processes that carry the mark."""
        found = []
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and self.mark.encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    found.append(int(entry))
            except OSError:
                continue  # it ended, or is not ours
        return found

    def wait_gone(self) -> None:
        """Return when no marked process lives; the test's own timeout ends the wait."""
        while living := self.survivors():
            for pid in living:
                try:
                    fd = os.pidfd_open(pid)
                except ProcessLookupError:
                    continue
                try:
                    select.select([fd], [], [])
                finally:
                    os.close(fd)

    def finish(self) -> Finished:
        out, err = self.process.communicate()
        return Finished(self.process.returncode, out, err)


def _environment(mark: str, extra: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _LAUNCHED}
    return {**kept, "PHALANX_TEST_MARK": mark, **extra}


@contextmanager
def start(
    *words: str,
    env: dict[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    python: tuple[str, ...] = ("-m", "phalanx.cli"),
    before: tuple[str, ...] = (),
    stderr: int = subprocess.PIPE,
) -> Iterator[Running]:
    """`phalanx` with `words`, as `python` runs it, with `before` in front; at the end nothing of it is left."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [*before, sys.executable, *python, *words],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=_environment(mark, env or {}),
        # a shell that runs pytest in the background has made it ignore Ctrl-C
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    running = Running(process, mark)
    with process:
        try:
            yield running
        finally:
            process.kill()
            for pid in running.survivors():
                with suppress(ProcessLookupError):  # it ends by itself, just now
                    os.kill(pid, signal.SIGKILL)


def run(*words: str, env: dict[str, str] | None = None, before: tuple[str, ...] = ()) -> Finished:
    """`phalanx run` with `words`, to its end; fails if a process is left."""
    with start("run", *words, env=env, before=before) as running:
        finished = running.finish()
        assert running.survivors() == []
        return finished


def write_script(folder: Path, text: str, name: str = "script.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)
