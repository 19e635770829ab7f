"""A launcher for tests: ranks that are forked from here, replaced when they end badly, told of each generation.

It speaks the words of `phalanx run` to its ranks (elastic.md), with none of its decisions: whoever is lost is
replaced, or, with `replace=False`, missed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # what a rank needs is imported once, here, as a zygote does it

from phalanx._base.ipc.agent import listen
from phalanx._base.ipc.channel import Channel
from phalanx._base.processes import die_with_parent
from phalanx._job.launch.calls import outcome

Body = Callable[..., Any]
_MOST_LOSSES = 20


@dataclass
class Slot:
    """One rank's place, with the process that is there now."""

    process: BaseProcess
    generation: int
    connection: Channel | None = None
    is_over: bool = False


@dataclass
class Ended:
    """How a job ended: results by slot, the generations it took, and what ranks said of losses."""

    results: list[Any]
    generations: int
    losses: list[dict[str, Any]] = field(default_factory=list)


class SmallAgent:
    """Runs `body(*args)` on `world_size` ranks until all have returned."""

    def __init__(
        self,
        body: Body,
        world_size: int,
        *args: Any,
        folder: Path,
        replace: bool = True,
        end_on_loss: bool = False,
        on_turn: Callable[[SmallAgent], None] | None = None,
    ) -> None:
        self._body, self._args, self._folder, self._replace = body, args, folder, replace
        self._deadline = time.monotonic() + 600.0
        self._num_losses = 0
        self._end_on_loss = end_on_loss
        self.ends: list[str] = []
        self._on_turn = on_turn
        self.generation = 0
        self.losses: list[dict[str, Any]] = []
        self.progress: dict[int, int] = {}
        self._token = os.urandom(8).hex()
        self._name = f"phalanx-test-{os.getpid()}-{os.urandom(4).hex()}"
        self._listener = listen(self._name, 64)
        self._stores: list[int] = []
        self._pending: list[Channel] = []
        self._new_store()
        self.slots: dict[int, Slot] = {}
        for slot in range(world_size):
            self._start(slot, range(world_size))

    def _new_store(self) -> None:
        self._stores.append(os.memfd_create("test-store", os.MFD_CLOEXEC))

    def _environment(self, slot: int, slots: Iterable[int]) -> dict[str, str]:
        """Return what the rank in `slot` finds, in a generation of all of these."""
        slots = sorted(slots)
        rank, world_size = slots.index(slot), len(slots)
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_PORT": "1",
            "MASTER_ADDR": "localhost",
            "PHALANX_STORE": f"/proc/{os.getpid()}/fd/{self._stores[-1]}",
            "PHALANX_STORE_OF": f"{rank}/{world_size}/1/",
            "PHALANX_AGENT": f"{self._name}:{self._token}",
        }
        return {**variables, "PHALANX_GENERATION": str(self.generation)} if self.generation else variables

    def _start(self, slot: int, slots: Iterable[int]) -> None:
        environment = self._environment(slot, slots)
        path = self._folder / f"outcome-{slot}-{self.generation}"
        process = multiprocessing.get_context("fork").Process(
            target=_work, args=(self._body, self._args, environment, path, os.getpid(), self._listener)
        )
        process.start()
        self.slots[slot] = Slot(process, self.generation)

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> Ended:
        """Until every rank has ended well; whatever happens, nothing is left."""
        try:
            while not all(slot.is_over for slot in self.slots.values()):
                if time.monotonic() > self._deadline:
                    raise TimeoutError(f"generation {self.generation}: still running\n{self._stacks()}")
                self._turn()
            results = [self._result(number) for number in sorted(self.slots)]
            return Ended(results, self.generation, self.losses)
        finally:
            self._close()

    def _turn(self) -> None:
        running = {s.process.sentinel: n for n, s in self.slots.items() if not s.is_over}
        links = {s.connection: n for n, s in self.slots.items() if s.connection is not None}
        ready, _, _ = select.select([self._listener, *self._pending, *links, *running], [], [], 0.05)
        for one in ready:
            if one is self._listener:
                self._pending.append(Channel(self._listener.accept()[0]))
            elif one in self._pending:
                self._pending.remove(one)
                self._admit(one)
            elif one in links:
                self._hear(links[one], one)
        if self._on_turn is not None:
            self._on_turn(self)
        gone = [n for n in running.values() if self.slots[n].process.exitcode is not None]
        bad = [n for n in gone if not self._ended_well(n)]
        for number in gone:
            if number not in bad:
                self.slots[number].is_over = True
        if bad:
            self._lose(bad)

    def _admit(self, connection: Channel) -> None:
        heard = connection.receive()
        message = {} if heard is None else heard.content
        if heard is not None:
            heard.close()
        slot = next((s for s in self.slots.values() if s.process.pid == message.get("pid")), None)
        if message.get("kind") != "elastic" or slot is None:
            connection.close()
            return
        slot.connection = connection
        connection.put({"kind": "welcome", "generation": self.generation})
        if message["generation"] < self.generation:
            self._tell(next(n for n, s in self.slots.items() if s is slot))

    def _hear(self, number: int, connection: Channel) -> None:
        for message, _ in connection.receive_available():
            if message["kind"] == "lost":
                self.losses.append({**message, "slot": number})
                self._require_cause()
            elif message["kind"] == "waiting":
                connection.put({"kind": "wait"})
        if connection.gone:
            connection.close()
            self.slots[number].connection = None

    def _require_cause(self) -> None:
        """Ranks that all leave a generation, of which none is lost, disagree: nobody here would begin another."""
        if self._end_on_loss:
            return
        told = {loss["slot"]: loss["error"] for loss in self.losses if loss["generation"] == self.generation}
        if set(told) == set(self.slots) and all(slot.process.is_alive() for slot in self.slots.values()):
            raise RuntimeError(f"all ranks have left generation {self.generation}, and none was lost: {told}")

    def _tell(self, number: int) -> None:
        slot = self.slots[number]
        if slot.connection is None:
            return
        message = {
            "kind": "generation",
            "generation": self.generation,
            "rank": sorted(self.slots).index(number),
            "world_size": len(self.slots),
            "environment": self._environment(number, self.slots),
        }
        slot.connection.put(message)

    def regroup(self, *, add: int = 0) -> None:
        """Begin a generation, with `add` ranks more."""
        self.generation += 1
        self._new_store()
        first = max(self.slots) + 1
        slots = [*self.slots, *range(first, first + add)]
        for slot in slots[len(self.slots) :]:
            self._start(slot, slots)
        for number in self.slots:
            self._tell(number)

    def _lose(self, bad: list[int]) -> None:
        self._num_losses += len(bad)
        if self._end_on_loss:
            for number in bad:
                self.ends.append(self._outcome_text(number))
                self._remove(number)
            for slot in self.slots.values():
                if slot.connection is not None:
                    slot.connection.put({"kind": "end", "code": 75, "why": "too few ranks"})
            return
        raised = [n for n in bad if outcome.read(self._path(n), n) is not None]
        if raised or self._num_losses > _MOST_LOSSES:
            raise RuntimeError("\n".join(self._outcome_text(n) for n in raised or bad))
        self.generation += 1
        self._new_store()
        replaced = bad if self._replace else []
        for number in bad:
            self._remove(number)
        slots = [*self.slots, *replaced]
        for number in replaced:
            self._start(number, slots)
        for number in self.slots:
            self._tell(number)

    def _remove(self, number: int) -> None:
        self._end(self.slots.pop(number))

    # -- the end -------------------------------------------------------------------------------------------------

    def _path(self, number: int) -> Path:
        return self._folder / f"outcome-{number}-{self.slots[number].generation}"

    def _ended_well(self, number: int) -> bool:
        told = outcome.read(self._path(number), number)
        return told is not None and not told.failed

    def _outcome_text(self, number: int) -> str:
        told = outcome.read(self._path(number), number)
        return f"rank {number}: {told.text if told else self.slots[number].process.exitcode}"

    def _result(self, number: int) -> Any:
        told = outcome.read(self._path(number), number)
        assert told is not None
        return told.result

    def _stacks(self) -> str:
        texts = []
        for slot in self.slots.values():
            if slot.process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(slot.process.pid, signal.SIGUSR2)
        time.sleep(0.5)
        for path in sorted(self._folder.glob("*.stack")):
            texts.append(f"{path.name}\n{path.read_text()}")
        return "\n".join(texts)

    def _end(self, slot: Slot) -> None:
        """End a rank and what it has started: a forkserver and its workers outlive a rank that was killed."""
        if slot.process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(slot.process.pid, signal.SIGKILL)
            slot.process.kill()
        slot.process.join()
        slot.process.close()
        if slot.connection is not None:
            slot.connection.close()

    def _close(self) -> None:
        for slot in self.slots.values():
            self._end(slot)
        for connection in self._pending:
            connection.close()
        self._listener.close()
        for fd in self._stores:
            os.close(fd)


def run_twice(body: Body, world_size: int, job: Any, *args: Any, folder: Path) -> tuple[Ended, Ended]:
    """Return how a job ends that nobody disturbs, in FOLDER/quiet, and how with its strikes, in FOLDER/struck."""
    ends = []
    for name, strikes in (("quiet", ()), ("struck", job.strikes)):
        (folder / name).mkdir()
        own = dataclasses.replace(job, folder=str(folder / name), strikes=strikes)
        ends.append(SmallAgent(body, world_size, own, *args, folder=folder / name).run())
    assert [end.generations for end in ends] == [0, len(job.strikes)]
    return ends[0], ends[1]


def _work(
    body: Body, args: tuple[Any, ...], environment: dict[str, str], path: Path, parent: int,
    listener: socket.socket,
) -> None:  # fmt: skip
    die_with_parent(parent)
    os.setpgrp()
    listener.close()
    os.environ.pop("PHALANX_GENERATION", None)
    os.environ.update(environment)
    torch.set_num_threads(1)
    with open(f"{path}.stack", "w") as stack:
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGUSR2, stack)
        told = outcome.call(int(environment["RANK"]), lambda: body(*args))
        outcome.write(path, told, pickle.dumps)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
