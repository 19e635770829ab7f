"""What takes part in every call: a distributed backward builds on it."""

import contextlib

import torch
from tests.rpc.workers import run_workers, same, worker

from phalanx import rpc
from phalanx.rpc import call_hook, current, start


class _Notes:
    """Notes what it sees, on both sides."""

    def __init__(self):
        self.seen = []
        self.inside = False

    def on_request(self, to, payload):
        self.seen.append(("request", to.info.name, [tuple(t.shape) for t in payload.tensors]))
        return len(payload.tensors) or None

    @contextlib.contextmanager
    def receive_request(self, note, arrived, caller):
        self.seen.append(
            ("run", caller.info.name, note, arrived.requires_grad, [t.requires_grad for t in arrived.tensors])
        )
        self.inside = True
        yield
        self.inside = False

    def on_reply(self, to, payload, note):
        self.seen.append(("reply", to.info.name, note, [tuple(t.shape) for t in payload.tensors]))
        return "back"

    def receive_reply(self, note, arrived, callee):
        self.seen.append(("answer", callee.info.name, note, arrived.requires_grad))


_notes = _Notes()


def _seen():
    seen, _notes.seen = _notes.seen, []
    return seen


def _is_inside(*tensors):
    return _notes.inside


def _look(rank, folder):
    start.on_start.append(lambda agent: call_hook.set_call_hook(_notes))  # after that of phalanx.rpc.autograd
    with worker(rank, 2, folder):
        if rank:
            return
        a, b = torch.ones(2, requires_grad=True), torch.ones(3)
        back = rpc.rpc_sync("w1", same, (a, b))
        assert [t.requires_grad for t in back[0]] == [False, False], "who reads the note attaches them"
        assert _seen() == [("request", "w1", [(2,), (3,)]), ("answer", "w1", "back", [False, False])]
        assert rpc.rpc_sync("w1", _is_inside, (b,)) is True
        rref = rpc.remote("w1", same, (b,))
        assert rref.to_here().tolist() == [1, 1, 1]
        theirs = rpc.rpc_sync("w1", _seen)
        assert ("run", "w0", 2, [True, False], [False, False]) in theirs
        assert rpc.rpc_sync("w1", _is_inside) is False, "without a note there is no context"


def test_a_hook_sees_the_tensors_of_calls_on_both_sides():
    run_workers(_look, 2)


def _extend(rank, folder):
    start.on_start.append(lambda agent: agent.controls.update(whoami=lambda member, argument: (member.info, argument)))
    with worker(rank, 2, folder):
        agent = current.agent()
        other = agent.membership.find(f"w{1 - rank}")
        assert agent.control(other, "whoami", "x").wait() == (agent.me.info, "x")


def test_what_is_built_on_rpc_adds_controls_before_anybody_can_call():
    run_workers(_extend, 2)
