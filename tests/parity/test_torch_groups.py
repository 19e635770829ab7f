"""Groups of some of the ranks: new_group, new_subgroups, split_group, and groups of both backends side by side."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.parity.beside_gloo import assert_same_as_gloo

from phalanx.testing import run_ranks


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


def test_splitting_a_group_needs_a_device_of_its_own_as_over_gloo():
    # torch splits groups through the backend of an accelerator; on CPU it refuses, whoever carries the group.
    def call(rank, world_size):
        with pytest.raises(RuntimeError) as caught:
            dist.split_group(split_ranks=[[0], [1]], timeout=timedelta(seconds=5))
        return str(caught.value).splitlines()[0]

    assert_same_as_gloo(call, 2)


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
