"""One rank of one contestant: started once, then measures what the driver asks for, and sleeps on its pipe in between.

Runs under the contestant's own Python. The driver talks to it over a Unix socket in lines of JSON:

    rank 0, 1, ..                        driver
        <- {"pid": 4711}                                 connected to the other ranks
    {"do": "check", "op": .., "num_bytes": ..} ->
        <- {"ok": true}                                  the values are right; or {"not_offered": why}
    {"do": "time", .., "warm_up": 3, "iterations": 200} ->
        <- {"start": 8.25, "end": 8.31}                  of all calls on this rank, on the clock of the host
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import socket
import time
import traceback
from importlib import import_module
from itertools import repeat
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from cases import Case
    from contestants.contract import BoundCall, Contestant

# What launchers call the rank: Open MPI, then MPICH and Intel MPI.
_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


class WrongValuesError(Exception):
    """The contestant computed something else than the operation's result."""


def main() -> None:
    arguments = _parse()
    die_with_parent()
    rank = arguments.rank if arguments.rank is not None else _rank_from_launcher()
    if arguments.pin:
        # Before numpy, torch or MPI start threads: they inherit it.
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    os.environ["OMP_NUM_THREADS"] = "1"
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(arguments.control)
        pipe = control.makefile("rw", encoding="utf-8")

        def answer(**fields: object) -> None:
            print(json.dumps(fields), file=pipe, flush=True)

        try:
            _serve(arguments, rank, pipe, answer)
        except Exception as error:
            traceback.print_exc()  # into the fleet's log
            answer(error=f"rank {rank}: {type(error).__name__}: {error}")
        # Neither MPI's nor torch's exit handlers are part of the question, and a lost peer must not make them hang.
        pipe.close()
        os._exit(0)


def _serve(arguments: argparse.Namespace, rank: int, pipe: IO[str], answer: Callable[..., None]) -> None:
    """Connect, then answer requests until the driver says leave or goes away."""
    from cases import ELEMENT_BYTES, Case
    from contestants.contract import NotOfferedError, Options

    world_size = arguments.world_size
    # One element per rank is the least that the operations which split their buffer can do.
    max_count = max(arguments.max_bytes // ELEMENT_BYTES, world_size)
    options = Options(arguments.variety, arguments.rendezvous_folder)
    module = import_module(f"contestants.{arguments.interface}")
    contestant = module.connect(rank, world_size, max_count, options)
    answer(pid=os.getpid())
    for line in pipe:
        request = json.loads(line)
        if request["do"] == "leave":
            contestant.close()
            return
        case = Case(request["op"], request["num_bytes"], world_size)
        try:
            call = contestant.bind(case)
        except NotOfferedError as reason:
            answer(not_offered=str(reason))
            continue
        if request["do"] == "check":
            check(contestant, call, case, rank)
            answer(ok=True)
        else:
            start, end = timed(contestant, call, request["warm_up"], request["iterations"])
            answer(start=start, end=end)


def check(contestant: Contestant, call: BoundCall, case: Case, rank: int) -> None:
    """Run once on known values and compare every element; leave zeros behind, which a sum in place cannot overflow.

    Raises:
        WrongValuesError: with the first element that is wrong.
    """
    import numpy as np

    call.target.fill(-1)
    call.source[:] = case.source_values(rank)
    contestant.barrier()
    call.run()
    expected = case.target_values(rank)
    wrong = np.flatnonzero(call.target != expected)
    if wrong.size:
        first = int(wrong[0])
        raise WrongValuesError(
            f"{case.op} of {case.num_bytes} B on rank {rank}: element {first} is {call.target[first]}, "
            f"should be {expected[first]}; {wrong.size} of {expected.size} elements are wrong"
        )
    contestant.barrier()
    call.source.fill(0)


def timed(contestant: Contestant, call: BoundCall, warm_up: int, iterations: int) -> tuple[float, float]:
    """Return when the first of the calls began and the last one ended; back to back, all ranks starting together."""
    run = call.run
    for _ in repeat(None, warm_up):
        run()
    contestant.barrier()
    start = time.perf_counter()
    for _ in repeat(None, iterations):
        run()
    return start, time.perf_counter()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends, however that ends: a stopped rank can't see it go."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _rank_from_launcher() -> int:
    for name in _RANK_VARIABLES:
        if name in os.environ:
            return int(os.environ[name])
    raise SystemExit(f"rank.py: no --rank, and mpiexec set none of {', '.join(_RANK_VARIABLES)}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="one rank of one contestant; started by run.py")
    parser.add_argument("--interface", required=True)
    parser.add_argument("--variety", required=True)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("--max-bytes", type=int, required=True)
    parser.add_argument("--rendezvous-folder", required=True)
    parser.add_argument("--control", required=True)
    parser.add_argument("--pin", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
