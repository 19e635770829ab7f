"""A server's decisions where trainers pull, push, leave and die in generated order, against a small model."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo  # every optimizer loads it, and it leaves a variable behind

from phalanx.errors import ClosedError, PhalanxError
from phalanx.parameter_server.hosted_shard import HostedShard
from phalanx.parameter_server.shard import PushedGradients, Spec, TrainerLostError


class Agent:
    """What a server asks of its worker: who is lost."""

    def __init__(self):
        self.me = SimpleNamespace(info=SimpleNamespace(name="s", id=9), uid=9)
        self._uids = {}  # by name
        self._lost = set()  # by uid
        self.membership = SimpleNamespace(find=self.find, find_lost=lambda name: None, host_of=lambda name: "here")

    def find(self, name):
        info = SimpleNamespace(name=name, id=int(name) if name.isdigit() else 9)
        return SimpleNamespace(info=info, uid=self.uid(name))

    def uid(self, name):
        return self._uids.setdefault(name, len(self._uids))

    def lose(self, name):
        self._lost.add(self.uid(name))

    def replace(self, name):
        """Another worker takes the name of a lost one."""
        self._uids[name] = 100 + self.uid(name)

    def peer(self, member):
        return SimpleNamespace(lost=self.why_lost(member.uid), connection="it is watched")

    def watch(self, members):
        """All are watched."""

    def why_lost(self, uid):
        return "it was killed." if uid in self._lost else ""


class Model:
    """How far each trainer is, and what a server has applied."""

    def __init__(self, trainers, bound):
        self.bound = bound  # None: synchronous
        self.clocks = dict.fromkeys(trainers, 0)
        self.there = set(trainers)  # not left
        self.lost = set()
        self.step = 0

    def advance(self):
        while any(c > self.step for c in self.clocks.values()) and all(self.clocks[t] > self.step for t in self.there):
            self.step += 1

    def expect(self, trainer):
        """What becomes of a request of this trainer: True, False (it waits) or an error."""
        clock = self.clocks[trainer]
        if self.bound is not None:
            return all(clock - self.clocks[t] <= self.bound for t in self.there - self.lost)
        if self.step >= clock:
            return True
        return TrainerLostError if any(self.clocks[t] <= self.step for t in self.lost & self.there) else False

    def applied(self):
        return [c if self.bound is not None else min(c, self.step) for c in self.clocks.values()]


def play(seed):
    """One interleaving; gives back how far anybody was ahead."""
    chance = random.Random(seed)
    trainers = [str(number) for number in range(chance.randint(1, 4))]
    bound = chance.choice([None, None, 0, 1, 3])
    spec = Spec("p", ("s",), tuple(trainers), bound is None, bound, partial(torch.optim.SGD, lr=1.0),
                partial(torch.optim.SGD, lr=1.0), "sum", False, "")  # fmt: skip
    agent, model = Agent(), Model(trainers, bound)
    hosted = HostedShard(agent, "p", 0)
    start = {"step": 0, "dense": {"d": torch.zeros(len(trainers))}, "tables": {}, "optimizer": {}}
    hosted.request(partial(hosted.create, spec, start))
    asked, replaced, ahead = {}, set(), 0
    for _ in range(60):
        idle = [one for one in trainers if one in model.there - model.lost and one not in asked]
        what = chance.choice(
            ["pull", "push", "push", "push", "leave", "die", "late", "replace", "attach"]
            if chance.random() < 0.1
            else ["pull", "push"]
        )
        if what == "die" and model.there - model.lost:
            gone = chance.choice(sorted(model.there - model.lost))
            agent.lose(gone)
            model.lost.add(gone)
            replaced.discard(gone)
            asked.pop(gone, None)
            hosted.answer_requests()
        elif what == "replace" and model.lost - replaced:  # the worker that was lost stays lost
            back = chance.choice(sorted(model.lost - replaced))
            agent.replace(back)
            replaced.add(back)
        elif what == "attach" and model.lost & replaced:  # from now on its replacement is the trainer
            back = chance.choice(sorted(model.lost & replaced))
            attached = hosted.request(partial(hosted.attach, back, agent.uid(back), ""))
            assert attached.done() == (back in model.there)  # one that had left waits for the next of the name
            if back in model.there:
                assert attached.value() == (model.clocks[back], 0)
                model.lost.discard(back)
        elif idle:
            trainer = chance.choice(idle)
            clock = model.clocks[trainer]
            gradient = torch.zeros(len(trainers))
            gradient[int(trainer)] = 1
            if what == "leave" and len(model.there) > 1:
                hosted.request(partial(hosted.write, ("leave", trainer)))
                model.there.discard(trainer)
            elif what == "late":  # a push that is made again: its answer was lost
                again = clock and hosted.request(
                    partial(hosted.push, trainer, clock - 1, PushedGradients({"d": gradient}, {}))
                )
                assert not clock or again.value() is None
            elif what == "pull":
                asked[trainer] = what, hosted.request(partial(hosted.pull, trainer, clock, ["d"], {}))
            elif what == "push":
                asked[trainer] = (
                    what,
                    hosted.request(partial(hosted.push, trainer, clock, PushedGradients({"d": gradient}, {}))),
                )
        model.advance()
        changed = True
        while changed:  # one answer may be what another waits for
            changed = False
            for trainer, (what, future) in list(asked.items()):
                expected = model.expect(trainer)
                if expected is False:
                    continue
                del asked[trainer]
                if expected is not True:
                    with pytest.raises(expected, match="is lost"):
                        future.value()
                    continue
                assert future.done(), (seed, trainer, what)
                if what == "push":
                    model.clocks[trainer] += 1
                    model.advance()
                    changed = True
                others = [model.clocks[t] for t in model.there - model.lost]
                ahead = max(ahead, model.clocks[trainer] - min(others, default=0)) if bound is not None else ahead
        for trainer, (what, future) in asked.items():
            assert not future.done(), (seed, trainer, what)
        found = hosted._shard.state()["dense"]["d"]
        assert (-found).tolist() == model.applied(), seed
    return bound, ahead


@pytest.mark.slow
def test_pulls_and_pushes_are_answered_when_the_model_says_so_and_never_before():
    """Who pushed without a pull ran ahead of any bound, and a server kept all its gradients."""
    furthest = {}
    for seed in range(150):
        bound, ahead = play(seed)
        if bound is not None:
            furthest[bound] = max(furthest.get(bound, 0), ahead)
    assert furthest == {bound: bound + 1 for bound in (0, 1, 3)}, "as far as the bound, and no further"


class Failing(torch.optim.SGD):
    """An optimizer that raises where a gradient is large."""

    def step(self, closure=None):
        if any(float(p.grad.sum()) > 100 for group in self.param_groups for p in group["params"]):
            raise ArithmeticError("too much")
        super().step(closure)


def test_the_failure_of_an_optimizer_reaches_all_trainers_until_a_state_is_loaded():
    """The trainer whose push came last heard of it; the others waited until their calls ran out of time."""
    make = partial(Failing, lr=1.0)
    spec = Spec("p", ("s",), ("0", "1"), True, None, make, make, "sum", False, "")
    hosted = HostedShard(Agent(), "p", 0)
    start = {"step": 0, "dense": {"d": torch.zeros(2)}, "tables": {}, "optimizer": {}}
    hosted.request(partial(hosted.create, spec, start))

    def push(trainer, clock, value):
        gradients = PushedGradients({"d": torch.full((2,), value)}, {})
        return hosted.request(partial(hosted.push, trainer, clock, gradients))

    assert push("0", 0, 1.0).value() is None
    waits = hosted.request(partial(hosted.pull, "0", 1, ["d"], {}))
    failed = push("1", 0, 1000.0)
    group = "dense", {"params": ["later"]}, {}, "later"
    added = [hosted.request(partial(hosted.add, trainer, 0, 0, *group)) for trainer in "10"]
    for future in (failed, waits, push("0", 1, 1.0), *added):
        with pytest.raises(PhalanxError, match=r"server 's' could not make step 0: ArithmeticError: too much\nThe par"):
            future.value()
    for trainer, state in (("0", start), ("1", None)):
        hosted.request_load(trainer, 1)
        loaded = hosted.request(partial(hosted.load, trainer, 1, state))
    assert loaded.value()[0] == 0
    for trainer in "01":
        assert push(trainer, 0, 1.0).value() is None
    assert hosted._shard.state()["dense"]["d"].tolist() == [-2, -2]


def test_a_replica_gets_a_failed_step_and_a_later_one_its_failure():
    """The failed push had a number that the replica never got: all that came after it waited there for ever.

    And a replica that was made after the failure took over as if there had been none.
    """
    make = partial(Failing, lr=1.0)
    spec = Spec("p", ("s", "r"), ("0",), True, None, make, make, "sum", True, "")
    agent, others = Agent(), Agent()
    others.me = SimpleNamespace(info=SimpleNamespace(name="r", id=8), uid=8)
    primary = HostedShard(agent, "p", 0)
    replica = HostedShard(others, "p", 0)

    def send(to, function, arguments):
        done = getattr(replica, function.__name__)(*arguments[2:])
        if done is None:
            done = torch.futures.Future()
            done.set_result(None)
        return done

    primary._send = send
    start = {"step": 0, "dense": {"d": torch.zeros(2)}, "tables": {}, "optimizer": {}}
    assert primary.request(partial(primary.create, spec, start)).value() is None

    def push(clock, value):
        gradients = PushedGradients({"d": torch.full((2,), value)}, {})
        return primary.request(partial(primary.push, "0", clock, gradients))

    with pytest.raises(PhalanxError, match="could not make step 0: ArithmeticError"):
        push(0, 1000.0).value()
    assert replica._number == primary._number == 1
    replica = HostedShard(others, "p", 0)
    primary._choose_replica()
    others.lose("s")
    replica.on_lost(SimpleNamespace(uid=9, info=SimpleNamespace(name="s")))
    with pytest.raises(PhalanxError, match="could not make step 0: ArithmeticError"):
        replica.request(partial(replica.pull, "0", 1, ["d"], {})).value()
    replica = HostedShard(others, "p", 0)
    primary._choose_replica()
    primary.request_load("0", 1)
    assert primary.request(partial(primary.load, "0", 1, start)).value()[0] == 0
    assert push(0, 1.0).value() is None
    assert replica._failure is None
    assert replica._shard.state()["dense"]["d"].tolist() == [-1, -1]
    assert primary.request(partial(primary.write, ("leave", "0"))).value() is None
    assert replica._shard is primary._shard is None


def test_nobody_waits_for_a_trainer_that_has_left_after_a_state_is_loaded():
    """A load made all trainers be there again: the next step waited for good for one that had closed its
    ParameterServer. And where the first one had, whose state counts, the others' load waited until its time was up."""
    spec = Spec("p", ("s",), ("0", "1", "2"), True, None, *[partial(torch.optim.SGD, lr=1.0)] * 2, "sum", False, "")
    hosted = HostedShard(Agent(), "p", 0)
    state = {"step": 0, "dense": {"d": torch.zeros(2)}, "tables": {}, "optimizer": {}}
    hosted.request(partial(hosted.create, spec, state))
    assert hosted.request(partial(hosted.write, ("leave", "2"))).value() is None
    for trainer in ("1", "0"):
        hosted.request_load(trainer, 1)
        loaded = hosted.request(partial(hosted.load, trainer, 1, state if trainer == "0" else None))
    assert loaded.value()[0] == 0
    for trainer in ("0", "1"):
        hosted.request(partial(hosted.push, trainer, 0, PushedGradients({"d": torch.ones(2)}, {})))
    assert hosted.request(partial(hosted.pull, "0", 1, ["d"], {})).value()[0]["d"].tolist() == [-2, -2]
    copy = type(hosted._shard).from_snapshot(hosted._shard.snapshot())
    assert copy.active() == ["0", "1"]
    assert hosted.request(partial(hosted.write, ("leave", "0"))).value() is None
    hosted.request_load("1", 2)
    with pytest.raises(ClosedError, match="trainer '0' has closed it, and its state cannot be loaded"):
        hosted.request(partial(hosted.load, "1", 2, None)).value()


def test_a_state_is_loaded_when_all_trainers_have_asked_for_it():
    """The first trainer's state was loaded at once: what another still pushed went on top of it, at a step of before.

    And who came in a lost trainer's place counted the loads from 0: its load was taken for one that had been made.
    """
    spec = Spec("p", ("s",), ("0", "1"), False, None, *[partial(torch.optim.SGD, lr=1.0)] * 2, "sum", False, "")
    agent = Agent()
    hosted = HostedShard(agent, "p", 0)
    state = {"step": 3, "dense": {"d": torch.zeros(2)}, "tables": {}, "optimizer": {}}
    hosted.request(partial(hosted.create, spec, {**state, "step": 0}))

    def load(trainer, number):
        hosted.request_load(trainer, number)
        return hosted.request(partial(hosted.load, trainer, number, state if trainer == "0" else None))

    first = load("0", 1)
    pushed = hosted.request(partial(hosted.push, "1", 0, PushedGradients({"d": torch.ones(2)}, {})))
    assert pushed.value() is None
    assert not first.done()
    assert load("1", 1).value()[0] == first.value()[0] == 3
    assert hosted._shard.state()["dense"]["d"].tolist() == [0, 0]
    assert hosted.request(partial(hosted.attach, "1", agent.uid("1"), "")).value() == (3, 1)
    waits = load("1", 2)
    agent.lose("0")
    hosted.answer_requests()
    with pytest.raises(TrainerLostError, match="trainer '0' is lost, and its state cannot be loaded: it was killed"):
        waits.value()


def test_the_next_of_a_name_begins_when_all_trainers_have_closed_the_one_before():
    """A trainer that had closed it and made the next one got the one before, in which nobody waited for it, or, with
    other arguments, a MismatchError, as long as another trainer had not closed its own. What was given up is not made
    behind its trainer's back when they do close it.
    """
    agent = Agent()
    hosted = HostedShard(agent, "p", 0)
    start = {"step": 0, "dense": {"d": torch.zeros(1)}, "tables": {}, "optimizer": {}}

    def spec(described):
        sgd = partial(torch.optim.SGD, lr=1.0)
        return Spec("p", ("s",), ("0", "1"), True, None, sgd, sgd, "sum", False, described)

    def make(trainer, described):
        if trainer == "0":
            made = hosted.request(partial(hosted.create, spec(described), start))
        attached = hosted.request(partial(hosted.attach, trainer, agent.uid(trainer), described))
        return [made, attached] if trainer == "0" else [attached]

    def close(trainer):
        hosted.request(partial(hosted.write, ("leave", trainer))).value()

    def done(futures):
        return [one.done() for one in futures]

    assert done([*make("0", "first"), *make("1", "first"), *make("1", "first")]) == [True] * 4  # not closed: shared
    close("0")
    cancelled = make("0", "given up")
    assert done(cancelled) == [False, False]
    assert hosted.cancel_creation() == ["1"]
    with pytest.raises(ClosedError, match="its trainer has stopped waiting for this shard"):
        cancelled[0].value()
    zero = make("0", "second")
    assert done(zero) == [False, False]
    close("1")
    assert done(zero) == [True, True]
    assert hosted._shard.spec.described == "second"
    assert make("1", "second")[0].value() == (0, 0)
    close("1")
    one = make("1", "third")  # before the first trainer
    assert done(one) == [False]
    close("0")
    assert done(one) == [False]
    assert done([*make("0", "third"), *one]) == [True] * 3
