"""`CallbackRecovery` restores the callbacks of all ranks to the latest step, after a rank was lost or has joined."""

from __future__ import annotations

import pickle

from phalanx import elastic
from phalanx._comm.backend import rendezvous
from phalanx.checkpoint.peers import Peers
from phalanx.strategies import Strategy
from phalanx.trainer.callbacks import CallbackStates


class CallbackRecovery:
    """`CallbackRecovery` tracks the step that this rank's callbacks have completed, and their states at an epoch's end.

    `called_step` is the step whose `on_step_end` they have_completed completed.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.called_step = 0
        self._saved: tuple[int, bytes] | None = None  # an epoch, and the callbacks' states after its last step

    def save(self, callbacks: CallbackStates, state: elastic.State) -> None:
        """Save the states after the last step of an epoch: all later points are repeated if a rank is lost."""
        if rendezvous.agent_address() and callbacks:
            self._saved = state.epoch, pickle.dumps(callbacks.state_dict())

    def agree(self, callbacks: CallbackStates, state: elastic.State) -> None:
        """Restore the callbacks to the latest step, when training begins or resumes. All ranks call it.

        A rank that has joined, or did not complete that step's `on_step_end`, receives another rank's states.
        """
        saved, self._saved = self._saved, None
        if not (self._strategy.is_elastic and callbacks):
            return
        if saved is not None and saved[0] == state.epoch:
            callbacks.load_state_dict(pickle.loads(saved[1]))
        peers = Peers(self._strategy.training_group)
        have_completed = peers.all_gather(self.called_step == state.step)
        if any(have_completed) and not all(have_completed):
            states = peers.broadcast(callbacks.state_dict(), src=have_completed.index(True))
            if not have_completed[peers.rank]:
                callbacks.load_state_dict(states)
        self.called_step = state.step
