"""Any state comes back as it comes back from torch.save, to the bit."""

import io
import random

import pytest
import torch
from tests.checkpoint.random_trees import difference, random_state

from phalanx.checkpoint import CheckpointManager
from phalanx.testing import run_ranks


def by_torch(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_random_states_come_back_as_from_torch_save(tmp_path, trees):
    def save(rank, world_size):
        managers = [CheckpointManager(tmp_path / str(kind), sharded=kind) for kind in (False, True)]
        problems = []
        for seed in range(trees):
            torch.manual_seed(seed)
            state = random_state(random.Random(seed))
            expected = by_torch(state)
            for manager in managers:
                manager.async_save(seed, state)
                found = manager.load().state
                if text := difference(expected, found):
                    problems.append(f"seed {seed}, sharded={manager.sharded}: {text}")
        return problems

    for world_size in (1, 2):
        assert run_ranks(save, world_size, timeout=100) == [[]] * world_size


def test_memory_that_is_shared_in_the_state_is_shared_in_what_is_loaded(tmp_path):
    weight = torch.arange(6.0)
    for sharded in (False, True):
        manager = CheckpointManager(tmp_path / str(sharded), sharded=sharded)
        manager.async_save(1, {"encoder": weight, "decoder": weight, "row": weight[:3], "other": weight.clone()})
        state = manager.load().state
        state["encoder"].fill_(7)
        assert state["decoder"].eq(7).all()
        assert torch.equal(state["other"], torch.arange(6.0))
        if not sharded:
            assert state["row"].eq(7).all(), "a view of a part, too, in one file"
