"""Calls without a pause while workers are killed and come again: `python -m tests.rpc.soak --seconds 300`.

Every call has a number. Who carries it out counts it in memory that all processes share, so that at the end it is known
of each call whether it was answered or failed, and how often it ran: answered ones once, failed ones at most once.
"""

from __future__ import annotations

import argparse
import collections
import mmap
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.futures import Future

from phalanx import rpc
from phalanx.errors import PhalanxError

_BATCH_S = 0.01
_TENSOR_EVERY = 50  # calls; its memory goes through a segment
_runs: mmap.mmap | None = None


@dataclass
class Report:
    """What happened to the calls."""

    answered: int = 0
    failed: int = 0
    lost: int = 0  # neither
    run_twice: int = 0
    answered_without_run: int = 0
    kills: int = 0
    seconds: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    memory_bytes: list[int] = field(default_factory=list)  # of the caller, over time

    @property
    def per_second(self) -> float:
        """Calls that were answered or failed."""
        return (self.answered + self.failed) / self.seconds

    @property
    def growth_bytes(self) -> int:
        """How much more memory the caller had in the last quarter than in the second one, at the least of each."""
        quarter = max(1, len(self.memory_bytes) // 4)
        return min(self.memory_bytes[-quarter:]) - min(self.memory_bytes[quarter : 2 * quarter] or self.memory_bytes)


def execute(number: int, tensor: torch.Tensor | None = None) -> int:
    """The function that is called: counts that it ran."""
    assert _runs is not None
    _runs[number] += 1
    return number + (0 if tensor is None else int(tensor[0]))


def _serve(name: str, number: int, folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _init(name, number, folder)
    signal.pause()


def _init(name: str, number: int, folder: str) -> None:
    options = rpc.RpcBackendOptions(init_method=f"file://{folder}/store", rpc_timeout=60)
    rpc.init_rpc(name, rank=number, rpc_backend_options=options)


def _nursery(pipe: Any, folder: str) -> None:
    """Starts workers, being a process without threads; and ends them all."""
    children: dict[int, multiprocessing.Process] = {}
    while (asked := pipe.recv()) is not None:
        number = asked
        if number in children:
            os.kill(children[number].pid, signal.SIGKILL)  # type: ignore[arg-type]
            children[number].join()
        children[number] = multiprocessing.Process(target=_serve, args=(f"s{number}", number, folder))
        children[number].start()
    for child in children.values():
        child.kill()
        child.join()


class _Caller:
    """The calls, and what became of them."""

    def __init__(self, most_calls: int) -> None:
        self.report = Report()
        self.under_way = 0
        self._outcomes = mmap.mmap(
            -1, most_calls
        )  # shared, though with nobody: it is none of the memory that is looked at
        self._reasons: collections.Counter[str] = collections.Counter()
        self._number = 0
        self._tensor = torch.ones(1 << 15)

    def call(self, to: str) -> None:
        """Make the next call."""
        number, self._number = self._number, self._number + 1
        tensor = self._tensor if number % _TENSOR_EVERY == 0 else None
        try:
            future = rpc.rpc_async(to, execute, (number, tensor))
        except (PhalanxError, ValueError) as error:
            self._fail(number, error)
            return
        future.add_done_callback(lambda done: self._done(number, done))

    def _done(self, number: int, done: Future[Any]) -> None:
        try:
            value = done.value()
        except Exception as error:
            self._fail(number, error)
        else:
            assert value in (number, number + 1)
            self._outcomes[number] += 1

    def _fail(self, number: int, error: Exception) -> None:
        self._outcomes[number] += 2
        self._reasons[type(error).__name__] += 1

    def finish(self) -> Report:
        """Wait for the last answer, and count."""
        end = time.monotonic() + 60
        # Not until none is under way: one that has failed is told so by the reader, which may be about to.
        while self._outcomes.find(b"\0", 0, self._number) >= 0 and time.monotonic() < end:
            time.sleep(0.01)
        report = self.report
        assert _runs is not None
        outcomes, all_runs = self._outcomes[: self._number], _runs[: self._number]
        for outcome, runs in zip(outcomes, all_runs, strict=True):
            report.answered += outcome == 1
            report.failed += outcome == 2
            report.lost += outcome not in (1, 2)
            report.answered_without_run += outcome == 1 and runs == 0
            report.run_twice += runs > 1
        report.reasons = dict(self._reasons)
        return report


def soak(seconds: float, rate: int, servers: int = 2, kill_every_s: float = 1.0, seed: int = 0) -> Report:
    """`rate` calls a second for so long, to `servers` workers, one of which is killed every `kill_every_s` seconds."""
    global _runs
    most_calls = int(seconds * rate * 1.5) + 1000
    _runs = mmap.mmap(-1, most_calls)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pipe, far = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        nursery = context.Process(target=_nursery, args=(far, folder))
        nursery.start()
        try:
            for number in range(1, servers + 1):
                pipe.send(number)
            _init("caller", 0, folder)
            try:
                report = _run(_Caller(most_calls), pipe, seconds, rate, servers, kill_every_s, chance)
            finally:
                rpc.shutdown(graceful=False)
        finally:
            pipe.send(None)
            nursery.join()
        return report


def _run(
    caller: _Caller, pipe: Any, seconds: float, rate: int, servers: int, kill_every_s: float, chance: random.Random
) -> Report:
    report = caller.report
    for number in range(1, servers + 1):
        _await(f"s{number}")
    begin = now = time.monotonic()
    due, next_kill, next_look, down = begin, begin + kill_every_s, begin, 0
    while now - begin < seconds:
        for _ in range(int(rate * _BATCH_S)):
            caller.call(f"s{chance.randint(1, servers)}")
        due += _BATCH_S
        if now >= next_look:
            next_look += max(0.1, seconds / 100)
            report.memory_bytes.append(_memory())
        if now >= next_kill:
            next_kill = now + kill_every_s * chance.uniform(0.5, 1.5)
            if not down or _is_there(f"s{down}"):  # one after the other: the last one is back
                down = chance.randint(1, servers)
                pipe.send(down)
                report.kills += 1
        now = time.monotonic()
        if due > now:
            time.sleep(due - now)
        elif now - due > 1.0:  # the machine is too slow for the rate: do not try to make up for it
            due = now
        now = time.monotonic()
    report.seconds = now - begin
    caller.finish()
    return report


def _is_there(name: str) -> bool:
    try:
        return rpc.rpc_sync(name, os.getpid, timeout=5) > 0
    except (PhalanxError, ValueError):
        return False


def _await(name: str) -> None:
    end = time.monotonic() + 60
    while not _is_there(name):
        if time.monotonic() > end:
            raise AssertionError(f"{name} did not come")
        time.sleep(0.01)


def _memory() -> int:
    with open("/proc/self/statm") as file:
        fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE  # less what is shared: segments are, and are bounded


def main() -> int:
    """Zero if no call was lost, or ran twice, and memory is flat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rate", type=int, default=10_000)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--kill-every", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    report = soak(given.seconds, given.rate, given.servers, given.kill_every, given.seed)
    print(
        f"{report.answered} answered, {report.failed} failed {report.reasons}, {report.lost} lost, "
        f"{report.run_twice} ran twice, {report.answered_without_run} answered and did not run; "
        f"{report.per_second:.0f} calls/s for {report.seconds:.0f} s, {report.kills} kills; memory of the caller "
        f"{report.memory_bytes[0] >> 20} MiB at first, {report.memory_bytes[-1] >> 20} at last, "
        f"{report.growth_bytes / (1 << 20):+.1f} from the second quarter to the last"
    )
    wrong = report.lost or report.run_twice or report.answered_without_run
    return 1 if wrong or report.growth_bytes > 16 << 20 else 0


if __name__ == "__main__":
    # Functions are pickled by the name of their module, which must be the same in all processes.
    from tests.rpc import soak as module

    sys.exit(module.main())
