"""Which line of the program an operation is told to be called from: the user's, whatever lies in between.

`all_gather_into_tensor` and `reduce_scatter_tensor` are deprecated names in PyTorch 2.13, and their decorator lies in
`typing_extensions.py`: that was the line in errors and in the flight recorder.
"""

import functools
import inspect
import os
import sysconfig
import warnings
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

import phalanx
from phalanx._comm.diagnostics.call_sites import find_script_call
from phalanx._comm.diagnostics.flight_recorder import read
from phalanx.testing import run_ranks


def _in_a_thread(call):
    with ThreadPoolExecutor(1) as threads:
        threads.submit(call).result()


def test_every_operation_is_told_to_be_called_from_the_users_line():
    def check(rank, world_size):
        one, two, parts = torch.ones(2), torch.ones(4), [torch.ones(2), torch.ones(2)]
        model = phalanx.DistributedDataParallel(torch.nn.Linear(300, 300), check=False)
        loss = model(torch.ones(1, 300)).sum()
        calls = [
            lambda: dist.all_reduce(one),
            lambda: dist.all_reduce(one, async_op=True).wait(),
            lambda: dist.all_gather_into_tensor(two, one),
            lambda: dist.reduce_scatter_tensor(one, two),
            lambda: dist.all_gather(parts, one),
            lambda: dist.reduce_scatter(one, parts),
            lambda: dist.all_to_all_single(one, parts[0]),
            lambda: dist.broadcast(one, 0),
            lambda: dist.barrier(),
            lambda: dist.all_gather_object([None, None], "x"),
            lambda: functional.wait_tensor(functional.all_reduce(one, "sum", dist.group.WORLD)),
            lambda: loss.backward(),
            lambda: functools.partial(dist.all_reduce, one)(),
            lambda: _in_a_thread(lambda: dist.all_reduce(one)),
        ]
        core, here = dist.group.WORLD.transport.core, inspect.getsourcefile(check)
        for call in calls:
            before = len(read(core, rank))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call()
            line = call.__code__.co_firstlineno
            for record in read(core, rank)[before:]:
                file, _, number = record.call_site.rpartition(":")
                assert here.endswith(file), record
                assert number == str(line), record
            assert len(read(core, rank)) > before

    run_ranks(check, 2)


def test_a_package_of_a_virtual_environment_is_a_library():
    """Collectives of a wrapper's constructor passed for the script's own, with which a replacement cannot go on."""
    file = os.path.join(sysconfig.get_path("purelib"), "wrapper.py")
    scope = {"find_script_call": find_script_call}
    exec(compile("found = find_script_call()", file, "exec"), scope)
    assert scope["found"] is None
