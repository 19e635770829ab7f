"""Run a command while its processes freeze for moments: `python -m tests.freezing.run --runs 9 -- pytest -n 1 DIR`.

On a busy machine any process may stand still for a while, at any point. This does it on purpose: every few hundredths
of a second some process of the command, and often several, is stopped by the kernel's freezer, for a tenth of a second
on average; nobody is told. A test, or a piece of the product, that counts on an order which nobody promised fails under
it a thousand times as often as on an idle machine. The command's first process (pytest's controller) is never frozen.

A run's seed decides the pauses and how long each lasts; which process is hit depends on which there are at that moment.
The log says it, a line for each: a run that fails leaves it in build/freezing/, with all that the command printed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, NoReturn

from tests.freezing.freezer import Hierarchy, NoFreezerError, empty, find_hierarchy, groups, move, processes_in

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_END_S = 30.0  # what the command has to end in when it is interrupted


@dataclass(frozen=True)
class Pauses:
    """How often processes freeze, and for how long."""

    seed: int
    at_once: int  # processes
    every_s: float  # on average, for each of those
    mean_s: float
    longest_s: float


def main(arguments: list[str]) -> int:
    """Run the command as often as asked; 1 if one of the runs fails."""
    options = _parse(arguments)
    try:
        hierarchy = find_hierarchy(options.cgroup_version)
    except NoFreezerError as error:
        print(f"freezing: {error}.", file=sys.stderr)
        return 2
    for number in INTERRUPTS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup does
            signal.signal(number, _interrupt)
    folder: Path = options.logs
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for seed in range(options.seed, options.seed + options.runs):
        pauses = Pauses(seed, options.at_once, options.every, options.mean, options.longest)
        log, output = folder / f"{seed}.log", folder / f"{seed}.out"
        with log.open("w", buffering=1) as said, output.open("wb") as printed:
            try:
                code, count = run(options.command, hierarchy, pauses, said, printed)
            except KeyboardInterrupt:
                print(f"freezing: interrupted, in the run with seed {seed}", flush=True)
                return 130
        if code:
            failed += 1
            told = f"exit code {code}. Output: {output}. Who was frozen when: {log}"
        else:
            log.unlink()
            output.unlink()
            told = "passed"
        print(f"freezing: seed {seed}, {count} times: {told}", flush=True)
    return int(failed > 0)


def run(command: list[str], hierarchy: Hierarchy, pauses: Pauses, log: IO[str], output: IO[bytes]) -> tuple[int, int]:
    """The command's exit code, and how many times a process was frozen."""
    with groups(hierarchy) as top:
        home = top / "running"
        home.mkdir()
        began = time.monotonic()
        # It waits for a line, so that all of it is in the group from the beginning.
        starter = ["sh", "-c", 'read -r _ && exec "$@" </dev/null', "sh", *command]
        with subprocess.Popen(  # a terminal's Ctrl-C is ours to hand on
            starter, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        ) as first:
            over = threading.Event()
            frosts = [Frost(hierarchy, top, number, first.pid, pauses, log, began) for number in range(pauses.at_once)]
            threads = [threading.Thread(target=frost.run, args=(over,), name="frost") for frost in frosts]
            try:
                move(first.pid, home)
                for thread in threads:
                    thread.start()
                assert first.stdin is not None
                first.stdin.write(b"\n")
                first.stdin.close()
                first.wait()
            except BaseException:
                _stop(over, threads)  # thaw first: what is frozen does not end
                _end(first)
                while left := processes_in(home):
                    for process in left:
                        with suppress(ProcessLookupError):
                            os.kill(process, signal.SIGKILL)
                raise
            _stop(over, threads)
        for process in empty(home, hierarchy.folder):
            print(f"freezing: {command[0]} has ended, and left {_describe(process)}", flush=True)
        return first.returncode, sum(frost.count for frost in frosts)


class Frost:
    """Freezes one process after another, in a group of its own."""

    def __init__(
        self, hierarchy: Hierarchy, top: Path, number: int, spared: int, pauses: Pauses, log: IO[str], began: float
    ) -> None:
        self.count = 0
        self._hierarchy, self._home, self._group = hierarchy, top / "running", top / f"frozen-{number}"
        self._spared, self._pauses, self._log, self._began = spared, pauses, log, began
        self._random = random.Random(f"{pauses.seed}/{number}")

    def run(self, over: threading.Event) -> None:
        """Until `over`; then nothing is frozen, and all are where they were."""
        self._group.mkdir()
        draw, pauses = self._random, self._pauses
        while not over.wait(draw.expovariate(1 / pauses.every_s)):
            length = min(pauses.longest_s, draw.expovariate(1 / pauses.mean_s))
            choice = draw.random()
            there = [process for process in processes_in(self._home) if process != self._spared]
            if not there:
                continue
            process = there[int(choice * len(there))]
            who = _describe(process)  # before: what is killed while it is frozen has no name any more
            if not move(process, self._group):
                continue
            try:
                self._hierarchy.freeze(self._group)
                self.count += 1
                now = _describe(process)  # it may have called exec since
                who = now if now != f"{process} " else who
                at = time.monotonic() - self._began
                self._log.write(f"{at:9.3f} s, for {length:.3f} s: {who}\n")
                over.wait(length)
            finally:
                self._hierarchy.thaw(self._group)
                empty(self._group, self._home)


def _describe(process: int) -> str:
    try:
        line = Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        line = b""
    words = line.replace(b"\0", b" ").decode(errors="replace").split()
    return f"{process} {' '.join(words)[:160]}"


def _stop(over: threading.Event, threads: list[threading.Thread]) -> None:
    over.set()
    for thread in threads:
        if thread.ident is not None:
            thread.join()


def _end(first: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does; who does not listen is killed."""
    first.send_signal(signal.SIGINT)
    try:
        first.wait(_END_S)
    except subprocess.TimeoutExpired:
        first.kill()


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    for number in INTERRUPTS:
        signal.signal(number, signal.SIG_IGN)  # what is frozen is to be thawed, however often somebody asks
    raise KeyboardInterrupt


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.freezing.run", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=1, help="with one seed after another")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument(
        "--at-once", type=int, default=3, help="processes that are frozen at the same time, at the most"
    )
    parser.add_argument("--every", type=float, default=0.03, help="seconds between two of them, on average")
    parser.add_argument("--mean", type=float, default=0.1, help="seconds that one is frozen, on average")
    parser.add_argument("--longest", type=float, default=0.6, help="seconds that one is frozen, at the most")
    parser.add_argument("--cgroup-version", type=int, choices=(1, 2), help="of the freezer, where there are both")
    parser.add_argument("--logs", type=Path, default=Path("build/freezing"), help="folder for what failed runs leave")
    parser.add_argument("command", nargs="+", help="after --")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
