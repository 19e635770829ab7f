"""`CallbackRecovery` lets the callbacks of all ranks go on from the latest step, after a rank was lost or has come."""

from __future__ import annotations

import pickle

from phalanx import elastic
from phalanx._comm.backend import rendezvous
from phalanx.checkpoint.peers import Peers
from phalanx.strategies import Strategy
from phalanx.trainer.callbacks import CallbackStates


class CallbackRecovery:
    """It knows which step the callbacks of this rank have behind them, and how they were behind the last of an epoch.

    `called_step` is the step whose `on_step_end` they have behind them.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.called_step = 0
        self._kept: tuple[int, bytes] | None = None  # an epoch, and the callbacks behind its last step

    def keep(self, callbacks: CallbackStates, state: elastic.State) -> None:
        """Keep the states after the last step of an epoch: what comes now is done again if a rank is lost in it."""
        if rendezvous.agent_address() and callbacks:
            self._kept = state.epoch, pickle.dumps(callbacks.state_dict())

    def agree(self, callbacks: CallbackStates, state: elastic.State) -> None:
        """Bring the callbacks to the latest step, where training begins or goes on. All ranks call it.

        A rank that has come, or did not get to the end of that step's `on_step_end`, takes what another one has.
        """
        kept, self._kept = self._kept, None
        if not (self._strategy.is_elastic and callbacks):
            return
        if kept is not None and kept[0] == state.epoch:
            callbacks.load_state_dict(pickle.loads(kept[1]))
        peers = Peers(self._strategy.training_group)
        have = peers.all_gather(self.called_step == state.step)
        if any(have) and not all(have):
            states = peers.broadcast(callbacks.state_dict(), src=have.index(True))
            if not have[peers.rank]:
                callbacks.load_state_dict(states)
        self.called_step = state.step
