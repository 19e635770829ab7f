"""`PerRankState` saves each rank's own state in one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from phalanx.checkpoint.peers import Peers


class PerRankState:
    """`PerRankState` is a checkpoint part with each rank's own state, from which that rank resumes bit for bit.

    If another number of ranks loads it, all resume from rank 0's state. With `differ=False` the states are equal: only
    rank 0's is saved, and all ranks resume from it.
    """

    def __init__(
        self, objects: Mapping[str, Any], process_group: dist.ProcessGroup | None, *, differ: bool = True
    ) -> None:
        self._objects, self._process_group, self._differ = objects, process_group, differ
        self.is_collective = differ

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks, on rank 0.

        Rank 0's state is included, too, even if the checkpoint also has "model" and "optimizer" parts: when every rank
        writes shards, those parts may hold another rank's values.
        """
        own = {name: one.state_dict() for name, one in self._objects.items()}
        everyone = Peers(self._process_group).gather(own) if self._differ else [own]
        return {"ranks": everyone} if everyone else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if "ranks" not in state_dict:  # a checkpoint of version 0.1.0 has the state of one object
            self._objects["rounds" if "rounds" in self._objects else "callbacks"].load_state_dict(state_dict)
            return
        ranks = state_dict["ranks"]
        peers = Peers(self._process_group)
        own = ranks[peers.rank if self._differ and len(ranks) == peers.world_size else 0]
        for name, state in own.items():
            self._objects[name].load_state_dict(state)
