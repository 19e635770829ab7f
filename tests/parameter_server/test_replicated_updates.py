"""What a primary has applied goes to its replica: both make the same of it, whatever the optimizer does to gradients.

An optimizer that unscaled or clipped in place changed what was pushed, before the replica heard of it: after the
primary's loss training went on from other numbers.
"""

import copy
import dataclasses
import pickle
import random

import pytest
import torch
import torch._dynamo  # every optimizer loads it
from tests.optim.random_training import OPTIMIZERS, Training

from phalanx.parameter_server.clipping import Clip
from phalanx.parameter_server.shard import PushedGradients, Shard, Spec

_STEPPING = [one for one in OPTIMIZERS if one is not torch.optim.LBFGS]  # which wants a closure, and is refused


def _in_place(optimizer_class, options):
    """An optimizer of this class that unscales and clips its gradients in place, as users' own do."""

    class InPlace(optimizer_class):
        def step(self, closure=None):
            for parameter in (p for group in self.param_groups for p in group["params"]):
                if parameter.grad is not None:
                    values = parameter.grad._values() if parameter.grad.is_sparse else parameter.grad
                    values.div_(4).clamp_(-0.5, 0.5)
            return super().step(closure)

    return lambda parameters: InPlace(parameters, **options)


def _same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    return one == other


def _push(draw, state):
    """Of one trainer for one step, some gradients missing."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    dense = {
        name: 4 * torch.randn(value.shape, generator=generator)
        for name, value in state["dense"].items()
        if draw.random() < 0.8
    }
    rows = {}
    for name, table in state["tables"].items():
        ids = torch.tensor(sorted(draw.sample(range(len(table)), draw.choice([0, 1, 2]))), dtype=torch.int64)
        rows[name] = ids, 4 * torch.randn((len(ids), table.shape[1]), generator=generator)
    return PushedGradients(dense, rows)


def _pushes(draw, primary, trainers, state, clip, options):
    """The entries by which a step becomes whole: of each trainer, and of the norm if it clips."""
    clock = primary.step
    for trainer in trainers:
        yield "push", trainer, clock, dataclasses.replace(_push(draw, state), options=options, clip=clip)
    if clip is not None:
        norms = [norm for each in primary.norms().values() for norm in each.values()]
        yield "clip", clock, clip.total(norms, [])


@pytest.mark.slow(but=("Adam", "SGD", "Muon"))
@pytest.mark.parametrize("optimizer_class", _STEPPING, ids=lambda one: one.__name__)
def test_a_replica_applies_updates_as_its_primary_does(optimizer_class):
    is_sparse = optimizer_class is torch.optim.SparseAdam
    for seed in range(4):
        draw = random.Random(f"{optimizer_class.__name__} {seed}")
        make = _in_place(optimizer_class, Training(optimizer_class, seed).options("defaults"))
        by_rows = make if is_sparse else _in_place(torch.optim.SGD, {"lr": 0.1})
        trainers = ("t0", "t1")[: 1 + seed % 2]
        spec = Spec("p", ("s", "r"), trainers, seed < 2, None, make, by_rows, draw.choice(["sum", "mean"]), True, "")
        dense = {} if is_sparse else {f"d{n}": torch.randn(n + 2, 3) for n in range(3)}
        state = {"step": 0, "dense": dense, "tables": {"t": torch.randn(5, 2)}, "optimizer": {}}
        primary, replica = Shard(spec, state), Shard(spec, state)
        for clock in range(5):
            for trainer in trainers:
                pushed = _push(draw, state)
                before = copy.deepcopy(pushed)
                primary.apply(("push", trainer, clock, pushed))
                assert _same(pushed.dense, before.dense), f"case {seed}: changed what was pushed"
                assert all(_same(pushed.rows[name][1], before.rows[name][1]) for name in before.rows)
                replica.apply(pickle.loads(pickle.dumps(("push", trainer, clock, pushed))))
        assert _same(primary.state(), replica.state()), f"case {seed}"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.SGD, torch.optim.Adafactor])
def test_a_replica_that_is_made_during_a_clipped_step_continues_as_its_primary(optimizer_class):
    """With groups, of which one comes later, and options that change; each entry comes to the copies twice."""
    for seed in range(6):
        draw = random.Random(f"{optimizer_class.__name__} {seed} groups")
        make, by_rows = _in_place(optimizer_class, {"lr": 0.1}), _in_place(torch.optim.SGD, {"lr": 0.1})
        trainers = ("t0", "t1")
        spec = Spec("p", ("s", "r"), trainers, True, None, make, by_rows, "mean", True, "")
        values = {f"d{n}": torch.randn(n + 2, 3) for n in range(3)}
        groups = {
            "dense": [{"params": ["d0"], "lr": 0.1}, {"params": ["d1"], "lr": 0.2}],
            "tables": [{"params": ["t"], "lr": 0.1}],
        }
        held = {name: values[name] for name in ("d0", "d1")}
        state = {"step": 0, "dense": held, "tables": {"t": torch.randn(5, 2)}, "optimizer": {}, "groups": groups}
        copies = [Shard(spec, state)]
        options = {kind: [{"lr": one["lr"]} for one in each] for kind, each in groups.items()}
        for clock in range(6):
            if clock == 2:
                entry = "add", 0, "dense", {"params": ["d2"], "lr": 0.3}, {"d2": values["d2"]}, "later"
                for one in [*copies, *copies]:
                    one.apply(entry)
                options["dense"].append({"lr": 0.3})
                held["d2"] = values["d2"]
            clip = Clip(draw.choice([0.1, 5.0]), draw.choice([1.0, 2.0, float("inf")])) if draw.random() < 0.6 else None
            draw.choice(options["dense"])["lr"] = draw.choice([0.01, 0.5])
            for entry in _pushes(draw, copies[0], trainers, state, clip, options):
                for one in [*copies, *copies]:
                    one.apply(pickle.loads(pickle.dumps(entry)))
                if draw.random() < 0.3:
                    copies.append(Shard.from_snapshot(copy.deepcopy(draw.choice(copies).snapshot())))
        found = [one.state() for one in copies]
        assert found[0]["step"] == 6
        assert [group["lr"] for group in found[0]["groups"]["dense"]] == [one["lr"] for one in options["dense"]]
        for one in found:
            assert one["groups"] == found[0]["groups"]
            assert all(_same(one[key], found[0][key]) for key in ("dense", "tables", "optimizer")), f"case {seed}"
