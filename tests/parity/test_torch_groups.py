"""Groups of some of the ranks: new_group, new_subgroups, split_group, and groups of both backends side by side."""

import random
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from tests.parity.beside_gloo import assert_same_as_gloo

from phalanx._comm.backend.splitting import TORCH_SPLITS_ON_CPU
from phalanx.testing import run_ranks

splits_on_cpu = pytest.mark.skipif(not TORCH_SPLITS_ON_CPU, reason="this torch splits groups of accelerators only")


def _sum(value, group=None):
    tensor = torch.tensor([float(value)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_new_groups_overlap_and_keep_their_own_order_and_ranks():
    def call(rank, world_size):
        odd, pair, alone = dist.new_group([1, 3]), dist.new_group([0, 3]), dist.new_group([2])
        seen = {}
        for name, group in (("odd", odd), ("pair", pair), ("alone", alone)):
            if dist.get_rank(group) >= 0:
                last = torch.tensor([float(rank)])
                dist.broadcast(last, src=dist.get_process_group_ranks(group)[-1], group=group)
                seen[name] = (
                    _sum(2**rank, group),
                    last.item(),
                    dist.get_rank(group),
                    dist.get_world_size(group),
                    dist.get_process_group_ranks(group),
                    dist.get_group_rank(group, rank),
                )
        return seen

    ours = assert_same_as_gloo(call, 4)
    assert ours[3]["odd"][0] == 10


def test_subgroups_by_size_and_by_list_reduce_among_themselves():
    def call(rank, world_size):
        mine, groups = dist.new_subgroups(group_size=2)
        listed, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        return _sum(2**rank, mine), len(groups), _sum(2**rank, listed)

    ours = assert_same_as_gloo(call, 4)
    assert [r[0] for r in ours] == [3, 3, 12, 12]
    assert [r[2] for r in ours] == [5, 10, 5, 10]


def test_a_group_is_destroyed_while_others_go_on():
    def call(rank, world_size):
        first, second = dist.new_group(), dist.new_group(group_desc="the second")
        before = _sum(1, first)
        dist.destroy_process_group(first)
        with pytest.raises(ValueError, match="is not registered"):
            dist.get_group_rank(first, 0)
        return before, _sum(1, second), _sum(1), second.group_desc

    assert_same_as_gloo(call, 2)


def test_initialising_again_after_destroying_gives_working_groups(tmp_path):
    def call(rank, world_size, backend):
        sums = []
        for i in range(3):
            dist.init_process_group(
                backend, init_method=f"file://{tmp_path}/{backend}-{i}", rank=rank, world_size=world_size
            )
            sums.append(_sum(rank + i))
            dist.destroy_process_group()
        return sums

    assert run_ranks(call, 2, "phalanx", init=False) == run_ranks(call, 2, "gloo", init=False) == [[1, 3, 5]] * 2


def test_gloo_and_phalanx_groups_live_side_by_side():
    def call(rank, world_size):
        other = dist.new_group(backend="gloo" if dist.get_backend() == "phalanx" else "phalanx")
        return _sum(1), _sum(2, other), {dist.get_backend(), dist.get_backend(other)}

    assert assert_same_as_gloo(call, 2)[0] == (2.0, 4.0, {"gloo", "phalanx"})


@on_ranks(2, init=False)
def test_a_device_map_names_the_backend_too(rank, world_size, tmp_path):
    dist.init_process_group("cpu:phalanx", init_method=f"file://{tmp_path}/store", rank=rank, world_size=world_size)
    assert _sum(rank + 1) == 3.0


@pytest.mark.skipif(TORCH_SPLITS_ON_CPU, reason="this torch splits groups on CPU")
def test_splitting_a_group_needs_a_device_of_its_own_as_over_gloo():
    # torch splits groups through the backend of an accelerator; on CPU it refuses, whoever carries the group.
    def call(rank, world_size):
        with pytest.raises(RuntimeError) as caught:
            dist.split_group(split_ranks=[[0], [1]], timeout=timedelta(seconds=5))
        return str(caught.value).splitlines()[0]

    assert_same_as_gloo(call, 2)


class _Split(NamedTuple):
    """One call of split_group by all members of a group."""

    parent: int  # 0 is the default group, 1 the first group that was split off
    members: list[int]  # of the parent, by their ranks in the default group
    parts: list[list[int]]  # by ranks in the parent
    is_named_alike: bool  # torch gives each part one name on all its members
    given: dict[str, object]


def _random_splits(seed, world_size, only_named_alike=False):
    """Random splits, also of splits.

    torch puts into a group's name how many groups the process has asked for. Who is no member of the parent does not
    ask: after the split of a split, a group can get one name on some members and another on others.
    """
    chosen, splits = random.Random(seed), []
    groups, num_asked = [list(range(world_size))], [0] * world_size
    while len(splits) < 12:
        parent = chosen.randrange(len(groups))
        members = groups[parent]
        order = chosen.sample(range(len(members)), chosen.randint(1, len(members)))
        cut = chosen.randint(1, len(order))
        parts = [part for part in (order[:cut], order[cut:]) if part]
        given = chosen.choice([{}, {"timeout": timedelta(seconds=30)}, {"group_desc": "mine"}, {"backend": ""}])
        is_named_alike = all(len({num_asked[members[number]] for number in part}) == 1 for part in parts)
        if only_named_alike and not is_named_alike:
            continue
        splits.append(_Split(parent, members, parts, is_named_alike, given))
        groups += [[members[number] for number in part] for part in parts]
        for member in members:
            num_asked[member] += 1
    return splits


def _describe(group, rank):
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return None
    ranks = dist.get_process_group_ranks(group)
    last = torch.tensor([float(rank)])
    dist.broadcast(last, src=ranks[-1], group=group)
    options = group._get_backend(torch.device("cpu")).options
    return {
        "place": (group.rank(), group.size(), ranks, list(options.global_ranks_in_group)),
        "name": (group.group_name, dist.distributed_c10d._resolve_process_group(group.group_name) is group),
        "description": group.group_desc,
        "timeout": options._timeout,
        "values": (_sum(2**rank, group), last.item()),
    }


def _do_splits(rank, world_size, splits):
    """Return what this rank sees of the group that each split gives it; None where it is in none of the parts."""
    groups, seen = [dist.group.WORLD], []
    for split in splits:
        group = None
        if rank in split.members:
            given = {**split.given, "backend": dist.get_backend()} if "backend" in split.given else split.given
            group = dist.split_group(groups[split.parent], split.parts, **given)
        seen.append(_describe(group, rank) if group is not None else None)
        groups += [group for _ in split.parts]
        assert _sum(2**rank) == 2**world_size - 1  # the default group goes on
    dist.barrier()
    return seen


@splits_on_cpu
@pytest.mark.parametrize(("seed", "world_size"), [(0, 2), (1, 3), (2, 4), (3, 4)])
def test_random_splits_also_of_splits_are_those_of_gloo(seed, world_size):
    # Gloo's members meet by the group's name: where torch names a group apart on them they wait in vain.
    splits = _random_splits(seed, world_size, only_named_alike=True)
    assert any(split.parent for split in splits)
    assert_same_as_gloo(_do_splits, world_size, splits)


@splits_on_cpu
@pytest.mark.parametrize(("seed", "world_size"), [(6, 2), (0, 3), (1, 3), (3, 4)])
def test_random_splits_that_torch_names_apart_on_their_members_work_too(seed, world_size):
    splits = _random_splits(seed, world_size)
    assert not all(split.is_named_alike for split in splits)
    results = run_ranks(_do_splits, world_size, splits)
    name_counts = set()
    for number, split in enumerate(splits):
        parts = [[split.members[i] for i in part] for part in split.parts]
        for members in parts:
            seen = [results[member][number] for member in members]
            name_counts.add((split.is_named_alike, len({one["name"][0] for one in seen}) > 1))
            for i, one in enumerate(seen):
                assert one["place"] == (i, len(members), members, members)
                assert one["values"] == (sum(2**member for member in members), members[-1])
                assert one["name"][1]
                assert one["timeout"] == split.given.get("timeout", dist.default_pg_timeout)
                assert one["description"] == seen[0]["description"]
                if "group_desc" in split.given:
                    assert one["description"] == "mine"
        outside = set(range(world_size)).difference(*parts)
        assert all(results[rank][number] is None for rank in outside)
    assert (False, True) in name_counts  # torch did name some apart,
    assert (True, True) not in name_counts  # and none of the others


@splits_on_cpu
def test_a_group_is_split_again_after_its_split_was_destroyed():
    def call(rank, world_size):
        seen = []
        for turn in range(3):
            group = dist.split_group(split_ranks=[[1, 0]])
            seen.append((_sum(rank + turn, group), group.rank(), group.group_desc))
            dist.barrier()
            dist.destroy_process_group(group)
        return seen

    assert run_ranks(call, 2) == [
        [(1.0 + 2 * turn, 1 - rank, f"default_pg:split:{turn}") for turn in range(3)] for rank in range(2)
    ]


@splits_on_cpu
@pytest.mark.parametrize("split_ranks", [None, [], [[]], [[0, 0]], [[0, 1, 2]]])
def test_wrong_splits_are_refused_with_the_error_of_gloo(split_ranks):
    def call(rank, world_size):
        with pytest.raises(ValueError) as caught:
            dist.split_group(split_ranks=split_ranks)
        return str(caught.value), _sum(1)

    assert_same_as_gloo(call, 2)


def test_a_group_object_is_split_whatever_the_release_of_torch():
    def call(rank, world_size):
        group = dist.group.WORLD.split_group([2, 0])
        if group is None:
            return None
        tensor = torch.tensor([2.0**rank])
        group.allreduce([tensor]).wait()
        return group.rank(), group.size(), tensor.item(), group.group_desc

    assert run_ranks(call, 3) == [(1, 2, 5.0, "default_pg:split:0"), None, (0, 2, 5.0, "default_pg:split:0")]


@on_ranks(2)
def test_a_group_refuses_a_split_with_ranks_that_it_lacks():
    problems = ["no ranks", "a rank is repeated in [0, 0]", "it has 2 ranks, and no rank 2"]
    refusals = []
    for ranks in ([], [0, 0], [0, 2], [-1]):
        with pytest.raises(ValueError) as caught:
            dist.group.WORLD.split_group(ranks)
        refusals.append(str(caught.value).partition(": ")[2])
    assert (refusals, _sum(1)) == ([*problems, "it has 2 ranks, and no rank -1"], 2.0)


def test_what_torch_reports_of_a_group_is_what_it_reports_of_gloos():
    def call(rank, world_size):
        group = dist.new_group([1, 0], timeout=timedelta(seconds=30), group_desc="both")
        world = dist.group.WORLD
        dist.barrier(group)  # over Gloo nobody may end before the other has connected
        return {
            "ranks": dist.get_process_group_ranks(group),
            "sizes": (group.size(), world.size(), group.rank()),
            "description": (group.group_desc, world.group_desc),
            "names differ": group.group_name != world.group_name,
            "name is known": dist.distributed_c10d._resolve_process_group(group.group_name) is group,
            "default": dist.is_initialized() and dist.get_backend_config() != "",
            "counted": group._get_sequence_number_for_group() >= 0,
            "device": dist.distributed_c10d._get_object_coll_device(group),
        }

    assert_same_as_gloo(call, 2)
