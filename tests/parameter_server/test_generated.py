"""Checkpoints in the midst of a run, and rows beside data parallel layers, with generated gradients."""

import copy
import random
import warnings
from functools import partial

import pytest
import torch
import torch._dynamo  # every optimizer loads it: once here, and not once in each worker
import torch.distributed as dist
from tests.parameter_server.trainers import check_equal_states, join, meet
from tests.rpc.workers import run_workers

import phalanx

SERVERS = ["s0", "s1", "s2"]
TRAINERS = ["t0", "t1"]
ROWS = [
    partial(torch.optim.SGD, lr=0.5),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    partial(torch.optim.SGD, lr=0.1, momentum=0.5, dampening=0.5),
    partial(torch.optim.Adagrad, lr=0.1, lr_decay=0.01),
    partial(torch.optim.SparseAdam, lr=0.05, betas=(0.5, 0.9)),
]
DENSE = [
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    partial(torch.optim.Adagrad, lr=0.1, weight_decay=0.1),
    partial(torch.optim.RMSprop, lr=0.01, centered=True),
    partial(torch.optim.Adamax, lr=0.01),
    partial(torch.optim.Rprop, lr=0.01),
]


class Case:
    """Parameters, optimizers, and what each trainer pushes in each step, from a seed."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = [torch.float32, torch.float64, torch.bfloat16][seed % 3]
        self.optimizer, self.row_optimizer = DENSE[seed % len(DENSE)], ROWS[seed % len(ROWS)]
        if self.dtype is torch.bfloat16:
            self.optimizer = DENSE[0]
        self.reduction = self.chance.choice(["mean", "sum"])
        self.num_servers = 1 + seed % 3
        self.dense = {f"d{n}": self.random(*shape) for n, shape in enumerate([(), (3,), (2, 0), (4, 2)])}
        sizes = [(1, 2), (self.chance.randint(2, 9), self.chance.randint(1, 4)), (7, 1)]
        self.tables = {f"t{n}": self.random(*shape) for n, shape in enumerate(sizes)}

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def gradients(self):
        """Of one trainer for one step; some are missing, some have no rows, some have rows twice."""
        dense = {key: self.random(*one.shape) for key, one in self.dense.items() if self.chance.random() < 0.8}
        rows = {}
        for key, table in self.tables.items():
            if self.chance.random() < 0.8:
                num = self.chance.choice([0, 1, 5])
                ids = torch.randint(len(table), (num,), generator=self.generator)
                rows[key] = ids, self.random(num, table.shape[1])
        return dense, rows

    def steps(self, num):
        return [[self.gradients() for _ in TRAINERS] for _ in range(num)]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def _restored(rank, folder, with_group):
    name = [*TRAINERS, *SERVERS][rank]
    with join(name, rank, 5, folder):
        if rank > 1:
            return
        if with_group:
            dist.init_process_group("phalanx", init_method=f"file://{folder}/group", rank=rank, world_size=2)
        case = Case(4)  # SparseAdam and Adagrad
        steps = case.steps(12)
        make = partial(phalanx.ParameterServer, trainers=TRAINERS, dense=case.dense, tables=case.tables,
                       optimizer=DENSE[1], row_optimizer=case.row_optimizer)  # fmt: skip
        manager = phalanx.CheckpointManager(f"{folder}/runs" if with_group else f"{folder}/runs-{rank}")
        with make(SERVERS[:2], name="first") as server:
            for step, pushed in enumerate(steps):
                server.pull()
                server.push_gradients(*pushed[rank])
                if step == 6:
                    manager.async_save(step + 1, {"server": server})
            manager.wait()
            undisturbed = server.state_dict()
            meet(name, "first run")
        with make(SERVERS, name="second") as server:
            if rank == 1:  # a step more than the other has made when it loads: that is not mixed up
                server.push_gradients(*steps[0][rank])
            restored = manager.load({"server": server})
            assert restored.step == server.step == 7
            for pushed in steps[7:]:
                server.pull()
                server.push_gradients(*pushed[rank])
            check_equal_states(server.state_dict(), undisturbed)
            meet(name, "second run")
        if with_group:
            dist.destroy_process_group()


@pytest.mark.slow(but=("a group of trainers",))
@pytest.mark.parametrize("with_group", [False, True], ids=["each trainer alone", "a group of trainers"])
def test_a_run_that_is_restored_in_its_midst_ends_as_the_undisturbed_one(with_group):
    """A trainer that was still pushing when the first one loaded went on from a step that was no more."""
    run_workers(_restored, 5, with_group)


# -- beside data parallel layers ---------------------------------------------------------------------------------------


def _beside(rank, folder):
    name = [*TRAINERS, *SERVERS][rank]
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")  # Adagrad, at each step
    with join(name, rank, 5, folder):
        if rank > 1:
            return
        dist.init_process_group("phalanx", init_method=f"file://{folder}/group", rank=rank, world_size=2)
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            rows, dim, batch = 3 + seed, 1 + seed % 3, 2 * (1 + seed)
            table = torch.randn(rows, dim, generator=generator, dtype=torch.float64)
            torch.manual_seed(seed)
            dense = torch.nn.Sequential(torch.nn.Linear(dim, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
            alone, one = copy.deepcopy(dense), torch.nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
            make, make_rows = DENSE[seed % len(DENSE)], ROWS[seed % len(ROWS)]
            ddp = phalanx.DistributedDataParallel(dense)
            optimizer, optimizers = make(ddp.parameters()), [make(alone.parameters()), make_rows([one.weight])]
            with phalanx.ParameterServer(SERVERS, TRAINERS, tables={"t": table}, optimizer=make_rows) as server:
                for _ in range(4):
                    ids = torch.randint(rows, (batch,), generator=generator)
                    mine = ids[rank::2]
                    pulled = server.pull({"t": mine})
                    optimizer.zero_grad()
                    ddp(pulled["t"]).square().mean().backward()
                    optimizer.step()
                    server.push(pulled)
                    for each in optimizers:
                        each.zero_grad()
                    alone(one(ids)).square().mean().backward()
                    for each in optimizers:
                        each.step()
                found = server.state_dict()["tables"]["t"]
                meet(name, f"looked {seed}")
            torch.testing.assert_close(found, one.weight.detach())
            torch.testing.assert_close(list(dense.parameters()), list(alone.parameters()))
        dist.destroy_process_group()


@pytest.mark.slow
def test_dense_layers_in_ddp_and_rows_on_servers_train_as_in_one_process():
    run_workers(_beside, 5)
