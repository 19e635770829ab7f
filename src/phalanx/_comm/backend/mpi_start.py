"""Start MPI on all ranks of a group or on none: ranks with MPI would wait in MPI_Init for a rank without it."""

from __future__ import annotations

import json
from typing import Any

from phalanx._base.deadline import Deadline
from phalanx._comm.backend.rendezvous import launcher
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx._comm.engines.mpi import Runtime, start, why_not
from phalanx.errors import DeadlineError, PhalanxError

_PAUSE_S = 0.002


def start_together(store: Any, rank: int, world_size: int, group: str, deadline: Deadline) -> tuple[Runtime, list[int]]:
    """Return this rank's MPI, and every rank's number in MPI_COMM_WORLD. `store` belongs to this group alone.

    Raises:
        PhalanxError: some rank has no MPI, or the ranks are in several MPI jobs; all ranks raise the same error.
        DeadlineError: some rank did not join.
    """
    here = f"init_process_group of group {group!r} on rank {rank}"
    problems = _gather_text(store, here, "mpi", rank, world_size, why_not(launcher()), deadline)
    _refuse(here, problems)
    mine: dict[str, Any]
    try:
        runtime = start(launcher())
        mine = {"place": runtime.rank, "problem": ""}
    except PhalanxError as error:
        mine = {"place": -1, "problem": str(error)}
    gathered = [
        json.loads(text) for text in _gather_text(store, here, "place", rank, world_size, json.dumps(mine), deadline)
    ]
    _refuse(here, [one["problem"] for one in gathered])
    places = [one["place"] for one in gathered]
    if len(set(places)) < world_size:
        raise PhalanxError(
            f"{here}: MPI gave these ranks the numbers {places}: they are in different MPI jobs.\n"
            "Start all ranks with one mpiexec."
        )
    return runtime, places


def _refuse(here: str, problems: list[str]) -> None:
    """Raise the most frequent problem, with the ranks that have it."""
    by_text: dict[str, list[int]] = {}
    for r, problem in enumerate(problems):
        if problem:
            by_text.setdefault(problem, []).append(r)
    if by_text:
        text, who = max(by_text.items(), key=lambda item: len(item[1]))
        raise PhalanxError(f"{here}: no MPI on {name_ranks(who)} of {len(problems)}.\n{text}")


def _gather_text(
    store: Any, here: str, what: str, rank: int, world_size: int, words: str, deadline: Deadline
) -> list[str]:
    """Exchange a text between all ranks; return the texts by rank."""
    keys = [f"{what}/{r}" for r in range(world_size)]
    store.set(keys[rank], words)
    if not deadline.wait_until(lambda: store.check(keys), _PAUSE_S):
        missing = tuple(r for r in range(world_size) if not store.check([keys[r]]))
        raise DeadlineError(
            f"{here}: {name_ranks(missing)} of {world_size} did not join within {deadline.timeout_s:.1f} s.\n"
            "Read the log of the missing rank first.",
            missing=missing,
        )
    return [store.get(key).decode() for key in keys]
