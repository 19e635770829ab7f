"""Tensors without plain memory, and containers without an end, are saved as torch.save does it, or refused by name."""

import functools
import io
import random
import resource
import warnings
from pathlib import Path

import pytest
import torch
from tests.on_ranks import on_ranks
from torch import nn

from phalanx.checkpoint import CheckpointManager
from phalanx.checkpoint.tree import Tree
from phalanx.errors import CheckpointError
from phalanx.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


@functools.cache
def _nested_layouts():
    """Return the layouts of nested tensors that this PyTorch can load: 2.15 does not load all that it saves."""
    return [name for name, layout in (("jagged", torch.jagged), ("nested", torch.strided)) if _loads(layout)]


def _loads(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        buffer = io.BytesIO()
        torch.save(torch.nested.nested_tensor([torch.ones(2)], layout=layout), buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except Exception:
            return False
    return True


def _draw_odd(dice):
    rows = [torch.randn(dice.randint(1, 4)) for _ in range(dice.randint(1, 3))]
    dense = torch.randn(dice.randint(1, 4), dice.randint(1, 4)).relu()
    layout = dice.choice(["coo", "uncoalesced", "csr", "csc", "parameter", *_nested_layouts()])
    if layout == "uncoalesced":
        return torch.sparse_coo_tensor([[0, 0, 2]], torch.randn(3), (4,))
    if layout in ("jagged", "nested"):
        return torch.nested.nested_tensor(rows, layout=torch.jagged if layout == "jagged" else torch.strided)
    if layout == "parameter":
        return nn.Parameter(dense.to_sparse(), requires_grad=dice.random() < 0.5)
    return {"coo": dense.to_sparse, "csr": dense.to_sparse_csr, "csc": dense.to_sparse_csc}[layout]()


def _draw_state(dice):
    return {
        "odd": [_draw_odd(dice), {"inside": _draw_odd(dice)}],
        "plain": {"w": torch.randn(3), "step": dice.randint(0, 9)},
        "last": _draw_odd(dice),
    }


def _describe(value):
    """Return what a state holds, as plain data that can be compared."""
    if isinstance(value, dict):
        return {key: _describe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_describe(item) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    kind = (type(value), str(value.layout), value.requires_grad, value.is_nested)
    if value.is_nested:
        return kind, [one.tolist() for one in value.unbind()]
    coalesced = value.layout is torch.sparse_coo and value.is_coalesced()
    return kind, coalesced, tuple(value.shape), value.detach().to_dense().tolist()


@pytest.mark.slow(but=("2",))
@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_sparse_and_nested_tensors_come_back_from_either_form(world_size, tmp_path):
    """The sharded form failed with "Cannot access storage of SparseTensorImpl", and others of torch's own errors."""
    problems = []
    managers = [CheckpointManager(tmp_path / f"{world_size}-{kind}", sharded=kind) for kind in (False, True)]
    for seed in range(8):
        torch.manual_seed(seed)
        state = _draw_state(random.Random(seed))
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        expected = _describe(torch.load(buffer, weights_only=True))
        for manager in managers:
            manager.save(seed, state)
            if _describe(manager.load().state) != expected:
                problems.append((seed, manager.sharded))
    assert problems == []


def test_a_sharded_copy_of_a_sparse_tensor_is_that_of_the_call(tmp_path):
    weight = torch.eye(3).to_sparse().coalesce()
    with CheckpointManager(tmp_path, sharded=True) as manager:
        manager.async_save(1, {"w": weight})
        weight.values().fill_(7)
        assert torch.equal(manager.load().state["w"].to_dense(), torch.eye(3))


def test_a_tensor_on_the_meta_device_is_refused_by_name_on_every_rank(tmp_path):
    """Its rank failed with "Cannot copy out of meta tensor; no data!"."""

    def save(rank, world_size):
        model = nn.Linear(2, 2, device="meta" if rank == 1 else "cpu")
        manager = CheckpointManager(tmp_path, sharded=True)
        with pytest.raises(CheckpointError) as info:
            manager.save(1, {"model": model})
        assert not list(tmp_path.iterdir())
        return str(info.value)

    first, second = run_ranks(save, 2)
    assert first == second
    assert "save: 'model.weight' is on the meta device on rank 1, and has no values to write. Nothing was" in first


def _hold_itself(dice):
    """A state in which one container holds one that is above it, with the message's words on it."""
    state = {"plain": torch.ones(1), "deep": {}}
    value, path, above = state["deep"], "state['deep']", [("state['deep']", state["deep"])]
    for _ in range(dice.randint(0, 3)):
        inside, key = dice.choice([({}, "in"), ([torch.ones(1)], 0)])
        if isinstance(value, dict):
            value["in"], key = inside, "in"
        else:
            key = len(value)
            value.append(inside)
        value, path = inside, f"{path}[{key!r}]"
        above.append((path, value))
    target_path, target = dice.choice(above)
    if isinstance(value, dict):
        value["self"], key = target, "self"
    else:
        key = len(value)
        value.append(target)
    return state, f"{path}[{key!r}] is {target_path} itself, so the state contains a cycle"


@pytest.mark.slow
@on_ranks(2)
def test_a_state_that_holds_itself_is_refused_by_name(rank, tmp_path):
    """The error was Python's: maximum recursion depth exceeded."""
    for seed in range(8):
        state, words = _hold_itself(random.Random(seed))
        for sharded in (None, False, True):
            manager = CheckpointManager(tmp_path, sharded=sharded)
            with pytest.raises(CheckpointError) as info:
                manager.save(1, state if rank == 0 else {"plain": 1})
            assert f"save on rank 0: {words}. Nothing was written" in str(info.value), seed
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@on_ranks(1)
def test_a_state_that_is_nested_too_deeply_is_refused_in_little_memory(tmp_path):
    """The names of all its containers took 15 GB: the test's process was killed, or forked slowly from then on."""
    state = [torch.ones(1)]
    for _ in range(100_000):
        state = [state]
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30,) * 2)
    with pytest.raises(CheckpointError, match="lists and tuples of the state are nested too deeply for Python"):
        CheckpointManager(tmp_path).save(1, {"state": state})
    while isinstance(state, list):  # Python would take it apart by recursion
        (state,) = state


def test_containers_that_are_shared_are_no_cycle():
    shared = [torch.ones(1), ()]
    state = {"a": shared, "b": {"c": shared, "d": (shared, shared)}}
    assert len(Tree.of(state).leaves) == 8
