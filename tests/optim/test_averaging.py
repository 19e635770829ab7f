"""EASGD, GossipSGD and StreamingDiLoCo, over real ranks, against their papers' formulas in one process."""

import itertools
import os
import random
import signal

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal, assert_same_on_all_ranks
from tests.optim.averaging import simulate_easgd, simulate_gossip, simulate_streaming
from tests.optim.replicas import Replica, floats, inner_of, outer_of, train_step
from tests.training import copy_state
from torch import nn

import phalanx
from phalanx.optim.round_plan import RoundPlan, decide_topology, plan_fragments
from phalanx.testing import run_ranks


def easgd(model, optimizer, **options):
    return phalanx.EASGD(model, optimizer, **{"sync_every": 3, **options})


def gossip(model, optimizer, **options):
    return phalanx.GossipSGD(model, optimizer, **{"sync_every": 3, **options})


def streaming(model, optimizer, **options):
    options = {"sync_every": 6, "fragments": 2, "delay": 2, "mix": 0.25, **options}
    return phalanx.StreamingDiLoCo(model, optimizer, outer_of(model), **options)


KINDS = {"easgd": easgd, "gossip": gossip, "streaming": streaming}


# -- who, what, when ---------------------------------------------------------------------------------------------------


def test_all_ranks_come_together_behind_every_so_many_steps():
    one = RoundPlan(3, sync_every=4).round(2)
    assert (one.begins, one.ends, one.fragment, one.groups) == (12, 12, 0, ((0, 1, 2),))


def test_fragments_take_turns_within_a_round_and_are_taken_over_later():
    plan = RoundPlan(2, sync_every=6, num_fragments=3, delay=1)
    assert [(one.begins, one.ends, one.fragment) for one in map(plan.round, range(4))] == [
        (2, 3, 0), (4, 5, 1), (6, 7, 2), (8, 9, 0),
    ]  # fmt: skip
    assert plan.describe(2).splitlines()[1].split() == ["0", "2", "3", "1", "of", "3", "0-1"]


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_of_a_hypercube_all_have_the_mean_of_all_after_as_many_rounds_as_it_has_dimensions(world_size):
    plan = RoundPlan(world_size, 1, topology=decide_topology(world_size, None))
    assert plan.topology == "hypercube"
    values = [float(rank) for rank in range(world_size)]
    for number in range(world_size.bit_length() - 1):
        for one, other in plan.round(number).groups:
            values[one] = values[other] = (values[one] + values[other]) / 2
    assert set(values) == {(world_size - 1) / 2}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8, 13])
def test_pairs_that_are_drawn_have_each_rank_once_and_change(world_size):
    plan = RoundPlan(world_size, 1, topology="random", seed=7)
    met = set()
    for number in range(400):
        groups = plan.round(number).groups
        assert sorted(itertools.chain(*groups)) == list(range(world_size))
        assert [len(group) for group in groups].count(1) == world_size % 2
        assert groups == RoundPlan(world_size, 1, topology="random", seed=7).round(number).groups
        met |= set(groups)
    pairs = {(a, b) for a in range(world_size) for b in range(a + 1, world_size)}
    assert met == pairs | ({(rank,) for rank in range(world_size)} if world_size % 2 else set())


def test_fragments_are_neighbours_of_nearly_the_same_size():
    draw = random.Random(3)
    for _ in range(300):
        sizes = [draw.choice([1, 10, 100, 1000]) for _ in range(draw.randint(1, 12))]
        num = draw.randint(1, len(sizes))
        fragments = plan_fragments(sizes, num)
        assert list(itertools.chain(*fragments)) == list(range(len(sizes)))
        assert len(fragments) == num
        assert all(fragments)
    assert plan_fragments([10] * 8, 4) == ((0, 1), (2, 3), (4, 5), (6, 7))
    with pytest.raises(ValueError, match="3 parameters cannot be cut into 4 fragments"):
        plan_fragments([1, 2, 3], 4)


# -- what comes of it --------------------------------------------------------------------------------------------------


def generate(world_size, count):
    """Cases: a kind, its options, and the steps of each rank."""
    draw = random.Random(world_size)
    for number in range(count):
        steps_of = [draw.randint(0, 13) for _ in range(world_size)]
        if number % 3 == 0:
            steps_of = [draw.randint(1, 12)] * world_size
        yield "easgd", {"sync_every": draw.randint(1, 4), "beta": draw.choice([0.3, 0.9, 1.0])}, steps_of
        topology = draw.choice(["random", None])
        yield "gossip", {"sync_every": draw.randint(1, 4), "topology": topology, "seed": number}, steps_of
        num, window = draw.randint(1, 4), draw.randint(1, 4)
        mix = draw.choice([0.0, 0.5])
        delay = draw.randint(0, window - 1)
        yield "streaming", {"sync_every": num * window, "fragments": num, "delay": delay, "mix": mix}, steps_of


def simulate(kind, options, steps_of):
    if kind == "easgd":
        return simulate_easgd(steps_of, options["sync_every"], options["beta"])
    if kind == "gossip":
        topology = decide_topology(len(steps_of), options["topology"])
        plan = RoundPlan(len(steps_of), options["sync_every"], topology=topology, seed=options["seed"])
        return simulate_gossip(steps_of, options["sync_every"], plan)
    sizes = [p.nbytes for p in Replica().parameters() if p.requires_grad]
    fragments = plan_fragments(sizes, options["fragments"])
    return simulate_streaming(steps_of, options["sync_every"], fragments, options["delay"], options["mix"])


@pytest.mark.slow(but=("1-phalanx",))
@pytest.mark.parametrize(
    ("world_size", "backend"), [(1, "phalanx"), (2, "phalanx"), (3, "gloo"), (4, "phalanx"), (5, "phalanx")]
)
def test_ranks_end_with_what_the_formulas_say(world_size, backend):
    cases = list(generate(world_size, 3 if world_size > 4 else 5))

    def fn(rank, world_size):
        results = []
        for kind, options, steps_of in cases:
            model = Replica(seed=rank)  # rank 0's values become everybody's
            optimizer = inner_of(model)
            with KINDS[kind](model, optimizer, **options) as rounds:
                for step in range(steps_of[rank]):
                    train_step(model, optimizer, rank, step)
            results.append(floats(model))
            train_step(model, optimizer, rank, 99)  # it has let go of the optimizer
            assert rounds.local_steps == 0
        return results

    ended = run_ranks(fn, world_size, backend=backend, timeout=60)
    for number, case in enumerate(cases):
        for values in ended:
            assert_equal(values[number], ended[0][number], case)
        torch.testing.assert_close(
            ended[0][number], simulate(*case), rtol=1e-5, atol=1e-6, msg=lambda m, c=case: f"{c}: {m}"
        )


def test_between_rounds_those_agree_who_have_met():
    """Of EASGD and streaming all ranks, on what they have in common; of gossip the two of a pair, on their models."""

    def fn(rank, world_size):
        seen = {}
        for kind, make in KINDS.items():
            model = Replica()
            optimizer = inner_of(model)
            rounds = make(model, optimizer)
            for step in range(6):
                train_step(model, optimizer, rank, step)
            if kind == "gossip":
                seen["pair"] = rounds.plan.round(1).group_of(rank)
                seen["model"] = floats(model)
            else:
                common = rounds.center_parameters() if kind == "easgd" else rounds.outer_parameters()
                seen[kind] = [value.clone() for value in common.values()]
                assert not torch.equal(common["conv.weight"], model.conv.weight)
            assert model.conv.weight.grad is not None  # the user's gradient is where it was
            rounds.finish()
        return seen

    ended = run_ranks(fn, 4)
    assert [one["pair"] for one in ended] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    for kind, other in itertools.product(("easgd", "streaming"), ended):
        assert_equal(other[kind], ended[0][kind])
    for one, other in ((0, 2), (1, 3)):
        assert_equal(ended[one]["model"], ended[other]["model"])
    assert not torch.equal(ended[0]["model"][0], ended[1]["model"][0])


@pytest.mark.parametrize("kind", ["easgd", "gossip"])
def test_a_rank_that_dies_in_a_round_leaves_the_others_what_they_had(kind):
    def fn(rank, world_size):
        model = Replica()
        optimizer = inner_of(model)
        rounds = KINDS[kind](model, optimizer)
        for step in range(2):
            train_step(model, optimizer, rank, step)
        store, apart = dist.distributed_c10d._get_default_store(), [] if kind == "easgd" else [2, 3]

        def die(**_):
            store.wait([f"done {other}" for other in apart])  # they share the group, which ends with this rank
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == 1:  # between the first collective of the round and the second
            rounds._combine = die
        seen = []
        rounds._flat.take, take = (lambda: (seen.append(floats(model)), take())), rounds._flat.take
        if kind == "gossip" and rounds.plan.round(0).group_of(rank) == (2, 3):
            train_step(model, optimizer, rank, 2)  # their own business
            store.set(f"done {rank}", "")
            with pytest.raises(phalanx.PeerLostError, match="rank 1"):
                rounds._hold(finished=False, counts=True)
            return True
        with pytest.raises(phalanx.PeerLostError, match="rank 1"):
            train_step(model, optimizer, rank, 2)
        assert_equal(floats(model), seen[0])
        return True

    assert run_ranks(fn, 4, lost=(1,)) == [True, None, True, True]


def test_a_rank_that_dies_while_a_fragment_is_on_its_way_leaves_the_others_what_they_had():
    def fn(rank, world_size):
        model = Replica()
        optimizer = inner_of(model)
        rounds = streaming(model, optimizer)
        for step in range(2):
            train_step(model, optimizer, rank, step)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        seen = []
        rounds._take_over, take_over = (lambda: (seen.append(floats(model)), take_over())), rounds._take_over

        def train():
            for step in range(2, 5):
                train_step(model, optimizer, rank, step)

        with pytest.raises(phalanx.PeerLostError, match="rank 1"):
            train()
        if seen:
            assert_equal(floats(model), seen[0])
        return True

    assert run_ranks(fn, 3, lost=(1,)) == [True, None, True]


@pytest.mark.slow
def test_a_saved_state_goes_on_bit_for_bit():
    """Also where a fragment was on its way, after 10 of 13 steps of streaming."""

    def fn(rank, world_size):
        def start(make):
            model = Replica()
            optimizer = inner_of(model)
            return model, optimizer, make(model, optimizer)

        def train(model, optimizer, steps):
            for step in steps:
                train_step(model, optimizer, rank, step)

        for make in KINDS.values():
            model, optimizer, rounds = start(make)
            train(model, optimizer, range(13))
            rounds.finish()
            straight = floats(model)
            for cut in (4, 10):
                model, optimizer, rounds = start(make)
                train(model, optimizer, range(cut))
                saved = [one.state_dict() for one in (model, optimizer, rounds)]
                model, optimizer, rounds = start(make)
                for one, state in zip((model, optimizer, rounds), saved, strict=True):
                    one.load_state_dict(state)
                train(model, optimizer, range(cut, 13))
                rounds.finish()
                assert_equal(floats(model), straight, make, cut)

    run_ranks(fn, 3)


def test_wrong_arguments_are_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(3, 2), nn.Linear(2, 2)

    def fn(rank, world_size):
        model = Two()
        inner = inner_of(model)
        wrong = [
            (easgd, {"beta": 0.0}, "EASGD: beta must be above 0 and at most 1, got 0.0"),
            (easgd, {"sync_every": 0}, "EASGD: sync_every must be a number of steps, 1 or more, got 0"),
            (gossip, {"topology": "ring"}, "topology must be 'hypercube', 'random' or None, got 'ring'"),
            (gossip, {"topology": "hypercube"}, "is for 2, 4, 8, ... ranks, and there are 3: use 'random'"),
            (streaming, {"sync_every": 5}, "2 fragments in turns need a sync_every that they divide, got 5: make it 6"),
            (streaming, {"delay": 3}, "delay must be 0 or more steps, and less than sync_every / fragments"),
            (easgd, {"beta": "0.5"}, "EASGD: beta must be above 0 and at most 1, got '0.5'"),
            (streaming, {"mix": None}, "mix must be 0 or more and less than 1, got None"),
            (streaming, {"delay": -1}, "delay must be 0 or more steps"),
            (streaming, {"mix": 1.0}, "mix must be 0 or more and less than 1, got 1.0"),
            (streaming, {"sync_every": 2.5}, "sync_every must be a number of steps, 1 or more, got 2.5"),
            (streaming, {"fragments": 0}, "fragments must be 1 or more, got 0"),
            (streaming, {"fragments": 6}, "4 parameters cannot be cut into 6 fragments"),
            (streaming, {"fragments": [model.one]}, "parameter 'other.weight' is in none of the fragments"),
            (streaming, {"fragments": [model, model.one]}, r"fragments 0 and 1 share a parameter of shape \(2, 3\)"),
            (streaming, {"fragments": [model, nn.ReLU()]}, "fragment 1 has no parameter that is trained"),
        ]
        for make, options, words in wrong:
            with pytest.raises(ValueError, match=words):
                make(model, inner, **options)
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        for words, make in (
            ("EASGD: model must be a torch.nn.Module, got SGD", lambda: easgd(inner, model)),
            (
                r"DiLoCo: the optimizer must be .* got <class",
                lambda: phalanx.DiLoCo(model, inner, type(outer), sync_every=2),
            ),
            (r"GossipSGD: the optimizer must be a torch.optim.Optimizer, got \[SGD", lambda: gossip(model, [inner])),
            (
                "fragments must be a number or modules of the model, one each, got 2.0",
                lambda: streaming(model, inner, fragments=2.0),
            ),
        ):
            with pytest.raises(TypeError, match=words):
                make()
        for make in (easgd, gossip, streaming):
            with pytest.raises(ValueError, match="SGD holds no parameter of this model, which would never change"):
                make(model, inner_of(Two()))
        more = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(7))], lr=1.0)
        with pytest.raises(
            ValueError, match=r"the outer optimizer holds a parameter of shape \(7,\) that is not the model"
        ):
            phalanx.DiLoCo(model, inner, more, sync_every=2)
        for make in (phalanx.DiLoCo, phalanx.StreamingDiLoCo):  # at the first round they ended in a TypeError
            for outer, words in (
                (torch.optim.LBFGS(model.parameters()), "LBFGS cannot be the outer optimizer: its step computes the l"),
                (torch.optim.SparseAdam(model.parameters()), "SparseAdam cannot be .* it takes sparse gradients only"),
            ):
                with pytest.raises(ValueError, match=words):
                    make(model, inner, outer, sync_every=2)
        outer = torch.optim.SGD([model.one.weight, *model.other.parameters()], lr=1.0)
        with pytest.raises(
            ValueError, match=r"StreamingDiLoCo: the outer optimizer does not hold parameter 'one.bias'"
        ):
            phalanx.StreamingDiLoCo(model, inner, outer, sync_every=2)
        with pytest.raises(phalanx.MismatchError, match=r"rank 1 has sync_every=3, beta=0.9, rank 0 has .*beta=0.5"):
            easgd(model, inner, beta=0.9 if rank else 0.5)
        rounds = easgd(model, inner)
        with pytest.raises(ValueError, match=r"EASGD: the state has parameter 'one.bias' with shape None"):
            rounds.load_state_dict({**rounds.state_dict(), "center_parameters": {}})
        rounds = streaming(model, inner, fragments=[model.other, model.one])
        assert rounds._fragments == ((2, 3), (0, 1))
        with pytest.raises(ValueError, match="the state is of 1 fragments, and this has 2"):
            rounds.load_state_dict({**rounds.state_dict(), "given_at": [0]})

    run_ranks(fn, 3)


def test_ranks_that_stand_at_different_rounds_after_a_loss_go_on_from_the_later_one():
    """A rank died at the very end of a round: one survivor had it done, the other had not.

    DiLoCo's outer parameters then differed for good, as each rank's round out of turn began from its own.
    """

    def fn(rank, world_size):
        seen = {}
        makes = {"diloco": lambda m, o: phalanx.DiLoCo(m, o, outer_of(m), sync_every=3), **KINDS}
        makes["local"] = lambda m, o: phalanx.LocalSGD(m, o, sync_every=3)
        for kind, make in makes.items():
            model = Replica()
            optimizer = inner_of(model)
            rounds = make(model, optimizer)
            for step in range(7):
                train_step(model, optimizer, rank, step)
            before = rounds.state_dict()
            for step in range(7, 13):
                train_step(model, optimizer, rank, step)
            if rank == 1:  # as if it had not done them
                rounds.load_state_dict(before)
            rounds.regroup(dist.group.WORLD)
            rounds.catch_up(is_new=False)
            for step in range(13, 20):
                train_step(model, optimizer, rank, step)
            common = {"easgd": "center_parameters", "diloco": "outer_parameters", "streaming": "outer_parameters"}
            seen[kind, "rounds"] = rounds.num_rounds
            if kind in common:
                seen[kind] = [value.clone() for value in getattr(rounds, common[kind])().values()]
            rounds.finish()
            seen[kind, "end"] = floats(model)
        return seen

    assert_same_on_all_ranks(run_ranks(fn, 3))


def test_a_round_that_only_some_have_missed_moves_the_outer_parameters_once():
    """Those who had done it counted in the round out of turn: without a movement, momentum moved them once more."""

    def fn(rank, world_size):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        rounds = phalanx.DiLoCo(model, inner, outer_of(model), sync_every=2)
        draw = torch.Generator().manual_seed(rank)
        for _ in range(4):
            before = rounds.state_dict()
            model(torch.randn(5, 3, generator=draw)).sum().backward()
            if rank == 1:
                missed = copy_state(model)
            inner.step()
            inner.zero_grad()
        done = floats(model)
        if rank == 1:  # as if the last round had ended without it: it has its own steps, and the round before
            rounds.load_state_dict(before)
            model.load_state_dict(missed)
        rounds.regroup(dist.group.WORLD)
        rounds.catch_up(is_new=False)
        assert (rounds.num_rounds, rounds.local_steps) == (2, 0)
        return floats(model), done, [one.clone() for one in rounds.outer_parameters().values()]

    ended = run_ranks(fn, 3)
    for model, _, outer in ended:
        assert_equal(model, ended[0][1])
        assert_equal(outer, ended[0][2])


def test_groups_of_fragments_are_left_when_others_take_their_place_and_at_the_end():
    """Each regroup left a group behind, with its memory and its threads; so did the end."""

    def fn(rank, world_size):
        known = dist.distributed_c10d._world.pg_map
        before = len(known)
        model = Replica()
        optimizer = inner_of(model)
        rounds = streaming(model, optimizer)
        for step in range(3):
            train_step(model, optimizer, rank, step)  # a fragment is on its way then
        saved = rounds.state_dict()
        for step in range(3, 6):
            train_step(model, optimizer, rank, step)
        on_its_way = rounds._in_flight
        rounds.load_state_dict(saved)
        assert on_its_way.works == []  # nothing comes into what was loaded
        for _ in range(3):
            rounds.regroup(dist.group.WORLD)
            rounds.catch_up(is_new=False)
            assert len(known) == before + 1
        rounds.finish()
        rounds.finish()  # as at the end of a with
        return len(known) - before, floats(model)

    first, *others = run_ranks(fn, 3)
    for num_left, end in (first, *others):
        assert num_left == 0
        assert_equal(end, first[1])
