"""Memory in which arguments and results went is kept by nobody once it was given back."""

import os
import random
import signal
from typing import Any

import pytest
import torch
from tests.rpc.workers import dismiss, join, pid, run_caller, run_workers, until, wait_event, worker

from phalanx import rpc
from phalanx.rpc import current, segments
from phalanx.rpc.unix_connection import UnixConnection

_kept: list[Any] = []


def mapped() -> dict[int, set[int]]:
    """The segments that this worker maps, by the rank of who made them."""
    found: dict[int, set[int]] = {}
    for peer in list(current.agent().peers.values()):
        for connection in (peer.connection, peer.calls_us):
            if isinstance(connection, UnixConnection):
                found.setdefault(peer.member.info.id, set()).update(connection._borrower._maps)
    return found


def made() -> set[int]:
    """Return the segments that this worker has made and not given back."""
    lender = current.agent().connections.lender
    free = {segment.number for free in lender._free.values() for segment in free}
    return free | set(lender._lent)


def keep(tensor: torch.Tensor, most: int) -> torch.Tensor:
    _kept.append(tensor)
    del _kept[: max(0, len(_kept) - most)]
    return tensor * 2


def forget_all() -> None:
    _kept.clear()


def only_what_there_is() -> bool:
    names = ["w0", "w1", "w2"]
    alive = [rpc.rpc_sync(name, made) for name in names]
    return all(numbers <= alive[rank] for name in names for rank, numbers in rpc.rpc_sync(name, mapped).items())


def _segments(rank: int, folder: str) -> int:
    segments.MOST_FREE_BYTES = 1 << 20
    with worker(rank, 3, folder):
        if rank:
            return 0
        rng = random.Random(2)
        for _ in range(150):
            tensor = torch.ones(rng.randint(1 << 14, 1 << 18))
            name = rng.choice(["w1", "w2"])
            assert torch.equal(rpc.rpc_sync(name, keep, (tensor, rng.randint(0, 4))), tensor * 2)
        most = max(made())
        for name in ("w1", "w2"):
            rpc.rpc_sync(name, forget_all)
        until(only_what_there_is)
        return most


@pytest.mark.slow
def test_a_freed_segment_is_unmapped_by_all_receivers():
    """Only the worker that had a segment last heard that it was given back; others kept it mapped, without bound."""
    assert run_workers(_segments, 3)[0] > 20


def _lost(rank: int, folder: str) -> None:
    join(rank, 3, folder)
    if rank == 0:
        tensor = torch.ones(1 << 17)
        rpc.rpc_sync("w1", forget_all, ())
        rpc.rpc_sync("w1", keep, (tensor, 0))
        (number,) = rpc.rpc_sync("w1", mapped)[0]
        until(lambda: not current.agent().connections.lender._lent)
        rpc.rpc_sync("w2", keep, (tensor, 1))  # the same one, which is not given back
        assert set(current.agent().connections.lender._lent) == {number}
        os.kill(rpc.rpc_sync("w2", pid), signal.SIGKILL)
        until(lambda: number not in made() and not rpc.rpc_sync("w1", mapped).get(0))
        dismiss("w1", "end")
    else:
        wait_event("end" if rank == 1 else "never")
    rpc.shutdown(graceful=False)


def test_memory_that_a_lost_worker_had_is_unmapped_by_the_others():
    """It was given up, as that worker might still write to it; the others kept it mapped."""
    run_workers(_lost, 3, lost=[2])


def filled(value, count):
    return torch.full((count,), float(value))


def _lent():
    return len(current.agent().connections.lender._lent)


def _forks():
    draw = random.Random(4)
    for _ in range(6):
        sizes = [draw.choice([100, 1 << 15, 1 << 18, 1 << 20]) for _ in range(4)]
        mine = {number: rpc.rpc_sync("w1", filled, (number, size)) for number, size in enumerate(sizes)}
        told, go = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.read(go[0], 1)
                if all(bool((tensor == number).all()) for number, tensor in mine.items()):
                    for tensor in mine.values():
                        tensor.add_(100)
                    os.write(told[1], b"x")
                    os.read(go[0], 1)
                    status = int(not all(bool((tensor == n + 100).all()) for n, tensor in mine.items()))
            finally:
                os._exit(status)
        os.close(told[1])
        for number in draw.sample(sorted(mine), 2):
            del mine[number]
        others = [rpc.rpc_sync("w1", filled, (50 + turn, sizes[turn % 4])) for turn in range(12)]
        os.write(go[1], b"x")
        assert os.read(told[0], 1) == b"x", "the child did not see what its parent had"
        assert all(bool((tensor == number).all()) for number, tensor in mine.items())
        assert all(bool((tensor == 50 + turn).all()) for turn, tensor in enumerate(others))
        for tensor in (*mine.values(), *others):
            tensor.mul_(-1)
        os.write(go[1], b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for fd in (told[0], *go):
            os.close(fd)
        del mine, others, tensor
    until(lambda: rpc.rpc_sync("w1", _lent) == 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_tensors_of_its_own():
    """It saw the next tensors of other calls in them, and its parent what it wrote."""
    run_caller(_forks, 2)
