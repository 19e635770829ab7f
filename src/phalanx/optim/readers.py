"""Ranks that share parameters load new values when no rank reads the old ones any more, and not before."""

from __future__ import annotations

import torch.distributed as dist

from phalanx._base.deadline import Deadline
from phalanx._base.log import get_logger
from phalanx._comm.backend.shared import sharing_group
from phalanx._comm.diagnostics.flight_recorder import read_position
from phalanx._comm.diagnostics.rank_list import name_ranks
from phalanx.optim.rank_words import RankWords

_LOADS = 1 << 20  # a word is this times the number of collectives that the rank has called, plus the loads since
_FIRST_LOOK_S, _LONGEST_LOOK_S = 20e-6, 1e-3
_PATIENCE_S = 10.0

_logger = get_logger(__name__)


class Readers:
    """`Readers` are the ranks of `group`, which may read parameters that all of them share. All ranks make it together.

    A rank says in a word how many loads it has begun. It reads nothing any more once it has begun the same load, or
    while it waits in a collective that this rank has not called yet: where one rank loads, and the others meet it in a
    barrier.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._words = RankWords(group)
        self._last = 0

    def await_others(self) -> None:
        """Wait until no other rank reads what this rank is about to overwrite, for ten seconds at most."""
        ours = sharing_group(self._group)
        if ours is None or ours.symm_mem.closed:
            return
        core, rank = ours.symm_mem.core, self._group.rank()
        number = self._last = max(self._last, core.seq * _LOADS) + 1
        self._words.store(number)

        def reads(other: int) -> bool:
            if self._words.load(other) >= number or not core.alive(other):
                return False
            position = read_position(core, other)
            return not (position.inside and position.seq > core.seq)

        others = [other for other in range(self._group.size()) if other != rank]
        if not Deadline.after(_PATIENCE_S).wait_until(
            lambda: not any(map(reads, others)), _FIRST_LOOK_S, _LONGEST_LOOK_S
        ):
            late = tuple(filter(reads, others))
            _logger.warning(
                "load_state_dict on rank %d: all ranks of this host share the parameters, and %s may still read them: "
                "it has not called load_state_dict, and waits in no collective. The load goes on after %.0f s.",
                rank,
                name_ranks(late),
                _PATIENCE_S,
            )
