"""Stages' optimizers are saved as that of the whole model, and load into any split of it, and into plain PyTorch."""

import contextlib
import copy

import pytest
import torch
from tests.pipeline.unsplit import Transformer, letters_loss
from tests.training import train
from torch import nn

import phalanx
import phalanx.optim
import phalanx.pipeline.pipeline  # imported once here, not once in each rank
from phalanx.pipeline.whole_optimizer import ParamGroup, fit, merge_groups, whole_names
from phalanx.testing import run_ranks

STEPS = 2


def _by_kind(model, decay):
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": decay},
        {"params": [p for _, p in named if p.ndim <= 1], "lr": 0.02},
    ]


def _by_layer(model):
    """As for rates that fall with depth: ranks have other groups, and other numbers of them."""
    return [{"params": [p], "lr": 0.01 * (1 + len(name) % 3)} for name, p in model.named_parameters()]


OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "groups": lambda model: torch.optim.SGD(_by_kind(model, 0.1), lr=0.05, momentum=0.9),
    "names": lambda model: torch.optim.Adagrad(model.named_parameters(), lr=0.01),
    "layers": lambda model: torch.optim.Adam(_by_layer(model), lr=0.01),
}


class Model(Transformer):
    """With an embedding that is the output layer, too, a frozen layer, and one that nobody calls."""

    def __init__(self):
        super().__init__(11, 8, 3, 0.0, tied=True)
        self.unused = nn.Linear(2, 2)
        self.blocks[1].mlp[0].weight.requires_grad_(False)


def _model():
    torch.manual_seed(3)
    return Model().double()  # Adam makes a step of rounding errors where a gradient is zero, as attention's key biases'


def _batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(11, (16, 6), generator=generator), torch.randint(11, (16, 6), generator=generator)


def _train(pipe, optimizer, steps, slices=slice(None)):
    for step in steps:
        inputs, targets = (part[slices] for part in _batch(step))
        optimizer.zero_grad()
        pipe.step(inputs, target=targets)
        optimizer.step()


def _train_whole(model, optimizer, steps):
    train(model, optimizer, map(_batch, steps), letters_loss)


def _pipe(balance="auto", schedule="1f1b", **arguments):
    return phalanx.Pipeline(_model(), micro_batches=4, balance=balance, schedule=schedule, loss_fn=letters_loss,
                            **arguments)  # fmt: skip


def _save(rank, world_size, folder):
    """Train, save, and train on."""
    found = {}
    for name, make in OPTIMIZERS.items():
        pipe = _pipe(["blocks.1"])
        optimizer = make(pipe)
        _train(pipe, optimizer, range(STEPS))
        state = {"model": pipe.state_dict(rank0_only=True),
                 "optimizer": pipe.optimizer_state_dict(optimizer, rank0_only=True)}  # fmt: skip
        phalanx.save_checkpoint(folder / f"{name}.pt", state)
        everywhere = copy.deepcopy(pipe.optimizer_state_dict(optimizer))
        _train(pipe, optimizer, range(STEPS, 2 * STEPS))
        found[name] = everywhere, pipe.state_dict()
    return found


def _load(rank, world_size, folder, balance, suffix=""):
    """Into another split; and train on."""
    found = {}
    for name, make in OPTIMIZERS.items():
        pipe = _pipe(balance, "interleaved" if world_size == 3 else "1f1b")
        optimizer = make(pipe)
        state = phalanx.load_checkpoint(folder / f"{name}{suffix}.pt", into={"model": pipe})
        pipe.load_optimizer_state_dict(optimizer, state["optimizer"])
        _train(pipe, optimizer, range(STEPS, 2 * STEPS))
        found[name] = pipe.state_dict()
    return found


def _close(ours, theirs, what):
    assert list(ours) == list(theirs)
    for key, value in theirs.items():
        torch.testing.assert_close(
            ours[key], value, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{what} {key} {text}"
        )


@pytest.mark.slow
def test_the_state_of_stages_optimizers_is_that_of_one_and_loads_into_any_split(tmp_path):
    saved = run_ranks(_save, 2, tmp_path)
    undisturbed = {name: weights for name, (_, weights) in saved[0].items()}
    for name, make in OPTIMIZERS.items():
        model = _model()
        optimizer = make(model)
        _train_whole(model, optimizer, range(STEPS))
        plain = copy.deepcopy(optimizer.state_dict())
        torch.save({"model": model.state_dict(), "optimizer": plain}, tmp_path / f"{name}-plain.pt")
        whole = torch.load(tmp_path / f"{name}.pt", weights_only=True)["optimizer"]
        for state in (whole, *(rank[name][0] for rank in saved)):  # the form is that of plain PyTorch
            assert list(state) == ["state", "param_groups"]
            for ours, theirs in zip(state["param_groups"], plain["param_groups"], strict=True):
                names = ours.pop("param_names")
                assert ours == {key: value for key, value in theirs.items() if key != "param_names"}
                assert len(names) == len(ours["params"])
            assert list(state["state"]) == list(plain["state"])
            for number, entry in plain["state"].items():
                _close(state["state"][number], entry, f"{name} {number}")
        model = _model()  # and plain PyTorch goes on from it
        model.load_state_dict(torch.load(tmp_path / f"{name}.pt")["model"])
        optimizer = make(model)
        optimizer.load_state_dict(torch.load(tmp_path / f"{name}.pt")["optimizer"])
        _train_whole(model, optimizer, range(STEPS, 2 * STEPS))
        _close(model.state_dict(), undisturbed[name], name)
    for rank in run_ranks(_load, 2, tmp_path, ["blocks.1"]):  # the same split: the same bits
        for name, weights in rank.items():
            assert all(torch.equal(weights[key], value) for key, value in undisturbed[name].items()), name
    for world_size, balance in ((2, ["blocks.2"]), (3, "auto"), (1, "auto")):
        for suffix in ("", "-plain") if world_size == 3 else ("",):
            for rank in run_ranks(_load, world_size, tmp_path, balance, suffix):
                for name, weights in rank.items():
                    _close(weights, undisturbed[name], f"{name} on {world_size} ranks{suffix}")


def _save_in_mesh(rank, world_size, folder, sharded):
    mesh = phalanx.mesh(pipeline=2, data=2)
    data = mesh.get_local_rank("data")
    pipe = _pipe(["blocks.1"], mesh=mesh)
    optimizer = phalanx.ZeroRedundancyOptimizer(
        _by_kind(pipe, 0.1), torch.optim.AdamW, process_group=mesh.get_group("data"), lr=0.01
    )
    _train(pipe, optimizer, range(STEPS), slice(data, None, 2))
    with phalanx.CheckpointManager(folder, sharded=sharded) as manager:
        manager.save(STEPS, {"model": pipe, "optimizer": optimizer})
    whole = copy.deepcopy(pipe.optimizer_state_dict(optimizer))
    _train(pipe, optimizer, range(STEPS, 2 * STEPS), slice(data, None, 2))
    again = _pipe(["blocks.1"], mesh=mesh)
    other = phalanx.ZeroRedundancyOptimizer(
        _by_kind(again, 0.1), torch.optim.AdamW, process_group=mesh.get_group("data"), lr=0.5
    )
    with phalanx.CheckpointManager(folder) as manager, _warns_of_unused(again):
        manager.load({"model": again, "optimizer": other})
    _train(again, other, range(STEPS, 2 * STEPS), slice(data, None, 2))
    same = all(torch.equal(a, b) for a, b in zip(pipe.parameters(), again.parameters(), strict=True))
    return same, pipe.state_dict(), whole


def _warns_of_unused(pipe):
    """On the rank that takes care of what no stage uses, and nowhere else."""
    if any(name.startswith("unused") for name, _ in pipe.named_parameters()):
        return pytest.warns(UserWarning, match=r"no state for 2 of \d+ parameters \('unused.weight', 'unused.bias'\)")
    return contextlib.nullcontext()


def _load_by_manager(rank, world_size, folder):
    pipe = _pipe()
    optimizer = torch.optim.AdamW(_by_kind(pipe, 0.1), lr=0.5)
    with phalanx.CheckpointManager(folder) as manager:
        with _warns_of_unused(pipe):
            manager.load({"model": pipe, "optimizer": optimizer})
        _train(pipe, optimizer, range(STEPS, 2 * STEPS))
        manager.save(2 * STEPS, {"model": pipe, "optimizer": optimizer})
        with pytest.raises(phalanx.CheckpointError, match=r"does not fit:\n.*are in groups with other options"):
            manager.load({"optimizer": torch.optim.AdamW(pipe.parameters(), lr=1.0)})
        with pytest.raises(phalanx.CheckpointError, match=r"does not fit:\n.*AdamW \(here SGD\)"):
            manager.load({"optimizer": torch.optim.SGD(pipe.parameters(), lr=1.0)})
    return pipe.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "sharded"), [("phalanx", None), ("phalanx", False), ("gloo", True)])
def test_a_sharded_optimizer_of_replicas_is_saved_as_that_of_the_whole_model(backend, sharded, tmp_path):
    """The manager refused it by name: every rank's optimizer updates other parameters."""
    ranks = run_ranks(_save_in_mesh, 4, tmp_path, sharded, backend=backend)
    model = _model()
    optimizer = torch.optim.AdamW(_by_kind(model, 0.1), lr=0.01)
    _train_whole(model, optimizer, range(STEPS))
    plain = copy.deepcopy(optimizer.state_dict()["state"])
    for same, _, whole in ranks:
        assert same, "weights that were trained on from the checkpoint are, bit by bit, the undisturbed ones"
        assert whole["state"].keys() == plain.keys()
        for number, entry in plain.items():
            _close(whole["state"][number], entry, str(number))
    for weights in run_ranks(_load_by_manager, 3, tmp_path):
        _close(weights, ranks[0][1], "three stages")
    state = phalanx.load_checkpoint(tmp_path)  # three stages' own, into one process
    optimizer.load_state_dict(state["optimizer"])
    model.load_state_dict(state["model"])
    _close(model.state_dict(), ranks[0][1], "one process")


def test_groups_of_stages_are_merged_by_place_or_by_parameter():
    order = {name: at for at, name in enumerate("abcdef")}
    first = [ParamGroup({"lr": 1.0}, ["c", "a"]), ParamGroup({"lr": 2.0}, [])]
    second = [ParamGroup({"lr": 1.0}, ["d"]), ParamGroup({"lr": 2.0}, ["f", "c"])]
    assert [group.names for group in merge_groups([first, second], order)] == [["a", "c", "d"], ["c", "f"]]
    third = [ParamGroup({"lr": torch.tensor(3.0)}, ["d", "a"]), ParamGroup({"lr": 2.0}, [""]), ParamGroup({}, ["e"])]
    merged = merge_groups(
        [[ParamGroup({"lr": 0.5}, ["b"]), ParamGroup({"lr": torch.tensor(3.0)}, ["a", "c"])], third], order
    )
    assert [group.names for group in merged] == [["a", "c", "d"], ["b"], ["e"]]


def test_a_state_that_does_not_fit_is_reported_by_name():
    state = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": [{"lr": 1.0, "params": [0, 1]}]}
    assert "does not name its parameters" in whole_names(state, None, ["a", "b", "c"])
    assert whole_names(state, None, ["a", "b"]) == [["a", "b"]]
    assert "groups of [2] parameters in the state, [1] in all stages here" in whole_names(
        state, [["a"]], ["a", "b", "c"]
    )
    shapes = {name: torch.Size([3]) for name in "abc"}
    _, problems = fit(state, [["a", "x"]], [ParamGroup({}, ["a", "c"])], shapes, ["a", "b", "c"])
    assert problems == [
        "no state for c",
        "state for parameters that the model does not have: x",
        "a.exp_avg: (2,) in the state, (3,) here",
    ]
    two = {"state": {}, "param_groups": [{"lr": 1.0, "params": ["a"]}, {"lr": 2.0, "params": ["b"]}]}
    _, problems = fit(two, [["a"], ["b"]], [ParamGroup({}, ["a", "b"])], shapes, ["a", "b"])
    assert "in groups with other options" in problems[0]
