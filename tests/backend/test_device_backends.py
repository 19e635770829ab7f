"""Tensors of another device go to the group of their engine, and nothing else does. No GPU is needed here.

Two stand-ins, each real where the other cannot be. Gloo carries `float64` tensors as if they were on a device of their
own: every collective then arrives, with values. And tensors on `meta`, a real other device without memory, are carried
by an engine that only counts.
"""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from tests.backend.default_group import join_by_file
from tests.on_ranks import on_ranks
from torch._C._distributed_c10d import ProcessGroupGloo

from phalanx._comm.backend import device_backends
from phalanx._comm.backend.device_backends import (
    DeviceBackend,
    find_device,
    find_shared_gpu,
    group_of,
    is_nccl_available,
    no_backend_for,
)
from phalanx.errors import DeadlineError, MismatchError, PeerLostError
from phalanx.testing import RankFailed, run_ranks

META = torch.device("meta")
CPU = torch.ones(2)
ELSEWHERE = torch.empty(2, device="meta")


@pytest.mark.parametrize(
    ("arguments", "device"),
    [
        ((), None),
        (([],), None),
        (([CPU], object()), None),
        (([ELSEWHERE], object()), META),
        (([[ELSEWHERE, ELSEWHERE]], [ELSEWHERE]), META),  # all_gather
        (([], [ELSEWHERE], object()), META),  # gather, where there are no outputs
        (([ELSEWHERE], [], object()), META),  # scatter, where there are no inputs
        (([], [CPU]), None),
        ((ELSEWHERE, CPU), META),
        (([CPU], 1, 0), None),  # send
        ((object(), object(), [ELSEWHERE]), None),
    ],
)
def test_the_first_tensor_of_a_call_tells_the_device(arguments, device) -> None:
    assert find_device(arguments) == device


def test_the_error_for_a_tensor_that_nobody_carries_names_the_ways_out(monkeypatch) -> None:
    cuda = torch.device("cuda", 3)
    monkeypatch.setitem(device_backends.DEVICE_BACKENDS, "cuda", DeviceBackend("NCCL", lambda: False, None, None, None))
    assert no_backend_for(cuda, "send") == (
        f"send: the tensor is on cuda:3; it needs NCCL, but this PyTorch ({torch.__version__}) lacks NCCL or finds "
        "no device.\n"
        "Move the tensor with .cpu(), or install a build of PyTorch with NCCL."
    )
    monkeypatch.setitem(device_backends.DEVICE_BACKENDS, "cuda", DeviceBackend("NCCL", lambda: True, None, None, None))
    assert no_backend_for(cuda, "all_gather") == (
        "all_gather: the tensor is on cuda:3; other tensors of the call are on the CPU.\n"
        "Put all tensors of one call on one device."
    )
    assert "create a group whose backend supports xpu tensors" in no_backend_for(torch.device("xpu"), "reduce")


# -- Gloo, for float64 tensors -----------------------------------------------------------------------------------


def _of_float64(arguments):
    for argument in arguments[:2]:
        while isinstance(argument, (list, tuple)) and argument:
            argument = argument[0]
        if isinstance(argument, torch.Tensor):
            return META if argument.dtype == torch.float64 else None
    return None


def _open_gloo(store, rank, world_size, timeout, name, global_ranks):
    store = dist.PrefixStore("inside", store)
    backend = ProcessGroupGloo(store, rank, world_size, timeout)
    return group_of(backend, "gloo", torch.device("cpu"), store, rank, world_size, name)


def _join(rank, world_size, path, device_backend, timeout_s=20.0):
    device_backends.DEVICE_BACKENDS["meta"] = device_backend
    join_by_file(rank, world_size, path, timeout_s)


def _seqs():
    """How many collectives went through memory: those of float64 must not."""
    group = dist.group.WORLD
    before = group.transport.seq
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1, dtype=torch.float64))
    dist.barrier()
    return group.transport.seq - before, sorted(group._inside)


def _all_collectives(dtype, rank, world_size):
    def mine(n=2):
        return torch.arange(n, dtype=dtype) + 10 * rank

    def empties(n=2):
        return [torch.zeros(n, dtype=dtype) for _ in range(world_size)]

    results = []

    def keep(*tensors):
        results.extend(t.tolist() for t in tensors)

    tensor = mine()
    dist.all_reduce(tensor)
    keep(tensor)
    work = dist.all_reduce(tensor := mine(), op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    keep(tensor)
    dist.broadcast(tensor := mine(), src=1)
    keep(tensor)
    dist.reduce(tensor := mine(), dst=0)
    keep(*[tensor] if rank == 0 else [])
    dist.all_gather(outputs := empties(), mine())
    keep(*outputs)
    group = dist.group.WORLD
    group.all_gather_single(output := torch.zeros(2 * world_size, dtype=dtype), mine()).wait()
    keep(output)
    dist.gather(mine(), outputs := empties() if rank == 0 else None, dst=0)
    keep(*outputs or [])
    dist.scatter(output := torch.zeros(2, dtype=dtype), [mine() + r for r in range(world_size)] if rank == 0 else None)
    keep(output)
    dist.reduce_scatter(output := torch.zeros(2, dtype=dtype), [mine() + r for r in range(world_size)])
    keep(output)
    group.reduce_scatter_single(output := torch.zeros(2, dtype=dtype), mine(2 * world_size)).wait()
    keep(output)
    dist.all_to_all_single(output := torch.zeros(2 * world_size, dtype=dtype), mine(2 * world_size))
    keep(output)
    if rank == 0:
        dist.send(mine(), 1)
    elif rank == 1:
        dist.recv(tensor := mine(), 0)
        keep(tensor)
    return results


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks(init=False)
def test_every_collective_gives_the_same_through_the_engine_of_a_device_as_on_the_cpu(
    rank, world_size, tmp_path
) -> None:
    path = str(tmp_path / "s")
    from phalanx._comm.backend.process_group import devices

    _join(
        rank,
        world_size,
        path,
        DeviceBackend("Gloo", lambda: True, _open_gloo, lambda device: f"gpu {rank}", find_shared_gpu),
    )
    devices.find_device = _of_float64
    (on_cpu, elsewhere), (collectives, inside) = (
        [_all_collectives(dtype, rank, world_size) for dtype in (torch.float32, torch.float64)],
        _seqs(),
    )
    assert on_cpu == elsewhere
    assert len(on_cpu) > 10
    assert collectives == 2  # the float32 one and the barrier
    assert inside == ["meta"]


# -- an engine that counts, for meta tensors -----------------------------------------------------------------------


class Counting:
    """A group that takes note of what it is called with."""

    def __init__(self, *opened):
        self.opened, self.calls, self.ended = opened, [], ""

    def __getattr__(self, name):
        def call(*args):
            self.calls.append(name)
            done = torch.futures.Future()
            done.set_result(None)
            return done

        return call

    def shutdown(self):
        self.ended = "shutdown"

    def abort(self):
        self.ended = "abort"


def _counting(rank):
    return DeviceBackend("Counter", lambda: True, Counting, lambda device: f"gpu {rank}", find_shared_gpu)


def _meta_only(rank, world_size, path):
    _join(rank, world_size, path, _counting(rank))
    group = dist.group.WORLD
    kinds = [device.type for device in group._device_types]
    before = dict(group._inside)
    dist.all_reduce(torch.ones(3))
    still = dict(group._inside)
    dist.all_reduce(torch.empty(3, device="meta"))
    inside = group._inside["meta"]
    dist.barrier()
    objects = [None] * world_size
    dist.all_gather_object(objects, rank)
    dist.send(torch.empty(1, device="meta"), (rank + 1) % world_size)
    opts = dist.BarrierOptions()
    opts.device = META
    group.barrier(opts)
    pair = dist.new_group(list(range(world_size)))
    dist.broadcast(torch.empty(1, device="meta"), 0, group=pair)
    pair_inside = pair._inside["meta"]
    dist.destroy_process_group()
    return (
        kinds,
        before,
        still,
        objects,
        inside.calls,
        inside.opened[1:3],
        inside.opened[4:],
        pair_inside is not inside,
        pair_inside.calls,
        (inside.ended, pair_inside.ended),
    )


def test_a_group_inside_is_made_with_the_first_tensor_of_its_device_and_ends_with_its_group(tmp_path) -> None:
    for rank, got in enumerate(run_ranks(_meta_only, 2, str(tmp_path / "s"), init=False)):
        kinds, before, still, objects, calls, place, names, own, pair_calls, ends = got
        assert "cpu" in kinds
        assert "meta" in kinds
        assert before == still == {}
        assert objects == [0, 1]  # in the CPU's way, as the barrier before them
        assert calls == ["allreduce", "send", "barrier"]
        assert place == (rank, 2)
        assert names == ("0", (0, 1))
        assert own
        assert pair_calls == ["broadcast"]
        assert ends == ("shutdown", "shutdown")


def _one_stays_away(rank, world_size, path):
    _join(rank, world_size, path, _counting(rank), timeout_s=1.0)
    if rank == 0:
        dist.all_reduce(torch.empty(3, device="meta"))


def test_a_rank_that_never_comes_to_the_first_collective_is_named(tmp_path) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(_one_stays_away, 2, str(tmp_path / "s"), init=False)
    assert isinstance(caught.value.errors[0], (DeadlineError, PeerLostError))
    assert "rank 1" in str(caught.value.errors[0])


@on_ranks(2, init=False)
def test_a_call_on_two_kinds_of_device_is_a_mismatch_on_all_ranks(rank, world_size, tmp_path) -> None:
    path = str(tmp_path / "s")
    _join(rank, world_size, path, _counting(rank))
    with pytest.raises(MismatchError) as caught:
        dist.all_reduce(torch.empty(3, device="meta") if rank == 0 else torch.ones(3))
    message = str(caught.value)
    assert "rank 0: all_gather of uint8 (128,) at " in message
    assert "rank 1: all_reduce(SUM) of float32 (3,) at " in message


def _nobody(rank, world_size):
    with pytest.raises(ValueError, match="the tensor is on meta") as caught:
        dist.all_reduce(torch.empty(3, device="meta"))
    return str(caught.value)


def test_without_an_engine_for_it_a_tensor_is_refused_and_the_group_goes_on() -> None:
    assert len(set(run_ranks(_nobody, 2))) == 1


@on_ranks(2, backend="cpu:phalanx,cuda:nccl")
def test_nccl_may_be_named_beside_phalanx_where_there_is_none_as_long_as_nobody_needs_it() -> None:
    dist.all_reduce(total := torch.ones(2))
    dist.barrier()
    assert (total[0].item(), dist.group.WORLD.shares_memory) == (2.0, True)


def _with_options_of(rank, world_size, path, name):
    """Join with what torch hands to a second backend: the options that it has filled in for the first, as for NCCL."""
    options = SimpleNamespace(group_name=name)
    store = dist.FileStore(path, world_size)
    dist.init_process_group("phalanx", store=store, rank=rank, world_size=world_size, pg_options=options)
    dist.all_reduce(total := torch.ones(1))
    return total.item(), dist.group.WORLD.backend_options


def test_options_that_torch_has_filled_in_for_another_device_are_not_ours(tmp_path) -> None:
    path = str(tmp_path / "s")
    assert run_ranks(_with_options_of, 2, path, "0", init=False) == [(2.0, None)] * 2
    with pytest.raises(RankFailed, match=r"takes pg_options=phalanx\.Options\(\.\.\.\), got SimpleNamespace"):
        run_ranks(_with_options_of, 1, path, "", init=False)


def test_one_rank_per_gpu_is_well_and_every_shared_one_is_named() -> None:
    assert find_shared_gpu([]) == find_shared_gpu(["GPU-a"]) == find_shared_gpu(["GPU-a", "GPU-b"]) == ""
    assert find_shared_gpu(["GPU-a", "GPU-b", "GPU-a", "GPU-b", "GPU-c"]) == (
        "ranks 0, 2 use GPU-a; ranks 1, 3 use GPU-b, but NCCL supports only one rank per GPU."
    )


def test_nccl_is_not_available_without_a_gpu() -> None:
    assert is_nccl_available() == (dist.is_nccl_available() and torch.cuda.is_available())


@on_ranks(3)
def test_a_backend_of_torch_s_becomes_a_group_that_carries_one_kind_of_device(rank, world_size) -> None:
    store = dist.PrefixStore("inside", dist.group.WORLD.get_group_store())
    group = _open_gloo(store, rank, world_size, timedelta(seconds=20), "inside", ())
    tensor = torch.tensor([float(rank + 1)])
    group.allreduce([tensor]).wait()
    names = (group.group_name, group.size(), group.rank() == rank, group._device_types)
    group.shutdown()
    assert (tensor.item(), names) == (6.0, ("inside", 3, True, [torch.device("cpu")]))
