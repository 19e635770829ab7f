"""`Position` says where a Trainer is in its run, as a part of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx import elastic
from phalanx.trainer.scalars import Scalars


class Position:
    """`Position` says how far training is, as a part of a checkpoint."""

    def __init__(self, state: elastic.State, scalars: Scalars) -> None:
        self._state, self._scalars = state, scalars

    def state_dict(self) -> dict[str, Any]:
        state = self._state
        where = {"epoch": state.epoch, "step": state.step, "data": state.data_position()}
        return where | {
            "batches": state.batches,
            "data_seeds": list(state.data_seeds),
            "best": list(state.best),
            "metrics": dict(state.metrics),
            "scalars": self._scalars.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = self._state
        state.epoch, state.step = state.saved = state_dict["epoch"], state_dict["step"]
        state.batches = state_dict.get("batches", 0)
        state.data_seeds = tuple(state_dict.get("data_seeds", ()))
        state.best = tuple(state_dict.get("best", ()))
        state.metrics = dict(state_dict["metrics"])
        state.load_data_position(state_dict["data"])
        self._scalars.load_state_dict(state_dict["scalars"])

    def go_on(self, before: elastic.State) -> None:
        """Continue where the last fit ended; in mid-epoch only if the data has the same length."""
        where = Position(before, self._scalars).state_dict()
        data, new = where["data"] or {"consumed": 0}, self._state.data_position() or {"length": -1}
        goes_on = data["consumed"] and data["length"] == new["length"]
        self.load_state_dict(where if goes_on else {**where, "data": None})
        self._state.saved = before.saved
