"""These functions say what becomes of an elastic job that has lost ranks, in words for the user."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx._job.agent.elastic_actions import LostRank


def describe_loss(lost: Sequence[LostRank], num_forked: int, world_size: int, replaced: str) -> str:
    """Return which ranks are lost, and what is done: so many are forked, or so many that are left go on.

    replaced: how many replacements there were, and may be; empty where there is no limit.
    """
    said = [f"rank {each.rank} (pid {each.pid}) is lost: {each.why}" for each in lost]
    if not num_forked:
        then = f"{world_size} ranks go on without"
    else:
        left = f" ({replaced})" if replaced else ""
        then = f"A replacement is started{left}" if num_forked == 1 else f"{num_forked} are replaced{left}"
    return f"phalanx run: {'; '.join(said)}. {then}"


def describe_regrouped(lost: Sequence[LostRank], num_ranks: int, now: float) -> str:
    """Return how many ranks go on, and how long after the loss."""
    return (
        f"phalanx run: {num_ranks} rank{'s' * (num_ranks > 1)} go{'es' * (num_ranks == 1)} on, "
        f"{now - min(each.at for each in lost):.2f} s after the loss"
    )
