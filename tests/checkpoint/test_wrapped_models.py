"""Models in wrappers go on from a checkpoint as the plain module would: versions, dtypes, orders and strides count."""

import copy

import pytest
import torch
from tests.comparisons import assert_equal
from tests.on_ranks import on_ranks
from tests.small_models import batch_of
from tests.training import train
from torch import nn

import phalanx
from phalanx.checkpoint import CheckpointManager, load_checkpoint, save_checkpoint
from phalanx.errors import CheckpointError
from phalanx.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class Versioned(nn.Module):
    """Until version 2 it was saved as its square root."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 4.0))

    def forward(self, x):
        return x * self.scale

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if (local_metadata.get("version") or 1) < 2:
            state_dict[prefix + "scale"] = state_dict[prefix + "scale"].square()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


class Derived(phalanx.DistributedDataParallel):
    """A user's own."""


WRAPPERS = {
    "ddp": phalanx.DistributedDataParallel,
    "derived": Derived,
    "torch": nn.parallel.DistributedDataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "compiled ddp": lambda model: torch.compile(phalanx.DistributedDataParallel(model), backend="eager"),
    "data parallel": nn.DataParallel,
}


def load_versions(rank, world_size, folder):
    found = {}
    for name, wrap in WRAPPERS.items():
        for number, source in enumerate((nn.Sequential(Versioned()), wrap(nn.Sequential(Versioned())))):
            manager = CheckpointManager(folder / f"{name}-{number}")
            path = manager.save(1, {"model": source})
            for strict in (True, False):
                target = nn.Sequential(Versioned())
                manager.load({"model": wrap(target)}, strict=strict)
                found[name, number, strict] = target[0].scale[0].item()
            load_checkpoint(path, into={"model": wrap(target)})
            found[name, number, "file"] = target[0].scale[0].item()
            manager.load({"model": (plain := nn.Sequential(Versioned()))})
            found[name, number, "plain"] = plain[0].scale[0].item()
    return found


@pytest.mark.slow
def test_modules_are_told_the_version_of_their_state_through_every_wrapper(tmp_path):
    """A state that was loaded into a wrapper had no versions, and modules took it for one of their first version."""
    (found,) = run_ranks(load_versions, 1, tmp_path)
    assert set(found.values()) == {4.0}, found


def load_versions_of_old(rank, world_size, folder):
    old = {"model": nn.Sequential(Versioned()).state_dict()}
    old["model"]._metadata["0"]["version"] = 1
    save_checkpoint(folder / "old", old)
    found = {}
    for name, wrap in WRAPPERS.items():
        target = nn.Sequential(Versioned())
        load_checkpoint(folder / "old", into={"model": wrap(target)})
        found[name] = target[0].scale[0].item()
    return found


@pytest.mark.slow
def test_modules_bring_an_old_state_up_to_date_through_every_wrapper(tmp_path):
    (found,) = run_ranks(load_versions_of_old, 1, tmp_path)
    assert set(found.values()) == {16.0}, found


@on_ranks(1)
def test_a_class_derived_from_the_wrapper_is_a_wrapper(tmp_path):
    """Names of its checkpoints began with `module.`, so that the plain module could not load them."""
    CheckpointManager(tmp_path).save(1, {"model": Derived(nn.Linear(2, 2))})
    assert list(load_checkpoint(tmp_path)["model"]) == ["weight", "bias"]


def with_counts(value, dtype, wrap):
    model = nn.Linear(2, 2)
    model.register_buffer("counts", torch.tensor([value], dtype=dtype))
    return wrap(model)


@pytest.mark.slow
@on_ranks(1)
def test_a_buffer_in_a_wrapper_takes_only_what_it_can_hold(tmp_path):
    """In DistributedDataParallel, 300 became 44: a hook of the wrapper's kept dtypes from being compared."""
    for name, wrap in WRAPPERS.items():
        manager = CheckpointManager(tmp_path / name)
        manager.save(1, {"model": with_counts(300.0, torch.float64, wrap)})
        here = with_counts(1, torch.int8, wrap)
        before = copy.deepcopy(here.state_dict())
        with pytest.raises(CheckpointError, match=r"counts: float64 in the checkpoint, int8 here"):
            manager.load({"model": here})
        assert_equal(here.state_dict(), before)


class Nested(nn.Module):
    """A child called `module`, as that of a wrapper, with the same names as its parent."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.module = nn.Module()
        self.module.inner = nn.Linear(2, 2)


@on_ranks(1, backend=None)
def test_a_child_called_module_has_parameters_of_its_own(tmp_path):
    """`module.inner` and `inner` were one name where the order of an optimizer's parameters was compared."""
    saved, here = Nested(), Nested()
    manager = CheckpointManager(tmp_path)
    inner, within = list(saved.inner.parameters()), list(saved.module.inner.parameters())
    manager.save(1, {"model": saved, "optimizer": torch.optim.SGD([*inner, *within], lr=0.1, momentum=0.9)})
    inner, within = list(here.inner.parameters()), list(here.module.inner.parameters())
    with pytest.raises(CheckpointError, match=r"parameter 0 is 'model.inner.weight'.*'model.module.inner.weight' here"):
        manager.load({"model": here, "optimizer": torch.optim.SGD([*within, *inner], lr=0.1, momentum=0.9)})
    manager.load({"model": here, "optimizer": torch.optim.SGD([*inner, *within], lr=0.1, momentum=0.9)})
    assert_equal(here.state_dict(), saved.state_dict())


def tied(first, second):
    model = nn.ModuleDict({first: nn.Linear(3, 3, bias=False), second: nn.Linear(3, 3, bias=False)})
    model[second].weight = model[first].weight
    return model


@on_ranks(1, backend=None)
def test_a_tied_parameter_is_known_by_each_of_its_names(tmp_path):
    """A model that registers the two in another order was refused: its parameter had the other name first."""
    manager = CheckpointManager(tmp_path)
    saved, here = tied("encoder", "decoder"), tied("decoder", "encoder")
    manager.save(1, {"model": saved, "optimizer": torch.optim.SGD(saved.parameters(), lr=0.1, momentum=0.9)})
    manager.load({"model": here, "optimizer": torch.optim.SGD(here.parameters(), lr=0.1, momentum=0.9)})
    assert torch.equal(here["encoder"].weight, saved["encoder"].weight)


# -- strides -----------------------------------------------------------------------------------------------------------


FUSED = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "fused": True}),
}


def convolutions(memory_format=torch.channels_last):
    """A ZeroRedundancyOptimizer of two ranks cuts one of these parameters, and leaves the others whole."""
    torch.manual_seed(1)
    return nn.Sequential(*[nn.Conv2d(4, 4, 3) for _ in range(3)]).to(memory_format=memory_format)


def step(model, optimizer):
    return train(model, optimizer, [batch_of(2, shape=(2, 4, 8, 8))])


@pytest.mark.slow(but=("AdamW-whole-plain", "AdamW-sharded-zero"))
@pytest.mark.parametrize("zero", [False, True], ids=["plain", "zero"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("kind", FUSED)
@on_ranks(2)
def test_a_fused_optimizer_goes_on_with_parameters_in_channels_last(tmp_path, kind, sharded, zero):
    """Its moments came back contiguous from a sharded checkpoint, and went to other elements: wrong by 0.15."""
    optimizer_class, options = FUSED[kind]
    model = convolutions()
    optimizer = optimizer_class(model.parameters(), **options)
    step(model, optimizer)
    source = convolutions()
    if zero:
        sharing = phalanx.ZeroRedundancyOptimizer(source.parameters(), optimizer_class, **options)
    else:
        sharing = optimizer_class(source.parameters(), **options)
    step(source, sharing)
    manager = CheckpointManager(tmp_path, sharded=sharded)
    manager.save(1, {"model": source, "optimizer": sharing})
    expected = step(model, optimizer)
    found = {}
    for way in ("parts", "state"):
        here = convolutions()
        mine = optimizer_class(here.parameters(), **options)
        if way == "parts":
            manager.load({"model": here, "optimizer": mine})
        else:
            state = manager.load().state
            here.load_state_dict(state["model"])
            mine.load_state_dict(state["optimizer"])
        found[way] = step(here, mine)
    assert_equal(found, dict.fromkeys(found, expected))


@pytest.mark.parametrize("zero", [False, True], ids=["plain", "zero"])
@on_ranks(2)
def test_moments_of_contiguous_parameters_fit_those_in_channels_last(tmp_path, zero):
    """In plain PyTorch such a state goes to other elements; the loop over parameters is right."""
    model = convolutions(torch.contiguous_format)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    step(model, optimizer)
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"model": model, "optimizer": optimizer})
    steps = []
    for fused in (False, True):
        here = convolutions()
        if zero:
            mine = phalanx.ZeroRedundancyOptimizer(here.parameters(), torch.optim.AdamW, lr=0.1, fused=fused)
        else:
            mine = torch.optim.AdamW(here.parameters(), lr=0.1, fused=fused)
        manager.load({"model": here, "optimizer": mine})
        mine.param_groups[0]["fused"] = fused  # PyTorch takes the option that was saved
        steps.append(step(here, mine))
    torch.testing.assert_close(*steps)
