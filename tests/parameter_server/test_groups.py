"""Groups, schedulers' options and clipping of a ParameterServer: what is applied, what is saved, what is refused."""

import contextlib
import warnings
from functools import partial

import pytest
import torch
import torch._dynamo  # every optimizer loads it: once here, and not once in each worker
from tests.parameter_server.trainers import TRAINERS, join, meet
from tests.rpc.workers import run_workers

import phalanx
from phalanx.errors import DeadlineError, MismatchError
from phalanx.rpc import current

SGD = partial(torch.optim.SGD, lr=1.0)


class Counting(torch.optim.SGD):
    """An optimizer that counts its steps in its groups, as some without a schedule do, and steps by the count."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("count", 0)

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.grad *= group["count"]
        return super().step(closure)


def _gradients(rank, seed):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    dense = {name: 3 * torch.randn(shape, generator=generator) for name, shape in (("a", (3,)), ("b", (2, 4)))}
    ids = torch.randint(6, (4,), generator=generator)
    return dense, {"t": (ids, torch.randn(4, 2, generator=generator))}


def _clip_alone(steps, max_norm, norm_type):
    """Two trainers' gradients in one process, whose table has dense gradients."""
    values = {"a": torch.zeros(3), "b": torch.zeros(2, 4), "t": torch.zeros(6, 2)}
    parameters = {name: torch.nn.Parameter(value) for name, value in values.items()}
    optimizer = torch.optim.SGD(parameters.values(), lr=1.0)
    norms = []
    for step in range(steps):
        both = [_gradients(rank, step) for rank in range(2)]
        for name in ("a", "b"):
            parameters[name].grad = (both[0][0][name] + both[1][0][name]) / 2
        parameters["t"].grad = torch.zeros(6, 2)
        for _, rows in both:
            parameters["t"].grad.index_add_(0, *rows["t"], alpha=0.5)
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), max_norm, norm_type))
        optimizer.step()
    return {name: p.detach() for name, p in parameters.items()}, norms


def _clips(rank, folder):
    name = [*TRAINERS, "s0", "s1", "s2"][rank]
    with join(name, rank, 5, folder):
        if rank > 1:
            return
        values = {"dense": {"a": torch.zeros(3), "b": torch.zeros(2, 4)}, "tables": {"t": torch.zeros(6, 2)}}
        for case, (num_servers, norm_type) in enumerate([(1, 2.0), (3, 2.0), (3, float("inf")), (2, 1.0)]):
            servers = ["s0", "s1", "s2"][:num_servers]
            with phalanx.ParameterServer(servers, TRAINERS, **values, optimizer=SGD, name=f"p{case}") as server:
                norms = []
                for step in range(5):
                    pushed = _gradients(rank, step)
                    norms.append(server.push_gradients(*pushed, max_norm=2.0, norm_type=norm_type))
                state = server.state_dict()
                meet(name, f"looked {case}")
            expected, its_norms = _clip_alone(5, 2.0, norm_type)
            torch.testing.assert_close({**state["dense"], **state["tables"]}, expected)
            torch.testing.assert_close(norms, its_norms)
        # Asynchronously each push is clipped by itself.
        make = partial(phalanx.ParameterServer, ["s0", "s1"], TRAINERS, synchronous=False, optimizer=SGD)
        with make(**values, name="asynchronous") as server:
            if rank == 0:
                norm = server.push_gradients({"a": torch.tensor([3.0, 0, 0])}, {"t": _row(3, 4.0)}, max_norm=1.0)
                assert norm == 5
                state = server.state_dict()
                torch.testing.assert_close(state["dense"]["a"], torch.tensor([-0.6, 0, 0]))
                torch.testing.assert_close(state["tables"]["t"][3], torch.tensor([-0.8, 0]))
            meet(name, "t0 has looked")
            pulled = server.pull({"t": torch.tensor([0])})
            (pulled["a"].sum() + pulled["t"].sum()).backward()
            assert server.push(pulled, max_norm=100.0) == pytest.approx(5**0.5)
            with pytest.raises(ValueError, match=r"max_norm must not be below zero, .* got -1.0 and 2.0"):
                server.push(pulled, max_norm=-1.0)
            meet(name, "pushed")


def _row(number, value):
    return torch.tensor([number]), torch.tensor([[value, 0.0]])


@pytest.mark.slow
def test_the_mean_of_all_trainers_gradients_is_clipped_by_its_norm_over_all_servers():
    """Trainers could only clip their own gradients, which is something else, and never rows."""
    run_workers(_clips, 5)


def _sets(rank, folder):
    name = [*TRAINERS, "s0", "s1"][rank]
    with join(name, rank, 4, folder):
        if rank > 1:
            return
        ones = {"a": torch.ones(2), "b": torch.ones(2)}
        make = partial(phalanx.ParameterServer, ["s0", "s1"], TRAINERS)
        groups = [{"params": {"a": torch.zeros(2)}, "lr": 0.5}, {"params": [("b", torch.zeros(2))]}]
        saved = None
        for number in range(2):
            with make(dense=groups, optimizer=SGD, name=f"p{number}") as server:
                if saved is not None:
                    state = saved if rank == 0 else {**saved, "groups": {}}  # that of the first one counts
                    server.load_state_dict(state)
                    assert [group["lr"] for group in server.optimizer.param_groups] == [0.125, 0.25]
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # a push is the scheduler's step of the optimizer
                    scheduler = torch.optim.lr_scheduler.ExponentialLR(server.optimizer, 0.5)
                    steps = []
                    server.optimizer.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
                    for _ in range(2):
                        server.push_gradients(ones)
                        if saved is None:
                            scheduler.step()
                assert len(steps) == 2
                state = server.state_dict()  # after the scheduler's step: what it has set is saved
                if saved is None:
                    assert state["dense"]["a"].tolist() == [-0.75] * 2
                    assert state["dense"]["b"].tolist() == [-1.5] * 2
                    assert [group["params"] for group in state["groups"]["dense"]] == [["a"], ["b"]]
                    saved = state
                else:
                    assert state["dense"]["a"].tolist() == [-1.0] * 2
                    assert state["dense"]["b"].tolist() == [-2.0] * 2
                meet(name, f"looked {number}")
        with make(dense={"a": torch.zeros(2)}, optimizer=SGD, name="older") as server:
            older = {"step": 3, "dense": {"a": torch.ones(2)}, "tables": {}, "optimizer": {}}  # without groups
            server.load_state_dict(older)
            assert server.pull()["a"].tolist() == [1, 1]
            with pytest.raises(
                ValueError, match=r"the groups of dense are \[\['a'\], \[\]\] in the state, and \[\['a'\]\] here"
            ):
                server.load_state_dict({**older, "groups": {"dense": [{"params": ["a"]}, {"params": []}]}})
            adams = {"dense": [{"params": ["a"], "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}]}
            with pytest.raises(ValueError, match=r"the state of another optimizer class: it has betas, eps"):
                server.load_state_dict({**older, "groups": adams})
            meet(name, "older")
        _check_asynchronous(name, rank)
        with make(
            dense={"a": torch.zeros(1), "b": torch.zeros(1)}, optimizer=partial(Counting, lr=1.0), name="own"
        ) as server:
            for _ in range(3):  # 1, 2 and 3 times
                server.push_gradients({"a": torch.ones(1), "b": torch.ones(1)})
            state = server.state_dict()
            assert state["dense"]["a"].tolist() == state["dense"]["b"].tolist() == [-6]
            assert state["groups"]["dense"][0]["count"] == 3
            meet(name, "own")


def _check_asynchronous(name, rank):
    """Each push is applied with the options of its trainer, and a group may come to the others later."""
    make = partial(phalanx.ParameterServer, ["s0", "s1"], TRAINERS, synchronous=False, optimizer=SGD)
    with make(dense={"a": torch.zeros(2)}, name="asynchronous") as server:
        server.optimizer.param_groups[0]["lr"] = 10.0 + rank
        later = {"params": {"c": torch.full((2,), float(rank))}, "lr": 0.25}
        if rank == 0:
            server.optimizer.add_param_group(later)
            server.push_gradients({"a": torch.ones(2), "c": torch.ones(2)})
            meet(name, "added by one")
            assert server.state_dict()["groups"]["dense"][0]["lr"] == 10.0
        else:
            server.push_gradients({"a": torch.ones(2)})
            meet(name, "added by one")
            server.optimizer.add_param_group(later)
            assert server.pull()["c"].tolist() == [-0.25] * 2, "the values of the first trainer count"
        meet(name, "all have it")
        assert server.pull()["a"].tolist() == [-21.0] * 2
        meet(name, "looked at both")


def test_options_set_by_schedulers_are_applied_saved_and_loaded():
    """There was no way to set an option but to make another ParameterServer."""
    run_workers(_sets, 4)


def _differs(rank, folder):
    name = [*TRAINERS, "s0", "s1"][rank]
    with join(name, rank, 4, folder):
        if rank > 1:
            return
        ones = {"a": torch.ones(2), "b": torch.ones(2)}
        zeros = {key: torch.zeros(2) for key in ones}
        make = partial(phalanx.ParameterServer, ["s0", "s1"], TRAINERS, optimizer=SGD)
        clips = r"the limit to which gradients are clipped is Clip\(max_norm=1.0, norm_type=2.0\) on trainer 't0' and "
        cases = [
            (r"'lr' of group 0 of dense is 1.0 on trainer 't0' and 0.5 on 't1'. Nothing of the step was applied", {}),
            (clips + r"Clip\(max_norm=2.0", {"max_norm": 1.0 + rank}),
            (clips + "None", {"max_norm": None if rank else 1.0}),
        ]

        def use(server, **options):
            server.push_gradients(ones, **options)
            server.pull()  # the trainer that came first hears of it by its next call

        for number, (message, options) in enumerate(cases):
            with make(dense=zeros, name=f"p{number}") as server:
                state = server.state_dict()
                meet(name, f"saved {number}")
                server.optimizer.param_groups[0]["lr"] = 0.5 if rank and not options else 1.0
                with pytest.raises(MismatchError, match=message):
                    use(server, **options)
                meet(name, f"refused {number}")
                server.load_state_dict(state)
                server.push_gradients(ones)
                assert server.pull()["a"].tolist() == server.pull()["b"].tolist() == [-1, -1]
                meet(name, f"looked {number}")
        with make(dense=zeros, name="groups") as server:
            later = {"params": {"c": torch.zeros(2)}, "lr": 0.5 + rank}
            if rank == 0:
                server.optimizer.add_param_group(later)
            else:
                with pytest.raises(MismatchError, match=r"(?s)trainers have added different groups:.*t0: .*t1: "):
                    server.optimizer.add_param_group(later)
            assert len(server.optimizer.param_groups) == 2 - rank
            meet(name, "added")
            with pytest.raises(MismatchError, match="the number of groups of dense is 2 on trainer 't0' and 1 on 't1'"):
                use(server)
            meet(name, "refused groups")
        _check_late(name, rank, make(dense=zeros, name="late"))


def _check_late(name, rank, server):
    """Who is late is named, where a trainer waits for the norm of the mean and where it waits for a group."""
    ones, later = {"a": torch.ones(2)}, {"params": {"c": torch.zeros(2)}}
    with server:
        if rank == 0:
            late = r"'t0' has pushed 1 and waits for the others: trainer 't1' has pushed 0 steps"
            with _patience(1.0), pytest.raises(DeadlineError, match=late):
                server.push_gradients(ones, max_norm=9.0)
        meet(name, "t1 was late")
        assert float(server.push_gradients(ones, max_norm=9.0)) == pytest.approx(2**0.5)
        if rank == 1:
            late = "'t1' waits for 't0' to add the same group. Call add_param_group on all trainers"
            with _patience(1.0), pytest.raises(DeadlineError, match=late):
                server.optimizer.add_param_group(later)
        meet(name, "t0 was late")
        server.optimizer.add_param_group(later)
        assert server.pull()["a"].tolist() == [-1, -1]
        meet(name, "both have added it")


@contextlib.contextmanager
def _patience(seconds):
    """How long calls wait, here."""
    agent = current.agent()
    before, agent.default_timeout_s = agent.default_timeout_s, seconds
    try:
        yield
    finally:
        agent.default_timeout_s = before


@pytest.mark.slow
def test_a_step_for_which_trainers_have_set_other_options_is_refused_before_it_is_applied():
    run_workers(_differs, 4)


def _refused(rank, folder):
    name = ["t0", "s0"][rank]
    with join(name, rank, 2, folder):
        if rank:
            return
        make = partial(phalanx.ParameterServer, ["s0"], ["t0"])
        values = {"a": torch.zeros(2), "b": torch.zeros(2)}
        with pytest.raises(
            ValueError, match=r"optimizer .* changes the groups that .* Pass the groups: dense=\[\{'params'"
        ):
            make(dense=values, optimizer=_halves)
        with pytest.raises(ValueError, match=r"optimizer .*Muon.* cannot be constructed with the dense"):
            make(dense=values, optimizer=partial(torch.optim.Muon, lr=0.1))
        with pytest.raises(TypeError, match="'params' of a group of dense must be tensors with their names"):
            make(dense=[{"params": list(values.values())}], optimizer=SGD)
        with pytest.raises(TypeError, match=r"dense must be tensors by name, .* got list"):
            make(dense=list(values.values()), optimizer=SGD)
        with pytest.raises(ValueError, match=r"\['a'\] are names of several"):
            make(dense=[{"params": values}, {"params": {"a": torch.zeros(1)}}], optimizer=SGD)
        with make(dense=values, optimizer=SGD) as server:
            with pytest.raises(RuntimeError, match="the servers make the optimizer's step when they receive"):
                server.optimizer.step()
            with pytest.raises(RuntimeError, match=r"save ParameterServer.state_dict\(\)"):
                server.optimizer.state_dict()
            with pytest.raises(RuntimeError, match=r"call ParameterServer\.load_state_dict"):
                server.optimizer.load_state_dict({})
            with pytest.raises(ValueError, match="was made without tables, and has no optimizer for it"):
                server.row_optimizer.param_groups.clear()
            for group, error, message in [
                ({"params": [torch.zeros(2)]}, TypeError, "tensors with their names"),
                ({"params": {"a": torch.zeros(2)}}, ValueError, r"\['a'\] are names of several"),
                ({"params": {"c": torch.zeros(2, dtype=torch.int64)}}, ValueError, r"\['c'\] must be floating point"),
            ]:
                with pytest.raises(error, match=message):
                    server.optimizer.add_param_group(group)
            assert len(server.optimizer.param_groups) == 1
            server.push_gradients({"a": torch.ones(2)})
            assert server.pull()["a"].tolist() == [-1, -1]


def _halves(params):
    half = len(params) // 2
    return torch.optim.SGD([{"params": params[:half], "lr": 0.1}, {"params": params[half:], "lr": 0.2}])


def test_optimizers_that_servers_cannot_run_are_refused_with_advice():
    """An optimizer that made groups by position made others on each server."""
    run_workers(_refused, 2)
