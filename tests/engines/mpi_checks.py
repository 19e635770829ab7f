"""What tests/engines/test_mpi.py runs in the ranks of an MPI job."""

import threading
from datetime import timedelta

import torch

from phalanx._comm.backend.rendezvous import launcher
from phalanx._comm.engines.engine import DATA
from phalanx._comm.engines.mpi import EngineClosed, MpiEngine, PeerLeft, start

WAIT = timedelta(seconds=20)


def raised(call):
    """The name and the words of what `call` raises."""
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def engine_checks():
    """All that can go on in one job: starting one takes longer than any of it."""
    runtime = start(launcher())
    everybody = list(range(runtime.size))
    seen = {"place": (runtime.rank, runtime.size), "again": start(launcher()) is runtime}
    engine = MpiEngine(runtime, everybody, runtime.rank, WAIT)
    seen["order"] = in_order(engine)
    seen["anybody"] = from_anybody(engine)
    seen["large"] = large(engine)
    seen["late"] = raised(
        lambda: engine.recv((engine.rank + 1) % engine.world_size, torch.empty(1), 9).wait(timedelta(seconds=0.05))
    )
    seen["tags"] = engine.num_tags > 32767
    sub = None
    if runtime.rank != 1:  # not in the order of MPI's ranks, and without rank 1
        sub = MpiEngine(runtime, [2, 0], [2, 0].index(runtime.rank), WAIT)
        mine, got = torch.tensor([float(sub.rank)]), torch.empty(1)
        pending = [sub.send(1 - sub.rank, mine, 1), sub.recv(1 - sub.rank, got, 1)]
        for one in pending:
            one.wait(WAIT)
        seen["sub-group"] = got.item()
        sub.close()
    seen["closing"] = closing(MpiEngine(runtime, everybody, runtime.rank, WAIT))
    seen["left over"] = left_over(runtime, everybody)
    for _ in range(50):
        MpiEngine(runtime, everybody, runtime.rank, WAIT).close()
    return seen


def in_order(engine):
    right, left = (engine.rank + 1) % engine.world_size, (engine.rank - 1) % engine.world_size
    got = [torch.empty(1) for _ in range(3)]
    pending = [engine.send(right, torch.tensor([float(i)]), 5) for i in range(3)]
    pending += [engine.send(right, torch.tensor([-1.0]), DATA | 5)]
    apart = torch.empty(1)
    pending += [engine.recv(left, apart, DATA | 5), *(engine.recv(left, t, 5) for t in got)]
    for one in pending:
        one.wait(WAIT)
    return [t.item() for t in got] + [apart.item()]


def from_anybody(engine):
    if engine.rank:
        engine.send(0, torch.tensor([float(engine.rank)]), 1).wait(WAIT)
        return None
    seen = {}
    for _ in range(engine.world_size - 1):
        got = torch.empty(1)
        pending = engine.recv_any(got, 1)
        pending.wait(WAIT)
        seen[pending._source_rank()] = got.item()
    return seen


def large(engine):
    """A message that must be asked for, in one direction round the circle, and of no size at all."""
    right, left = (engine.rank + 1) % engine.world_size, (engine.rank - 1) % engine.world_size
    got = torch.empty(1_000_003)
    pending = [engine.send(right, torch.full_like(got, engine.rank), 2), engine.recv(left, got, 2)]
    pending += [engine.send(right, torch.empty(0), 3), engine.recv(left, torch.empty(0), 3)]
    for one in pending:
        one.wait(WAIT)
    return got.unique().tolist() == [float(left)]


def left_over(runtime, everybody):
    """Rank 1 sends what rank 0 never receives; what rank 0 then receives in the next group, which may get the number of
    the first one from MPI.
    """
    got = torch.zeros(1)
    for value in (1.0, 2.0):
        engine = MpiEngine(runtime, everybody, runtime.rank, WAIT)
        if engine.rank == 1:
            engine.send(0, torch.tensor([value]), 7).wait(WAIT)
        elif engine.rank == 0 and value == 2.0:
            engine.recv(1, got, 7).wait(WAIT)
        engine.close()
        while not runtime.sweep():
            pass
    return got.item()


def closing(engine):
    """Rank 0 leaves while the others wait for it, and while it waits itself."""
    if engine.rank:
        try:
            engine.recv(0, torch.empty(1), 1).wait(WAIT)
        except PeerLeft as error:
            engine.close()
            return f"left by {error.peer}"
    closing = threading.Timer(0.1, engine.close)
    closing.start()
    pending = engine.recv(1, torch.empty(1), 1)
    try:
        pending.wait(WAIT)
    except EngineClosed:
        closing.join()
        return raised(lambda: engine.send(1, torch.empty(1), 1))
    return "nothing"
