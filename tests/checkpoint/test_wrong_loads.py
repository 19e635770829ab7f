"""A checkpoint and parts that do not fit it: an error, and nothing has changed. What fits is loaded to the bit."""

import copy
import random

import pytest
import torch
from tests.comparisons import assert_equal
from tests.on_ranks import on_ranks
from torch import nn

from phalanx.checkpoint import CheckpointManager, load_checkpoint, save_checkpoint
from phalanx.errors import CheckpointError
from phalanx.testing import run_ranks

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
}


class Brittle:
    """A part whose `load_state_dict` changes it and then fails."""

    def __init__(self, fails):
        self.value, self.fails = 0, fails

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        if self.fails and self.value:
            raise RuntimeError("brittle")


def build(model_seed, kind, *, order=None, buffer_dtype=torch.float64, width=3, fails=False, extra=False):
    torch.manual_seed(model_seed)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, width), *[nn.Linear(1, 1)] * extra)
    model.register_buffer("counts", torch.full((2,), 300.5).to(buffer_dtype))
    parameters = list(model.parameters())
    optimizer = OPTIMIZERS[kind]([parameters[at] for at in order] if order else parameters)
    return {"brittle": Brittle(fails), "model": model, "optimizer": optimizer, "after": Brittle(False)}


def train(parts):
    model, optimizer = parts["model"], parts["optimizer"]
    optimizer.zero_grad()
    out = model[2](model[1](model[0](torch.randn(4, 3))))
    out.square().sum().backward()
    optimizer.step()


def states(parts):
    return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})


WRONG = {
    "width": {"width": 4},
    "dtype": {"buffer_dtype": torch.int8},
    "missing": {"extra": True},
    "order": {"order": [2, 1, 0, 3, 4, 5]},
}


def load_by_dice(folder, seed, by_file):
    draw = random.Random(seed)
    kind = draw.choice(list(OPTIMIZERS))
    saved = build(seed, kind)
    train(saved)
    saved["brittle"].value = saved["after"].value = 7
    path = folder / f"{seed}-{by_file}"
    manager = CheckpointManager(path)
    if by_file:
        save_checkpoint(path, states(saved))
    else:
        manager.save(1, saved)
    wrong = draw.choice([None, "class", *WRONG])
    alike = [{"Adam", "AdamW"}, {"Adamax", "RAdam"}] if by_file else []  # a file of torch.save does not say the class
    other = draw.choice([name for name in OPTIMIZERS if {name, kind} not in alike and name != kind])
    here = build(seed + 1000, other if wrong == "class" else kind, **WRONG.get(wrong, {}))
    if draw.random() < 0.5 and wrong != "order" and wrong != "missing":
        train(here) if wrong != "width" else None
    before = states(here)
    parts = dict(draw.sample(list(here.items()), len(here)))
    load = (lambda: load_checkpoint(path, into=parts)) if by_file else (lambda: manager.load(parts))
    if wrong is None or (wrong == "order" and by_file):  # a file of torch.save does not say the order
        load()
        assert_equal(states(here)["model"], states(saved)["model"])
        if wrong is None:
            assert_equal(states(here), states(saved))
    else:
        with pytest.raises(CheckpointError, match=r"Nothing was loaded"):
            load()
        assert_equal(states(here), before)
        train(here) if wrong not in ("width", "missing") else None  # it goes on
    return wrong


def load_many(rank, world_size, folder, by_file):
    return {load_by_dice(folder, seed, by_file) for seed in range(40)}


@pytest.mark.slow
@pytest.mark.parametrize("by_file", [False, True], ids=["manager", "file"])
def test_what_does_not_fit_changes_nothing(tmp_path, by_file):
    """An AdamW state went into SGD, 300 became 44 in int8, moments went to other parameters, all without a word."""
    (seen,) = run_ranks(load_many, 1, tmp_path, by_file, backend=None)
    assert seen == {None, "class", *WRONG}


class Named(torch.optim.AdamW):
    """Derived from a class of PyTorch, whose state it loads."""


@pytest.mark.slow(but=("whole",))
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@on_ranks(1)
def test_classes_with_the_same_options_are_told_apart(tmp_path, sharded):
    """The state of Adam was loaded into AdamW, and that of RAdam into Adamax."""
    for kind, other in [("Adam", "AdamW"), ("AdamW", "Adam"), ("RAdam", "Adamax"), ("Adamax", "RAdam")]:
        saved, here = build(1, kind), build(2, other)
        train(saved)
        manager = CheckpointManager(tmp_path / kind, sharded=sharded)
        path, before = manager.save(1, saved), states(here)
        for load in (lambda: manager.load(here), lambda: load_checkpoint(path, into=here)):  # noqa: B023
            with pytest.raises(CheckpointError, match=rf"another optimizer class: {kind} \(here {other}\)"):
                load()
            assert_equal(states(here), before)
    saved, here = build(1, "AdamW"), build(2, "AdamW")
    train(saved)
    here["optimizer"] = Named(here["model"].parameters())
    manager = CheckpointManager(tmp_path / "derived", sharded=sharded)
    manager.save(1, saved)
    manager.load(here)
    assert_equal(states(here), states(saved))


@on_ranks(1, backend=None)
def test_a_checkpoint_from_before_classes_were_written_loads(tmp_path):
    saved, here = build(1, "Adam"), build(2, "Adam")
    train(saved)
    with pytest.MonkeyPatch.context() as context:
        context.setattr("phalanx.checkpoint.optimizer_fit._class_of", lambda optimizer: "")
        path = CheckpointManager(tmp_path).save(1, saved)
    assert "classes" not in (path / "checkpoint.json").read_text()
    CheckpointManager(tmp_path).load(here)
    assert_equal(states(here), states(saved))


def fail_on_one(rank, world_size, folder):
    manager = CheckpointManager(folder)
    saved = build(1, "SGD")
    train(saved)
    saved["brittle"].value = 7
    manager.save(1, saved)
    here = build(2, "SGD", fails=rank == 1)
    try:
        manager.load(here)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_a_part_that_fails_on_one_rank_is_an_error_on_all(tmp_path):
    first, second = run_ranks(fail_on_one, 2, tmp_path)
    assert first == second
    assert "rank 1" in first
    assert "brittle" in first


@pytest.mark.parametrize("by_file", [False, True], ids=["manager", "file"])
def test_a_part_that_raises_while_it_loads_is_told_with_what_to_do(tmp_path, by_file):
    parts, path, saved = {"part": Brittle(True)}, tmp_path / "saved", {"part": {"value": 7}}
    manager = CheckpointManager(path)
    save_checkpoint(path, saved) if by_file else manager.save(1, saved)
    with pytest.raises(CheckpointError, match=r"Some parts may have changed\. Create them again"):
        load_checkpoint(path, into=parts) if by_file else manager.load(parts)


def test_a_folder_that_was_renamed_is_not_its_new_step(tmp_path):
    manager = CheckpointManager(tmp_path)
    path = manager.save(10, {"x": 1})
    path.rename(tmp_path / "00000001-step-20")
    with pytest.raises(CheckpointError, match=r"is named for step 20, but is the checkpoint of step 10"):
        manager.load(step=20)
    (tmp_path / "00000001-step-20").rename(tmp_path / "best")
    assert load_checkpoint(tmp_path / "best") == {"x": 1}


@pytest.mark.parametrize(
    ("saved", "here", "fits"),
    [
        (torch.tensor([300.0]), torch.int8, False),
        (torch.tensor([300]), torch.int8, False),
        (torch.tensor([100]), torch.int8, True),
        (torch.tensor([-1]), torch.uint8, False),
        (torch.tensor([1 + 1j]), torch.float32, False),
        (torch.tensor([2]), torch.bool, False),
        (torch.tensor([True]), torch.int64, True),
        (torch.tensor([1.5]), torch.float16, True),
        (torch.tensor([3]), torch.float32, True),
    ],
)
def test_a_buffer_takes_what_it_can_hold(tmp_path, saved, here, fits):
    model = nn.Module()
    model.register_buffer("x", torch.zeros(1, dtype=here))
    save_checkpoint(tmp_path / "a.pt", {"model": {"x": saved}})
    if fits:
        load_checkpoint(tmp_path / "a.pt", into={"model": model})
        assert model.x.item() == saved.item()
    else:
        with pytest.raises(CheckpointError, match=r"cannot hold its values"):
            load_checkpoint(tmp_path / "a.pt", into={"model": model})
        assert model.x.item() == 0
