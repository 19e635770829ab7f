"""Every sample goes to exactly one rank, exactly once; the position of the whole job can be saved and taken up."""

import copy
import pickle
from collections import Counter
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data import DistributedSampler as TorchSampler

from phalanx.data import DistributedSampler
from phalanx.data.sampler import BLOCK
from phalanx.errors import CheckpointError
from phalanx.testing import run_ranks

LENGTHS = [0, 1, 2, 3, 5, 10, 97, 1000]
WORLD_SIZES = [1, 2, 3, 4, 7]


def samplers(length, world_size, **arguments):
    return [DistributedSampler(range(length), world_size, rank, **arguments) for rank in range(world_size)]


def interleaved(parts):
    """The indices in the order in which the whole job consumes them: step by step, rank by rank."""
    parts = [list(part) for part in parts]
    return [part[step] for step in range(max(map(len, parts))) for part in parts if step < len(part)]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_sample_goes_to_exactly_one_rank_without_padding(world_size):
    for length in LENGTHS:
        parts = [list(sampler) for sampler in samplers(length, world_size, padding=False)]
        assert sorted(index for part in parts for index in part) == list(range(length))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_lengths_are_those_of_pytorch(world_size, drop_last):
    for length in LENGTHS:
        for rank, ours in enumerate(samplers(length, world_size, drop_last=drop_last)):
            theirs = TorchSampler(range(length), world_size, rank, drop_last=drop_last)
            for name in ("num_samples", "total_size"):
                assert getattr(ours, name) == getattr(theirs, name)
            assert len(ours) == len(list(ours)) == len(theirs)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_without_shuffle_the_indices_are_those_of_pytorch(world_size, drop_last):
    for length in LENGTHS:
        for rank, ours in enumerate(samplers(length, world_size, shuffle=False, drop_last=drop_last)):
            assert list(ours) == list(TorchSampler(range(length), world_size, rank, False, drop_last=drop_last))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_padding_repeats_the_beginning_of_the_shuffled_order(world_size):
    for length in LENGTHS:
        order = list(DistributedSampler(range(length), 1, 0))
        padded = interleaved(samplers(length, world_size))
        assert padded[:length] == order
        assert padded[length:] == [order[i % length] for i in range(len(padded) - length)]


def test_the_length_without_padding_is_what_the_rank_gets():
    assert [len(sampler) for sampler in samplers(10, 4, padding=False)] == [3, 3, 2, 2]
    assert [sampler.total_size for sampler in samplers(10, 4, padding=False)] == [10] * 4


def test_drop_last_leaves_out_the_same_samples_on_every_rank_and_wins_over_padding():
    for padding in (True, False):
        parts = [list(sampler) for sampler in samplers(10, 4, drop_last=True, padding=padding)]
        assert [len(part) for part in parts] == [2] * 4
        assert len({index for part in parts for index in part}) == 8


def test_the_epochs_differ_and_come_back():
    sampler = DistributedSampler(range(100), 1, 0)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_another_seed_is_another_sequence_of_orders():
    orders = {tuple(DistributedSampler(range(100), 1, 0, seed=seed)) for seed in (0, 1, 2, -1)}
    later = DistributedSampler(range(100), 1, 0, seed=0)
    orders |= {tuple(later) for _ in range(3)}  # seed 0, epoch 1 is not seed 1, epoch 0; epoch 0 is there already
    assert len(orders) == 6


def test_a_forgotten_epoch_advances_by_itself_and_a_set_one_beats_it():
    expected = [order_of_epoch(epoch) for epoch in range(6)]
    sampler = DistributedSampler(range(50), 1, 0)
    assert [list(sampler), list(sampler)] == expected[:2]
    sampler.set_epoch(4)
    assert [list(sampler), list(sampler)] == expected[4:6]
    sampler.set_epoch(5)
    sampler.set_epoch(3)
    assert list(sampler) == expected[3]


def test_an_abandoned_pass_counts_as_its_epoch():
    sampler = DistributedSampler(range(50), 1, 0)
    assert list(islice(sampler, 3)) == order_of_epoch(0)[:3]
    assert list(sampler) == order_of_epoch(1)


def test_an_iterator_that_is_never_asked_leaves_the_epoch_alone():
    sampler = DistributedSampler(range(50), 1, 0)
    unused = iter(sampler)
    assert list(sampler) == order_of_epoch(0)
    assert list(unused) == order_of_epoch(1)


def order_of_epoch(epoch):
    sampler = DistributedSampler(range(50), 1, 0)
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize("length", [2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_an_epoch_of_several_blocks_has_no_seam(length):
    assert sorted(DistributedSampler(range(length), 1, 0)) == list(range(length))
    assert list(DistributedSampler(range(length), 1, 0, shuffle=False)) == list(range(length))


class Huge(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


def test_an_epoch_over_the_largest_dataset_begins_and_ends_within_it():
    length = 2**63 - 1
    sampler = DistributedSampler(Huge(length), 4, 3)
    assert len(sampler) == 2**61
    assert all(0 <= index < length for index in islice(sampler, 10_000))
    sampler.load_state_dict({"epoch": 0, "consumed": length - 10, "length": length, "seed": 0, "shuffle": True})
    assert len(list(sampler)) == 3


# --- the position ------------------------------------------------------------------------------------------------


def test_the_position_counts_the_samples_of_the_whole_job():
    for sampler in samplers(100, 4):
        assert sampler.state_dict()["consumed"] == 0
        list(islice(sampler, 5))
        assert sampler.state_dict() == {"epoch": 0, "consumed": 20, "length": 100, "seed": 0, "shuffle": True}


def test_the_position_is_exact_across_blocks():
    sampler = DistributedSampler(range(3 * BLOCK), 1, 0)
    iterator = iter(sampler)
    for taken in (1, BLOCK - 1, 1, BLOCK, BLOCK - 2):
        before = sampler.state_dict()["consumed"]
        assert len(list(islice(iterator, taken))) == taken
        assert sampler.state_dict()["consumed"] == before + taken


@pytest.mark.parametrize("arguments", [{}, {"padding": False}, {"drop_last": True}], ids=str)
def test_a_finished_epoch_is_the_start_of_the_next_on_every_rank(arguments):
    for sampler in samplers(10, 4, **arguments):
        list(sampler)
        assert (sampler.state_dict()["epoch"], sampler.state_dict()["consumed"]) == (1, 0)
        again = DistributedSampler(range(10), 1, 0)
        again.load_state_dict(sampler.state_dict())
        second = DistributedSampler(range(10), 1, 0)
        second.set_epoch(1)
        assert list(again) == list(second)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 7), (4, 4), (7, 2)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_another_number_of_ranks_goes_on_exactly(before, after, shuffle):
    length = 97
    order = list(DistributedSampler(range(length), 1, 0, shuffle=shuffle))
    old = samplers(length, before, shuffle=shuffle)
    seen = interleaved([list(islice(sampler, 5)) for sampler in old])
    new = samplers(length, after, shuffle=shuffle, padding=False)
    for sampler in new:
        sampler.load_state_dict(old[0].state_dict())
    assert sum(map(len, new)) == length - len(seen)
    seen += interleaved(new)
    assert seen == order


def test_a_job_may_be_taken_up_many_times_in_one_epoch():
    seen = []
    state = samplers(100, 1)[0].state_dict()
    for world_size in (3, 1, 4, 2, 3):
        ranks = samplers(100, world_size)
        for sampler in ranks:
            sampler.load_state_dict(state)
        seen += interleaved([islice(sampler, 4) for sampler in ranks])
        states = [sampler.state_dict() for sampler in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
    assert state["consumed"] == len(seen) == 52
    assert seen == list(DistributedSampler(range(100), 1, 0))[:52]


def test_the_rest_of_an_epoch_is_padded_or_cut_like_an_epoch():
    state = {"epoch": 0, "consumed": 4, "length": 10, "seed": 0, "shuffle": False}
    for arguments, expected in [
        ({}, [[4, 8], [5, 9], [6, 0], [7, 1]]),
        ({"padding": False}, [[4, 8], [5, 9], [6], [7]]),
        ({"drop_last": True}, [[4], [5], [6], [7]]),
    ]:
        ranks = samplers(10, 4, shuffle=False, **arguments)
        for sampler in ranks:
            sampler.load_state_dict(state)
        assert [len(sampler) for sampler in ranks] == [len(part) for part in expected]
        assert [list(sampler) for sampler in ranks] == expected


def test_after_the_rest_of_an_epoch_the_next_is_whole():
    sampler = DistributedSampler(range(50), 1, 0)
    sampler.load_state_dict({"epoch": 2, "consumed": 40, "length": 50, "seed": 0, "shuffle": True})
    assert (len(sampler), list(sampler), len(sampler)) == (10, order_of_epoch(2)[40:], 50)
    assert list(sampler) == order_of_epoch(3)


def test_setting_the_epoch_that_was_loaded_keeps_the_position_and_another_one_drops_it():
    state = {"epoch": 2, "consumed": 40, "length": 50, "seed": 0, "shuffle": True}
    sampler = DistributedSampler(range(50), 1, 0)
    sampler.load_state_dict(state)
    sampler.set_epoch(2)
    assert sampler.state_dict() == state
    assert list(sampler) == order_of_epoch(2)[40:]
    sampler.set_epoch(2)
    assert list(sampler) == order_of_epoch(2)
    sampler.load_state_dict(state)
    sampler.set_epoch(1)
    assert list(sampler) == order_of_epoch(1)


def test_the_loop_says_what_it_really_consumed():
    for sampler in samplers(100, 4):
        list(islice(sampler, 20))  # the loader is ahead
        assert sampler.state_dict(consumed=0)["consumed"] == 0
        assert sampler.state_dict(consumed=8)["consumed"] == 32
        assert sampler.state_dict(consumed=32) == {
            **sampler.state_dict(),
            "epoch": 1,
            "consumed": 0,
        }  # beyond the partition
        with pytest.raises(ValueError, match="consumed must be zero or more samples of this rank, got -1"):
            sampler.state_dict(consumed=-1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 11}, r"another order: length 11 \(here 10\)"),
        ({"seed": 1, "shuffle": False}, r"seed 1 \(here 0\), shuffle False \(here True\)"),
        ({"consumed": 11}, "consumed 11 of 10"),
        ({"consumed": -1}, "consumed -1 of 10"),
    ],
)
def test_a_position_in_another_order_is_refused(change, message):
    sampler = DistributedSampler(range(10), 1, 0)
    with pytest.raises(CheckpointError, match=message):
        sampler.load_state_dict({**sampler.state_dict(), **change})
    assert sampler.state_dict()["consumed"] == 0


def test_a_state_that_is_no_position_is_refused():
    with pytest.raises(CheckpointError, match="the sampler's state lacks epoch, seed, shuffle"):
        DistributedSampler(range(10), 1, 0).load_state_dict({"consumed": 1, "length": 10})


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda sampler: pickle.loads(pickle.dumps(sampler))])
def test_a_copy_has_the_position(copied):
    sampler = DistributedSampler(range(100), 1, 0)
    list(islice(sampler, 7))
    assert copied(sampler).state_dict() == sampler.state_dict()


# --- with the DataLoader -----------------------------------------------------------------------------------------


class Numbers(Dataset):
    def __len__(self):
        return 43

    def __getitem__(self, index):
        return torch.tensor(index)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where there is one core
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_loader_reads_epoch_after_epoch(workers, batch_size):
    sampler = DistributedSampler(Numbers(), 1, 0)
    loader = DataLoader(Numbers(), batch_size=batch_size, sampler=sampler, **workers)
    for epoch in range(3):
        expected = DistributedSampler(Numbers(), 1, 0)
        expected.set_epoch(epoch)
        assert torch.cat([batch.reshape(-1) for batch in loader]).tolist() == list(expected)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # where there is one core
def test_a_loader_ahead_of_the_loop_loses_nothing_when_the_job_goes_on():
    sampler = DistributedSampler(Numbers(), 1, 0)
    loader = DataLoader(Numbers(), batch_size=4, sampler=sampler, num_workers=2, prefetch_factor=2)
    batches = iter(loader)
    seen = [next(batches), next(batches)]
    assert sampler.state_dict()["consumed"] > 8
    state = sampler.state_dict(consumed=2 * 4)
    del batches
    sampler.load_state_dict(state)
    seen += list(loader)
    assert torch.cat(seen).tolist() == list(DistributedSampler(Numbers(), 1, 0))


# --- at the door -------------------------------------------------------------------------------------------------


def test_it_is_a_sampler_of_pytorchs_class():
    assert isinstance(DistributedSampler(range(3), 1, 0), TorchSampler)


def test_alone_it_is_a_job_of_one_rank():
    sampler = DistributedSampler(range(10))
    assert (sampler.num_replicas, sampler.rank) == (1, 0)
    assert sorted(sampler) == list(range(10))


def test_the_process_group_says_who_we_are_unless_the_caller_does():
    def places(rank, world_size):
        ours = DistributedSampler(range(10))
        given = DistributedSampler(range(10), num_replicas=5, rank=4)
        return (ours.num_replicas, ours.rank), (given.num_replicas, given.rank), list(ours)

    results = run_ranks(places, 3, backend="gloo")
    assert [result[:2] for result in results] == [((3, rank), (5, 4)) for rank in range(3)]
    assert set().union(*(result[2] for result in results)) == set(range(10))


@pytest.mark.parametrize(("given", "missing"), [({"num_replicas": 2}, "rank"), ({"rank": 1}, "num_replicas")])
def test_half_a_place_without_a_process_group_is_refused(given, missing):
    with pytest.raises(ValueError, match=f"no process group to determine {missing}"):
        DistributedSampler(range(10), **given)


def test_a_rank_without_its_process_group_is_refused(monkeypatch):
    # PyTorch's own sampler refuses it too; as a job of one, every rank would train on all of the data.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    with pytest.raises(ValueError, match=r"started as a rank.*Start the group first \(phalanx.init\(\)\)"):
        DistributedSampler(range(10))
    assert len(DistributedSampler(range(10), num_replicas=2, rank=1)) == 5


@pytest.mark.parametrize(("world_size", "rank"), [(2, 2), (2, -1), (0, 0), (1, 5)])
def test_a_rank_outside_of_the_world_is_refused_as_in_pytorch(world_size, rank):
    with pytest.raises(ValueError) as theirs:
        TorchSampler(range(10), world_size, rank)
    with pytest.raises(ValueError) as ours:
        DistributedSampler(range(10), world_size, rank)
    assert str(ours.value) == str(theirs.value)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))

    def __len__(self):
        return 3


class NoLength(Dataset):
    pass


@pytest.mark.parametrize(
    ("dataset", "message"),
    [(Stream(), "Stream is an IterableDataset"), (NoLength(), "NoLength has no __len__"), (iter([]), "list_iterator")],
)
def test_data_without_positions_is_refused_by_name(dataset, message):
    with pytest.raises(TypeError, match=message):
        DistributedSampler(dataset, 1, 0)


def test_many_epochs_give_each_sample_its_turn_on_each_rank():
    sampler = DistributedSampler(range(40), 4, 1)
    counts = Counter(index for _ in range(200) for index in sampler)
    assert len(counts) == 40
    assert all(20 <= count <= 85 for count in counts.values())  # 50 expected, spread 6.1
