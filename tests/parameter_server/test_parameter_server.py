"""Parameters on servers: equal to one process, bounded in staleness, restored, and alive after a server's loss."""

import os
import signal
import warnings
from functools import partial

import pytest
import torch
import torch._dynamo  # every optimizer loads it: once here, and not once in each worker
from tests.parameter_server.models import CASES, Model, check_equal, make_server, train, train_alone
from tests.parameter_server.trainers import TRAINERS, _counting, _ones, check_equal_states, join, meet
from tests.rpc.workers import event, pid, run_workers, set_event, wait_event

import phalanx
from phalanx import rpc
from phalanx.errors import DeadlineError, MismatchError, PeerLostError
from phalanx.rpc import current

SERVERS = ["s0", "s1", "s2"]


# -- synchronous -------------------------------------------------------------------------------------------------------


def _synchronous(rank, folder):
    name = [*TRAINERS, *SERVERS][rank]
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")  # Adagrad, at each step
    warnings.filterwarnings("ignore", "Validating sparse tensor invariants")  # torch 2.15, at each load
    with join(name, rank, 5, folder):
        if rank > 1:
            return
        for seed, case in enumerate(CASES):
            model = Model(seed)
            with make_server(model, case, SERVERS[: 1 + seed % 3]) as server:
                train(server, model, rank, range(6))
                state = server.state_dict()
                assert server.step == state["step"] == 6
                phalanx.save_checkpoint(f"{folder}/{name}.pt", {"server": state})
                meet(name, f"saved {seed}")
                train(server, model, rank, range(6, 9))
                first_run = server.state_dict()
                meet(name, f"first run {seed}")
            meet(name, f"closed {seed}")
            # Another number of servers goes on from the file with the same bits.
            with make_server(Model(seed), case, SERVERS[: 1 + (seed + 1) % 3]) as server:
                server.load_state_dict(phalanx.load_checkpoint(f"{folder}/{name}.pt")["server"])
                assert server.step == 6
                train(server, model, rank, range(6, 9))
                check_equal_states(server.state_dict(), first_run)
                meet(name, f"second run {seed}")
            meet(name, f"closed again {seed}")  # before one makes the next of this name
            train_alone(model, case, range(9))
            check_equal(first_run, model)


@pytest.mark.slow
def test_synchronous_training_has_the_bits_of_one_process_also_from_a_checkpoint_on_other_servers():
    run_workers(_synchronous, 5)


def _frozen(rank, folder):
    with join(["t0", "s0"][rank], rank, 2, folder):
        if rank:
            return
        dense = {name: torch.nn.Parameter(torch.ones(2), requires_grad=name == "free") for name in ("free", "frozen")}
        with phalanx.ParameterServer(["s0"], ["t0"], dense=dense, optimizer=partial(torch.optim.SGD, lr=0.5)) as server:
            pulled = server.pull()
            (pulled["free"] * pulled["frozen"]).sum().backward()
            server.push(pulled)
            after = {name: value.tolist() for name, value in server.pull().items()}
    assert after == {"free": [0.5, 0.5], "frozen": [1.0, 1.0]}


def test_a_frozen_parameter_is_not_trained():
    run_workers(_frozen, 2)


# -- who dies, who is late, who is wrong -------------------------------------------------------------------------------


def _trainer_dies(rank, folder):
    name = ["t0", "t1", "s0", "s1"][rank]
    with join(name, rank, 4, folder, loses=True):
        if rank > 1:
            return
        server = _counting(["s0", "s1"])
        server.pull()
        server.push_gradients(*_ones(torch.arange(7)))
        server.pull()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        server.push_gradients(*_ones(torch.arange(7)))
        message = r"synchronous step 1: trainer 't1' is lost: .*\nResume from a checkpoint"
        for use in (server.pull, server.state_dict):
            with pytest.raises(PeerLostError, match=message) as raised:
                use()
            assert raised.value.ranks == (1,)


def test_a_trainer_that_dies_in_a_synchronous_step_is_named():
    run_workers(_trainer_dies, 4, lost=[1])


def _stale(rank, folder):
    name = ["t0", "t1", "s0", "s1"][rank]
    with join(name, rank, 4, folder):
        if rank > 1:
            return
        bound = 3
        server = _counting(["s0", "s1"], synchronous=False, max_staleness=bound)
        if rank == 1:
            wait_event("t0 is far ahead")
        seen = []
        while server.step < 40:
            if rank == 0 and server.step == bound + 1:
                # t1 has not begun: this is as far as it goes.
                waits = rpc.rpc_async("t0", _pull_of, ("t0", server.step), timeout=0)
                assert not waits.done()
                clocks = rpc.rpc_sync("s0", _clocks)
                assert clocks == {"t0": bound + 1, "t1": 0}
                rpc.rpc_sync("t1", set_event, ("t0 is far ahead",))
                waits.wait()
            seen.append(server.pull({"t": torch.tensor([rank])}).staleness)
            server.push_gradients(*_ones(torch.tensor([rank, 6])))
        if rank == 0:
            assert seen[: bound + 1] == [0, 1, 2, 3]
        assert max(seen) <= bound
        meet(name, "done")
        state = server.state_dict()
        assert state["dense"]["d"].tolist() == [-80] * 3
        assert state["tables"]["t"][:, 0].tolist() == [-40, -40, 0, 0, 0, 0, -80]
        meet(name, "looked")
        server.close()


def _pull_of(name, step):
    from phalanx.parameter_server import requests

    return rpc.rpc_sync("s0", requests.pull, ("parameters", 0, name, step, ["d"], {}), timeout=0)[2]


def _clocks():
    from phalanx.parameter_server import requests

    return requests.clocks("parameters", 0)


def test_no_trainer_is_further_ahead_than_the_bound():
    run_workers(_stale, 4)


def _wrong(rank, folder):
    name = ["t0", "t1", "s0"][rank]
    with join(name, rank, 3, folder):
        if rank == 2:
            return
        sgd = partial(torch.optim.SGD, lr=1.0)
        wrong = partial(phalanx.ParameterServer, ["s0"], TRAINERS)
        with pytest.raises(ValueError, match=r"row_optimizer .*Adam.* cannot step with gradients of rows"):
            wrong(tables={"t": torch.zeros(3, 2)}, optimizer=torch.optim.Adam)
        with pytest.raises(ValueError, match=r"optimizer .*LBFGS.* cannot step"):
            wrong(dense={"d": torch.zeros(3)}, optimizer=torch.optim.LBFGS)
        with pytest.raises(ValueError, match=r"neither .*; max_staleness .*; reduction .*; replicate=True needs"):
            wrong(optimizer=sgd, max_staleness=1, reduction="max", replicate=True)
        with pytest.raises(ValueError, match=r"not among the trainers \('t9',\)"):
            phalanx.ParameterServer(["s0"], ["t9"], dense={"d": torch.zeros(3)}, optimizer=sgd)
        server = _counting(["s0"])
        with pytest.raises(ValueError, match=r"has no \['x', 'y'\]"):
            server.pull({"y": torch.tensor([1])}, ["x"])
        with pytest.raises(ValueError, match="ids of 't' must be from 0 to 6, got 0 to 7"):
            server.pull({"t": torch.arange(8)})
        with pytest.raises(TypeError, match="must be int64 or int32"):
            server.pull({"t": torch.ones(2)})
        with pytest.raises(ValueError, match=r"'d' has shape \(3,\), but its gradient has \(1,\)"):
            server.push_gradients({"d": torch.ones(1)})
        with pytest.raises(ValueError, match=r"2 ids of 't' need gradients of shape \(2, 2\), got \(2, 3\)"):
            server.push_gradients(None, {"t": (torch.tensor([1, 1]), torch.ones(2, 3))})
        with pytest.raises(ValueError, match="the state's tables parameters are"):
            server.load_state_dict({"dense": {"d": torch.zeros(3)}, "tables": {}})
        assert server.pull({"t": torch.empty(2, 0, dtype=torch.int64)})["t"].shape == (2, 0, 2)
        if rank == 1:
            _check_different()
        meet(name, "t1 has made another one")
        server.push_gradients(None, {"t": (torch.tensor([1, 1, 2]), torch.ones(3, 2))})
        assert server.pull({"t": torch.tensor([[2, 1]])})["t"].tolist() == [[[-1, -1], [-2, -2]]]
        if rank == 0:
            server.push_gradients()
            agent_default, current.agent().default_timeout_s = current.agent().default_timeout_s, 0.2
            with pytest.raises(DeadlineError, match=r"'t0' has pushed 2 and waits .*: trainer 't1' has pushed 1 steps"):
                server.pull()
            current.agent().default_timeout_s = agent_default
            server.close()
            with pytest.raises(phalanx.PhalanxError, match="was closed by this trainer"):
                server.pull()
            current.agent().default_timeout_s = 0.2
            words = "'t0' has closed the previous ParameterServer of this name, but 't1' has not."
            with pytest.raises(DeadlineError, match=words):
                _counting(["s0"], reduction="mean")
            current.agent().default_timeout_s = agent_default
            rpc.rpc_sync("t1", set_event, ("closed",))
            _next_of_the_name()
        else:
            wait_event("closed")
            for _ in range(3):  # alone: t0 has left
                server.pull()
                server.push_gradients({"d": torch.ones(3)})
            assert server.pull()["d"].tolist() == [-2.5, -2.5, -2.5]
            server.close()
            _next_of_the_name()


def _next_of_the_name():
    """With other arguments: who has closed the one before waits for who has not. It was a MismatchError, or, with the
    same arguments, the one of before, in which nobody waited for this trainer.
    """
    with _counting(["s0"], reduction="sum") as server:
        assert server.pull()["d"].tolist() == [0, 0, 0]
        server.push_gradients({"d": torch.ones(3)})
        assert server.pull()["d"].tolist() == [-2, -2, -2]


def _check_different():
    with pytest.raises(MismatchError, match=r"(?s)different arguments.*t0: .*reduction='mean'.*t1: .*reduction='sum'"):
        _counting(["s0"], reduction="sum")


def test_wrong_arguments_and_late_trainers_are_reported():
    run_workers(_wrong, 3)


# -- servers that die --------------------------------------------------------------------------------------------------


def _servers_die(rank, folder, synchronous):
    name = [*TRAINERS, *SERVERS][rank]
    with join(name, rank, 5, folder, loses=True):
        if rank > 1:
            return
        server = _counting(SERVERS, synchronous=synchronous, reduction="sum")
        ids = torch.tensor([0, 1, 2, 5 - rank])
        for step in range(300):
            if rank == 1 and step in (70, 150):  # s0, then s1, which has taken over from it
                victim = SERVERS[step // 100]
                os.kill(rpc.rpc_sync(victim, pid), signal.SIGKILL)
            server.pull({"t": ids})
            server.push_gradients(*_ones(ids))  # returns: it counts
        meet(name, "all is pushed")
        state = server.state_dict()
        assert state["dense"]["d"].tolist() == [-600] * 3, "each push once"
        assert state["tables"]["t"][:, 1].tolist() == [-600, -600, -600, 0, -300, -300, 0]
        meet(name, "looked")
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [True, False])
def test_no_acknowledged_push_is_lost_or_applied_twice_when_two_of_three_servers_are_killed(synchronous):
    run_workers(_servers_die, 5, synchronous, lost=[2, 3])


class _Failing(torch.optim.SGD):
    def step(self, closure=None):
        if any(p.grad is not None and float(p.grad.sum()) > 100 for g in self.param_groups for p in g["params"]):
            raise ArithmeticError("too much")
        super().step(closure)


def _step_fails(rank, folder):
    name = ["t0", "s0", "s1"][rank]
    with join(name, rank, 3, folder):
        if rank > 0:
            return
        make = partial(_Failing, lr=1.0)
        values = {"d": torch.zeros(3), "e": torch.zeros(3)}
        server = phalanx.ParameterServer(["s0", "s1"], ["t0"], dense=values, optimizer=make)
        state = server.state_dict()
        with pytest.raises(phalanx.PhalanxError, match=r"could not make step 0: ArithmeticError: too much"):
            server.push_gradients({"d": torch.full((3,), 100.0), "e": torch.full((3,), 100.0)})
        server.load_state_dict(state)
        server.push_gradients({"d": torch.ones(3), "e": torch.ones(3)})
        assert server.pull()["d"].tolist() == [-1] * 3
        server.close()


def test_trainers_resume_from_a_state_after_a_step_that_failed_on_replicated_servers():
    """The replica never heard of the failed push, and waited for it: load_state_dict and close hung until timeout."""
    run_workers(_step_fails, 3)


def _no_replica(rank, folder):
    name = ["t0", "s0", "s1"][rank]
    with join(name, rank, 3, folder, loses=True):
        if rank > 0:
            event("never")
            return
        server = _counting(["s0", "s1"], ["t0"], replicate=False)
        os.kill(rpc.rpc_sync("s1", pid), signal.SIGKILL)
        with pytest.raises(
            PeerLostError, match=r"shard 1 is lost: none of its servers, s1, s0, .*\nResume from a check"
        ):
            server.pull()


def test_without_a_replica_the_loss_of_a_server_is_reported():
    run_workers(_no_replica, 3, lost=[2])
