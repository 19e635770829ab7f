"""Choose which checkpoint of a run is loaded: the latest, that of a step, or the best; all ranks choose the same."""

from __future__ import annotations

from phalanx.checkpoint.best import Best
from phalanx.checkpoint.history import Entry, History
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.remote_history import RemoteHistory
from phalanx.errors import CheckpointError


def require_best(history: History | RemoteHistory, what: str) -> Best:
    """Return the metric by which the best checkpoints are kept.

    Raises:
        ValueError: the manager, whose method is `what`, was made without `keep_best`.
    """
    if history.best is None:
        raise ValueError(f"{what}: which one is the best? Make the manager with keep_best=('accuracy', 'max', 3), say")
    return history.best


def best_entries(history: History | RemoteHistory, what: str) -> list[Entry]:
    """Return the best checkpoints, the very best first, as this rank sees them.

    Raises:
        ValueError: as `require_best`.
    """
    return require_best(history, what).order_newest_first(history.entries(), history.metrics_of)


def choose(peers: Peers, history: History | RemoteHistory, place: object, step: int | None, *, best: bool) -> list[str]:
    """Return the names of the checkpoints to try, in order, on every rank; rank 0's folder counts. All ranks call it.

    Arguments:
        place: the folder or the address, for errors.

    Raises:
        CheckpointError: the folder cannot be read, rank 0 does not see what others see, or none is of that step or has
            that metric; on every rank.
    """
    problem, cause, mine, chosen = None, None, list[Entry](), list[Entry]()
    try:
        mine = history.entries()
        chosen = [entry for entry in mine if step is None or entry.step == step]
        if best and peers.is_first:
            chosen = [entry for entry in best_entries(history, peers.what) if entry in chosen]
    except Exception as error:
        fact = (error.strerror or str(error)) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        problem, cause = f"{peers.what} on rank {peers.rank}: {place}: {fact}.", error
    told = peers.all_gather((problem, [entry.path.name for entry in chosen]))
    problem, names = told[0]
    if problem is not None:
        raise CheckpointError(problem) from cause
    if best and not names and (steps := peers.broadcast([entry.step for entry in mine])):
        raise CheckpointError(
            f"{peers.what}: no checkpoint in {place} was saved with the metric "
            f"{require_best(history, peers.what).metric!r}; there are those of steps "
            f"{', '.join(map(str, sorted(set(steps))))}."
        )
    elsewhere = [rank for rank, (_, theirs) in enumerate(told) if theirs]
    if not names and elsewhere:
        raise CheckpointError(
            f"{peers.what}: rank {elsewhere[0]} sees checkpoints in {place}, and rank 0, which reads them, "
            "does not: the hosts do not share this folder. Mount it on rank 0's host, or start the job there."
        )
    if not names and step is not None:
        steps = peers.broadcast(sorted({entry.step for entry in mine}))
        raise CheckpointError(
            f"{peers.what}: there is no checkpoint of step {step} in {place}; there are those of steps "
            f"{', '.join(map(str, steps)) or 'none'}."
        )
    return names
