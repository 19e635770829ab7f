"""A group of ours stands where torch has a `Backend`: it has each of that class's names, which do what Gloo's do.

Code that asks `get_error` or `supports_shrinking`, or that expects a RuntimeError of `shrink`, got an AttributeError.
The names are those of the installed torch.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch._C._distributed_c10d import Backend

from phalanx.testing import run_ranks

CPU = torch.device("cpu")
# Objects whose classes are each backend's own.
OWN = {"options"}
# What is called, where torch has it; everything else is compared by its kind alone.
CALLS = {
    "_add_ephemeral_timeout": lambda call: call(timedelta(seconds=1)),
    "_enable_collectives_timing": lambda call: call(),
    "_end_time_estimate": lambda call: call(),
    "_register_on_completion_hook": lambda call: call(print),
    "_set_group_uid": lambda call: call("uid"),
    "_start_time_estimate": lambda call: call(),
    "_wait_for_pending_works": lambda call: call(),
    "Options": lambda call: call("name", timedelta(seconds=1)).backend,
    "allreduce_sparse": lambda call: call([torch.eye(2).to_sparse()]).wait(),
    "get_error": lambda call: call().name,
    "memory_stats": lambda call: call(),
    "new_window": lambda call: call(),
    "register_abort_hook": lambda call: call(1, print),
    "resume": lambda call: call(),
    "setUsePgForSymmMemRendezvous": lambda call: call(True),
    "shrink": lambda call: call([]),
    "suspend": lambda call: call(),
    "unregister_abort_hook": lambda call: call(1),
}
JOINS = {
    "merge": lambda call: call(dist.HashStore(), Backend.Options("merge", timedelta(seconds=9)), 0, 1).size(),
    "merge_remote_group": lambda call: call(dist.HashStore(), 1).size(),
    "split": lambda call: call(dist.HashStore(), [0], Backend.Options("split", timedelta(seconds=9))).size(),
}


def _kind(ask):
    try:
        value = ask()
    except Exception as error:
        return type(error).__name__
    return "callable" if callable(value) else type(value).__name__


def _outcome(ask):
    try:
        return ask()
    except Exception as error:
        return type(error).__name__


def _behaviour(owner, name):
    kind = _kind(lambda: getattr(owner, name))
    call = {**CALLS, **JOINS}.get(name) if kind == "callable" else None
    return kind if call is None else _outcome(lambda: call(getattr(owner, name)))


def _compare(names, ours, theirs):
    behaviours = {name: (_behaviour(ours, name), _behaviour(theirs, name)) for name in names if name not in OWN}
    return {name: (mine, reference) for name, (mine, reference) in behaviours.items() if mine != reference}


def _compare_with_gloo(rank, world_size):
    ours = dist.group.WORLD
    gloo = dist.new_group([0], backend="gloo")
    names = [name for name in dir(Backend) if not name.startswith("__")]
    found = _compare(names, ours, gloo._get_backend(CPU))
    names = [name for name in dir(gloo) if not name.startswith("__")]
    return found, _compare(names, ours, gloo), len(names)


def test_a_group_has_every_name_of_a_backend_and_of_a_group_and_each_does_what_gloos_does():
    ((as_backend, as_group, count),) = run_ranks(_compare_with_gloo, 1)
    assert not as_backend
    assert not as_group
    assert count > 50


@on_ranks(2)
def test_groups_of_one_rank_each_merge_into_one(rank, world_size, tmp_path):
    """It returned None."""
    path = str(tmp_path / "store")
    alone = dist.group.WORLD.split_group([0]), dist.group.WORLD.split_group([1])
    store = dist.FileStore(path, world_size)
    merged = alone[rank].merge_remote_group(store, 2, timedelta(seconds=40), group_name="both", group_desc="of two")
    total = torch.tensor([10.0**rank])
    merged.allreduce([total]).wait()
    numbers = torch.zeros(2)
    merged.allgather([list(numbers.split(1))], [torch.tensor([float(merged.rank())])]).wait()
    assert (merged.size(), merged.group_name, merged.group_desc, total.item(), numbers.tolist()) == (
        2,
        "both",
        "of two",
        11.0,
        [0.0, 1.0],
    )
