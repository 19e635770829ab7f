"""A fleet: all ranks of one contestant, started once, stopped by a signal whenever another contestant is measured.

Stopped, because an idle rank may not be idle: MPI and oneCCL have threads that spin while they wait.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import IO

from cases import COPY, UPDATE, Case
from contestants.contract import NotOfferedError
from peers import Peer
from rank import die_with_parent

HERE = Path(__file__).resolve().parent
START_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 5.0
MOST_ITERATIONS = 20_000
LEAST_ITERATIONS = 2
ONE_IS_ENOUGH_S = 1.0  # a contestant that collapsed takes a second and more per call


class FleetError(Exception):
    """A contestant's ranks did not start, died, hung or computed the wrong values."""


def plan_iterations(seconds_per_call: float, budget_s: float) -> int:
    """How many calls fill the budget, within bounds."""
    if seconds_per_call > ONE_IS_ENOUGH_S:
        return 1
    return max(LEAST_ITERATIONS, min(MOST_ITERATIONS, int(budget_s / max(seconds_per_call, 1e-9))))


class Fleet:
    """The ranks of `peer`; a context manager that leaves no process behind."""

    def __init__(self, peer: Peer, world_size: int, max_bytes: int) -> None:
        self.peer = peer
        self._world_size = world_size
        self._max_bytes = max_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="collectives-"))
        self._starters: list[subprocess.Popen[bytes]] = []
        self._pipes: list[tuple[socket.socket, IO[str]]] = []
        self._ranks: list[
            int
        ] = []  # process descriptors: a signal through one can't reach another process with a reused pid
        self._seconds_per_call: dict[Case, float] = {}

    def __enter__(self) -> Fleet:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def check(self, case: Case) -> None:
        """Let every rank check the values of one run.

        Raises:
            FleetError: they are wrong, or a rank died or hung.
            NotOfferedError: there is no such operation here.
        """
        self._signal(signal.SIGCONT)
        try:
            self._ask(case, do="check")
        finally:
            self._signal(signal.SIGSTOP)

    def measure(self, case: Case, budget_s: float) -> float:
        """Return the seconds of one call: the slowest rank's mean over as many calls as fill `budget_s`.

        Raises:
            FleetError: a rank died or hung.
        """
        self._signal(signal.SIGCONT)
        try:
            if case not in self._seconds_per_call:
                # Twice: the first call of a size also makes connections, pins pages, grows pools.
                self._time(case, warm_up=0, iterations=1)
                iterations = plan_iterations(self._seconds_per_call[case], budget_s / 4)
                self._time(case, warm_up=0, iterations=iterations)
            iterations = plan_iterations(self._seconds_per_call[case], budget_s)
            return self._time(case, warm_up=iterations // 10, iterations=iterations)
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ask the ranks to leave, then make sure that they did."""
        self._signal(signal.SIGCONT)
        for _, pipe in self._pipes:
            try:
                print(json.dumps({"do": "leave"}), file=pipe, flush=True)
            except OSError:
                pass  # it died; that was told when it happened
        self._await_exit()
        for starter in self._starters:
            # mpiexec takes its ranks along on SIGTERM; SIGKILL would orphan them.
            if starter.poll() is None:
                starter.terminate()
        self._await_exit()
        self._signal(signal.SIGKILL)
        for starter in self._starters:
            if starter.poll() is None:
                starter.kill()
            starter.wait()
        for connection, pipe in self._pipes:
            try:
                pipe.close()
            except OSError:
                pass  # what could not be sent to a dead rank is still in the buffer
            connection.close()
        for rank in self._ranks:
            os.close(rank)
        self._pipes.clear()
        self._ranks.clear()
        self._starters.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        oversubscribed = self._world_size > len(os.sched_getaffinity(0))
        program = [str(HERE / "rank.py"), "--interface", self.peer.interface, "--variety", self.peer.name]
        program += ["--world-size", str(self._world_size), "--max-bytes", str(self._max_bytes)]
        program += ["--rendezvous-folder", str(self._folder), "--control", str(self._folder / "control")]
        program += [] if oversubscribed else ["--pin"]
        if self.peer.mpiexec is None:
            command = [str(self.peer.python), *program]
            commands = [[*command, "--rank", str(rank)] for rank in range(self._world_size)]
        else:
            commands = [self.peer.command(self._world_size, program, oversubscribed=oversubscribed)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.peer.settings()}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._folder / "control"))
            listener.listen(self._world_size)
            with open(self._folder / "log", "wb") as log:
                for words in commands:
                    # A session of its own: Ctrl-C reaches us, and we end the ranks in order.
                    self._starters.append(
                        subprocess.Popen(
                            words,
                            env=environment,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                            preexec_fn=die_with_parent,
                        )
                    )
            self._accept_ranks(listener)
        self._signal(signal.SIGSTOP)

    def _accept_ranks(self, listener: socket.socket) -> None:
        give_up = time.monotonic() + START_TIMEOUT_S
        while len(self._pipes) < self._world_size:
            readable, _, _ = select.select([listener], [], [], 0.2)
            if readable:
                connection, _ = listener.accept()
                self._pipes.append((connection, connection.makefile("rw", encoding="utf-8")))
            elif any(starter.poll() is not None for starter in self._starters):
                raise self._failure("a rank or its launcher ended before it connected")
            elif time.monotonic() > give_up:
                raise self._failure(
                    f"{len(self._pipes)} of {self._world_size} ranks came within {START_TIMEOUT_S:.0f} s"
                )
        self._ranks = [os.pidfd_open(hello["pid"]) for hello in self._answers(START_TIMEOUT_S)]

    def _time(self, case: Case, *, warm_up: int, iterations: int) -> float:
        answers = self._ask(case, do="time", warm_up=warm_up, iterations=iterations)
        if case.op in (COPY, UPDATE):
            # Nothing holds these ranks together: with more ranks than cores, one may be done before another begins.
            seconds = max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers)
        else:
            seconds = max(answer["end"] - answer["start"] for answer in answers)
        self._seconds_per_call[case] = seconds / iterations
        return self._seconds_per_call[case]

    def _ask(self, case: Case, **request: object) -> list[dict]:
        line = json.dumps({**request, "op": case.op, "num_bytes": case.num_bytes})
        for _, pipe in self._pipes:
            try:
                print(line, file=pipe, flush=True)
            except OSError:
                raise self._failure(f"a rank was gone before {case.op} of {case.num_bytes} B") from None
        answers = self._answers(ANSWER_TIMEOUT_S)
        for answer in answers:
            if "not_offered" in answer:
                raise NotOfferedError(answer["not_offered"])
        return answers

    def _answers(self, timeout_s: float) -> list[dict]:
        """One line from every rank; the first rank that fails ends the wait, since it leaves the others hanging."""
        give_up = time.monotonic() + timeout_s
        waiting = dict(self._pipes)
        answers: list[dict] = []
        while waiting:
            readable, _, _ = select.select(list(waiting), [], [], max(0.0, give_up - time.monotonic()))
            if not readable:
                raise self._failure(f"no answer from {len(waiting)} ranks within {timeout_s:.0f} s")
            for connection in readable:
                try:
                    line = waiting.pop(connection).readline()
                except OSError:
                    line = ""
                answer = json.loads(line) if line else {"error": "a rank died"}
                if "error" in answer:
                    raise self._failure(answer["error"].strip())
                answers.append(answer)
        return answers

    def _failure(self, fact: str) -> FleetError:
        try:
            tail = (self._folder / "log").read_text(encoding="utf-8", errors="replace").strip()[-1500:]
        except OSError:
            tail = ""
        return FleetError(f"{self.peer.name}, {self._world_size} ranks: {fact}" + (f"\n{tail}" if tail else ""))

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            try:
                signal.pidfd_send_signal(rank, number)
            except ProcessLookupError:
                pass

    def _await_exit(self) -> None:
        give_up = time.monotonic() + LEAVE_TIMEOUT_S
        for starter in self._starters:
            try:
                starter.wait(max(0.0, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                return
