"""Every optimizer of torch.optim on servers, with groups that come later, schedulers, closures and clipping, against
one process.

By hand: PHALANX_TEST_SEEDS=20 pytest tests/parameter_server/test_generated_optimizers.py --timeout 0
"""

import itertools
import os
import signal
import warnings

import pytest
import torch
import torch._dynamo  # every optimizer loads it: once here, and not once in each worker
from tests.optim.random_training import OPTIMIZERS, Training, find_difference, reload_plain
from tests.parameter_server.served import serve
from tests.parameter_server.trainers import join, meet
from tests.rpc.workers import pid, run_workers

from phalanx import rpc

SERVERS = ["s0", "s1", "s2"]
_DENSE = [one for one in OPTIMIZERS if one not in (torch.optim.LBFGS, torch.optim.SparseAdam)]  # these are refused
_ROWS = [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad]
_NUM_SEEDS = int(os.environ.get("PHALANX_TEST_SEEDS", "2"))


def _play(training, kind, seed, trainers, number, *, sparse, servers, before_step=lambda step: None):
    """On servers; a job that begins again has one server more or less. Returns what it saw, and ends it."""
    model, counter = training.model(), itertools.count()
    synchronous = {"synchronous": len(trainers) > 1 or seed % 2 == 0}

    def make(groups, **options):
        turn = next(counter)
        return serve(
            model.weights,
            groups,
            servers[: 1 + (seed + turn) % len(servers)] if before_step.__name__ == "<lambda>" else servers,
            trainers,
            kind,
            options,
            name=f"{kind.__name__} {seed} {sparse} {turn}",
            sparse=sparse,
            **synchronous,
        )

    made = []

    def remember(groups, **options):
        made.append(make(groups, **options))
        return made[-1]

    def reload(optimizer, options):
        state = optimizer.state_dict()
        again = remember([{"params": group["params"]} for group in optimizer.param_groups], **options)
        again.load_state_dict(state)
        return again

    found = training.play(
        model,
        remember,
        reload=reload,
        parts=(number,),
        clip=lambda one, limit: one.clip(limit),
        before_step=before_step,
    )
    return found, [one._server for one in made]


def _compare(rank, folder, num_trainers, kinds, sparse):
    trainers = [f"t{number}" for number in range(num_trainers)]
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    warnings.filterwarnings("ignore", "Validating sparse tensor invariants")  # torch 2.15
    problems = []
    with join([*trainers, *SERVERS][rank], rank, num_trainers + len(SERVERS), folder):
        if rank >= num_trainers:
            return []
        for kind, seed in itertools.product(kinds, range(_NUM_SEEDS)):
            training = Training(kind, seed, sparse=sparse)
            expected = training.play(training.model(), kind, reload=reload_plain, parts=range(num_trainers))
            found, servers = _play(training, kind, seed, trainers, rank, sparse=sparse, servers=SERVERS)
            if difference := find_difference(found, expected):
                problems.append(f"{kind.__name__} {seed}: {difference}")
            for server in servers:
                server.close()
    return problems


@pytest.mark.slow
@pytest.mark.parametrize("num_trainers", [1, 2])
@pytest.mark.parametrize(("kinds", "sparse"), [(_DENSE, False), (_ROWS, True)], ids=["dense", "rows"])
def test_every_optimizer_on_servers_trains_as_in_one_process(kinds, sparse, num_trainers):
    """Also asynchronously with one trainer. Options that a scheduler set stayed with the trainer, and there were no
    groups, no later ones, and no norm of the mean over servers."""
    problems = run_workers(_compare, num_trainers + len(SERVERS), num_trainers, kinds, sparse, timeout=300 * _NUM_SEEDS)
    assert not any(problems), "\n".join(line for each in problems for line in each)


# -- a server is lost --------------------------------------------------------------------------------------------------


def _lose(rank, folder, kind, seed):
    trainers = ["t0", "t1"]
    name = [*trainers, *SERVERS][rank]
    with join(name, rank, 5, folder, loses=True):
        if rank > 1:
            return None
        training = Training(kind, seed)
        expected = training.play(training.model(), kind, reload=reload_plain, parts=range(2))

        def before_step(step):
            if step == 5:
                meet(name, "before the loss")
                if rank == 0:
                    os.kill(rpc.rpc_sync("s1", pid), signal.SIGKILL)

        found, _ = _play(training, kind, seed, trainers, rank, sparse=False, servers=SERVERS, before_step=before_step)
        meet(name, "done")
        return find_difference(found, expected)


@pytest.mark.slow(but=("0",))
@pytest.mark.parametrize("seed", range(3))
def test_a_replica_continues_with_the_options_and_clipping_of_a_lost_server(seed):
    kind = [torch.optim.Adam, torch.optim.SGD, torch.optim.Adafactor][seed]
    assert run_workers(_lose, 5, kind, seed, lost=[3])[:2] == [None, None]
