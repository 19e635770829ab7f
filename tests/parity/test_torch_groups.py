"""Groups of some of the ranks: new_group, new_subgroups, split_group, and groups of both backends side by side."""

import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.parity.beside_gloo import assert_same_as_gloo

from phalanx.backend.splitting import TORCH_SPLITS_ON_CPU
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


def test_a_device_map_names_the_backend_too(tmp_path):
    def call(rank, world_size):
        dist.init_process_group("cpu:phalanx", init_method=f"file://{tmp_path}/store", rank=rank, world_size=world_size)
        return _sum(rank + 1)

    assert run_ranks(call, 2, init=False) == [3.0, 3.0]


@pytest.mark.skipif(TORCH_SPLITS_ON_CPU, reason="this torch splits groups on CPU")
def test_splitting_a_group_needs_a_device_of_its_own_as_over_gloo():
    # torch splits groups through the backend of an accelerator; on CPU it refuses, whoever carries the group.
    def call(rank, world_size):
        with pytest.raises(RuntimeError) as caught:
            dist.split_group(split_ranks=[[0], [1]], timeout=timedelta(seconds=5))
        return str(caught.value).splitlines()[0]

    assert_same_as_gloo(call, 2)


def _describe(group, rank):
    if not isinstance(group, dist.ProcessGroup):
        return group
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


@splits_on_cpu
@pytest.mark.parametrize(("seed", "world_size"), [(0, 2), (1, 3), (2, 4), (3, 4)])
def test_random_splits_also_of_splits_are_those_of_gloo(seed, world_size):
    def call(rank, world_size):
        chosen, seen = random.Random(seed), []
        used = set()  # torch names a group by its ranks in the parent, and apart on ranks of which some have that name
        known = [(list(range(world_size)), dist.group.WORLD)]  # the members of a group, and the group here
        for _ in range(12):
            members, parent = chosen.choice(known)
            order = chosen.sample(range(len(members)), chosen.randint(1, len(members)))
            cut = chosen.randint(1, len(order))
            parts = [part for part in (order[:cut], order[cut:]) if part]
            given = chosen.choice(
                [{}, {"timeout": timedelta(seconds=30)}, {"group_desc": "mine"}, {"backend": dist.get_backend()}]
            )
            if not used.isdisjoint(map(tuple, parts)):
                continue
            used.update(map(tuple, parts))
            group = None
            if rank in members:
                group = dist.split_group(parent, parts, **given)
                seen.append(_describe(group, rank))
            known += [([members[number] for number in part], group) for part in parts]
            seen.append(_sum(2**rank))  # the default group goes on
        dist.barrier()
        return seen

    assert_same_as_gloo(call, world_size)


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


def test_a_group_refuses_a_split_with_ranks_that_it_lacks():
    def call(rank, world_size):
        refusals = []
        for ranks in ([], [0, 0], [0, 2], [-1]):
            with pytest.raises(ValueError) as caught:
                dist.group.WORLD.split_group(ranks)
            refusals.append(str(caught.value).partition(": ")[2])
        return refusals, _sum(1)

    problems = ["no ranks", "a rank comes twice in [0, 0]", "it has 2 ranks, and none of number 2"]
    assert run_ranks(call, 2) == [([*problems, "it has 2 ranks, and none of number -1"], 2.0)] * 2


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
