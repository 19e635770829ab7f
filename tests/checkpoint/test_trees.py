"""Any state comes back as it comes back from torch.save, to the bit."""

import io
import random
import threading
from collections import defaultdict, deque

import pytest
import torch
from tests.checkpoint.random_trees import change, difference, random_state

from phalanx.checkpoint import CheckpointManager, save_work, whole
from phalanx.checkpoint.peers import Peers
from phalanx.checkpoint.snapshot import SnapshotMemory, copy_tree
from phalanx.errors import CheckpointError
from phalanx.testing import run_ranks


def by_torch(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("machines", ["one-machine", "several-machines"])
def test_random_states_come_back_as_from_torch_save(tmp_path, effort, seed, monkeypatch, machines):
    if machines == "several-machines":
        monkeypatch.setattr(Peers, "is_same_file", lambda self, file: False)

    def save(rank, world_size):
        managers = [CheckpointManager(tmp_path / str(kind), sharded=kind) for kind in (False, True)]
        problems = []
        for number in range(seed, seed + 10 * effort):
            torch.manual_seed(number)
            state = random_state(random.Random(number))
            expected = by_torch(state)
            for manager in managers:
                manager.async_save(number, state)
                found = manager.load().state
                if text := difference(expected, found):
                    problems.append(f"seed {number}, sharded={manager.sharded}: {text}")
        return problems

    for world_size in (1, 2):
        assert run_ranks(save, world_size) == [[]] * world_size


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


def test_nothing_that_changes_later_gets_into_a_copy(effort, seed):
    """Sets and bytearrays were kept by reference: the checkpoint of step 1 had an element that was added in step 2."""
    for number in range(seed, seed + 10 * effort):
        torch.manual_seed(number)
        state = random_state(random.Random(number))
        torch.manual_seed(number)
        expected = random_state(random.Random(number))
        state["more"] = {"queue": deque([{1}]), "lists": defaultdict(list, {0: [bytearray(b"a")]}), "set": {1}}
        expected["more"] = {"queue": deque([{1}]), "lists": defaultdict(list, {0: [bytearray(b"a")]}), "set": {1}}
        copy = copy_tree(state, SnapshotMemory())
        state["more"]["queue"][0].add(2)
        change(state)
        assert not difference(expected, copy), f"seed {number}"


def test_a_set_that_changes_while_a_checkpoint_is_written_is_saved_as_it_was(tmp_path, monkeypatch):
    written = threading.Event()

    def write_late(folder, state):
        written.wait()
        return whole.write_whole(folder, state)

    monkeypatch.setattr(save_work, "write_whole", write_late)
    seen = {1, 2}
    manager = CheckpointManager(tmp_path)
    manager.async_save(1, {"seen": seen})
    seen.add(3)
    written.set()
    manager.wait()
    assert manager.load().state == {"seen": {1, 2}}


def test_what_is_set_on_a_tensor_is_copied_with_it():
    """A save in the background had lost it, and a save in the foreground had not."""
    tied = torch.ones(2)
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.groups, parameter.tied = {"decay": [1]}, tied
    tensor = torch.zeros(2)
    tensor.tag = "x"
    state = {"parameter": parameter, "tensor": tensor, "tied": tied}
    copy = copy_tree(state, SnapshotMemory())
    parameter.groups["decay"].append(2)
    assert (copy["parameter"].groups, copy["tensor"].tag) == ({"decay": [1]}, "x")
    assert copy["parameter"].tied.eq(1).all()
    assert not vars(copy["tied"])


class Uncopyable(torch.Tensor):
    def cpu(self):
        raise OSError(12, "Cannot allocate memory")


def _save_what_cannot_be_copied(rank, world_size, folder):
    manager = CheckpointManager(folder)
    said = []
    for tensor in (torch.ones(2), torch.ones(2).as_subclass(Uncopyable), torch.empty(3, device="meta"), torch.ones(1)):
        try:
            manager.async_save(len(said) + 1, {"a": tensor})
            manager.wait()
            said.append("")
        except CheckpointError as error:
            said.append(str(error))
    return said, sorted(path.name for path in folder.iterdir())


def test_a_state_that_rank_0_cannot_copy_is_told_on_every_rank(tmp_path):
    """Rank 0 raised an error of its own, rank 1 none; whatever they called next was another thing on each."""
    first, second = run_ranks(_save_what_cannot_be_copied, 2, tmp_path)
    assert first == second
    said, names = first
    assert [bool(text) for text in said] == [False, True, False, False]
    assert "step 2" in said[1]
    assert "Cannot allocate memory" in said[1]
    assert names == ["00000001-step-1", "00000002-step-3", "00000003-step-4", "latest"]
