"""Tensors that are not what their memory says: negated, conjugated, fake, wrapped, freed, of inference mode.

A collective of a DTensor, a FakeTensor, a wrapper subclass, a zero tensor of autograd's or a tensor whose storage was
freed went to address 0: SIGSEGV. The fast all_reduce did not see the negative bit: a wrong sum. And a result for an
inference tensor with gaps could not be copied back by the group's own thread. Here every operation gets each kind in
each place.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

N, P = 6, 2  # elements of a rank's part, ranks


class Wrapper(torch.Tensor):
    """A subclass without memory of its own, as tensor parallelism, quantization and torch's own tests have them."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("a collective looked into the wrapper")


class Named(torch.Tensor):
    """A subclass that is a tensor like any other."""


def _negated(values):
    complex_ = torch.complex(torch.zeros_like(values), -values)
    return complex_.conj().imag


def _of_inference(values):
    with torch.inference_mode():
        return values.clone()


def _of_inference_with_gaps(values):
    with torch.inference_mode():
        return torch.stack([values, values], dim=1)[:, 0]


def _with_gaps(values):
    return torch.stack([values, values], dim=1)[:, 0]


READABLE = {
    "negated": _negated,
    "inference": _of_inference,
    "inference with gaps": _of_inference_with_gaps,
    "gaps": _with_gaps,
    "parameter": lambda values: torch.nn.Parameter(values.clone(), requires_grad=False),
    "subclass": lambda values: values.clone().as_subclass(Named),
}
ZERO = {"zero": lambda values: torch._efficientzerotensor(values.shape)}


def _freed(values):
    tensor = values.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def _fake(values):
    with FakeTensorMode():
        return torch.empty(values.shape)


REFUSED = {
    "wrapper": (Wrapper, TypeError, "a Wrapper, a subclass without memory"),
    "freed": (_freed, ValueError, "has no memory: its storage was freed"),
    "DTensor": (
        lambda values: DTensor.from_local(values, DeviceMesh("cpu", torch.arange(P)), [Replicate()], run_check=False),
        TypeError,
        "to_local",
    ),
    "fake among real ones": (_fake, TypeError, "fake"),
}

# PyTorch 2.13 calls them so; before they had one name each
_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

# name -> (sizes of inputs, sizes of outputs, the call). A call gets lists; on ranks other than the root it leaves out
# what only the root gives.
OPERATIONS = {
    "all_reduce": ([], [N], lambda r, i, o, **k: dist.all_reduce(o[0], **k)),
    "all_reduce MAX": ([], [N], lambda r, i, o, **k: dist.all_reduce(o[0], op=dist.ReduceOp.MAX, **k)),
    "reduce": ([], [N], lambda r, i, o, **k: dist.reduce(o[0], 0, **k)),
    "broadcast": ([], [N], lambda r, i, o, **k: dist.broadcast(o[0], 0, **k)),
    "all_gather": ([N], [N] * P, lambda r, i, o, **k: dist.all_gather(o, i[0], **k)),
    "all_gather_into_tensor": ([N], [N * P], lambda r, i, o, **k: _gather_single(o[0], i[0], **k)),
    "gather": ([N], [N] * P, lambda r, i, o, **k: dist.gather(i[0], o if r == 0 else None, 0, **k)),
    "scatter": ([N] * P, [N], lambda r, i, o, **k: dist.scatter(o[0], i if r == 0 else None, 0, **k)),
    "reduce_scatter": ([N] * P, [N], lambda r, i, o, **k: dist.reduce_scatter(o[0], i, **k)),
    "reduce_scatter_tensor": ([N * P], [N], lambda r, i, o, **k: _scatter_single(o[0], i[0], **k)),
    "all_to_all": ([N] * P, [N] * P, lambda r, i, o, **k: dist.all_to_all(o, i, **k)),
    "all_to_all_single": ([N], [N], lambda r, i, o, **k: dist.all_to_all_single(o[0], i[0], **k)),
    "all_to_all_single with splits": (
        [N],
        [N],
        lambda r, i, o, **k: dist.all_to_all_single(o[0], i[0], [3, 3], [3, 3], **k),
    ),
    "send": ([N], [N], lambda r, i, o, **k: _send(r, i[0], o[0], **k)),
}


def _send(rank, data, into, group=None, async_op=False):
    """Each to the other, the even rank first."""
    work = dist.isend(data, group_dst=1 - rank, group=group)
    got = dist.irecv(into, group_src=1 - rank, group=group)
    if not async_op:
        work.wait()
        got.wait()
    return got


def _plain(rank, ins, outs):
    """Plain tensors of these sizes, other values everywhere."""
    start = itertools.count(1 + 10 * rank)
    return [[torch.arange(n, dtype=torch.float32) + 7 * next(start) for n in sizes] for sizes in (ins, outs)]


def _values(tensors):
    return [
        [t.resolve_neg().tolist() if not t._is_zerotensor() else [0.0] * t.numel() for t in part] for part in tensors
    ]


def _places(ins, outs):
    """Every single place of the two lists, and all at once."""
    places = [(part, at) for part, sizes in enumerate((ins, outs)) for at in range(len(sizes))]
    return [[place] for place in places] + ([places] if len(places) > 1 else [])


def _with(tensors, places, make):
    return [[make(t) if (part, at) in places else t for at, t in enumerate(row)] for part, row in enumerate(tensors)]


def _run(call, rank, tensors, group, *, async_op):
    work = call(rank, *tensors, group=group, async_op=async_op)
    if async_op:
        work.wait()


@on_ranks(P)
def test_every_kind_in_every_place_gives_what_gloo_gives_for_the_plain_values(rank):
    gloo = dist.new_group(backend="gloo")
    for name, (ins, outs, call) in OPERATIONS.items():
        for places in _places(ins, outs):
            kinds = dict(READABLE)
            if all(part == 0 for part, _ in places):
                kinds |= ZERO
            for (kind, make), async_op in itertools.product(kinds.items(), (False, True)):
                odd = _with(_plain(rank, ins, outs), places, make)
                plain = [[torch.tensor(v) for v in row] for row in _values(odd)]
                try:
                    _run(call, rank, plain, gloo, async_op=False)
                except RuntimeError as error:
                    if "does not support" not in str(error):
                        raise
                    plain = [[torch.tensor(v) for v in row] for row in _values(odd)]
                    _run(call, rank, plain, None, async_op=False)
                _run(call, rank, odd, None, async_op=async_op)
                if name != "reduce" or rank == 0:  # Gloo leaves partial sums on the others
                    assert _values(odd) == _values(plain), (name, kind, places, async_op)


@pytest.mark.parametrize("kind", [*REFUSED, "zero to be written"])
@on_ranks(P)
def test_what_has_no_memory_is_refused_in_every_place_with_what_to_give_instead(rank, kind):
    make, error, text = REFUSED.get(kind, (ZERO["zero"], ValueError, "cannot be written"))
    for name, (ins, outs, call) in OPERATIONS.items():
        for places in _places(ins, outs):
            if kind == "zero to be written" and not all(part for part, _ in places):
                continue
            if kind == "fake among real ones" and (len(places) > 1 or len(ins) + len(outs) == 1):
                continue  # then all are fake
            if rank == 1 and ((name == "gather" and places[0][0]) or (name == "scatter" and not places[0][0])):
                continue  # only the root gives it; nobody calls anything
            if name in ("gather", "scatter") and rank == 1 and kind == "fake among real ones":
                continue
            if name == "send":
                continue  # below: it is two calls
            with pytest.raises(error, match=text):
                call(rank, *_with(_plain(rank, ins, outs), places, make))
    for message in (dist.send, dist.recv):
        if kind != "fake among real ones" and not (kind == "zero to be written" and message is dist.send):
            with pytest.raises(error, match=text):
                message(make(torch.ones(N)), 1 - rank)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)  # nothing has reached the other rank
    assert tensor.item() == P


@on_ranks(P)
def test_fake_tensors_are_left_alone(rank):
    """Programs are traced with them; nobody waits for anybody, as with torch's own backends."""
    if rank == 1:
        return
    for name, (ins, outs, call) in OPERATIONS.items():
        for async_op in (False, True):
            tensors = [[_fake(t) for t in row] for row in _plain(rank, ins, outs)]
            _run(call, rank, tensors, None, async_op=async_op) if name != "send" else None
    assert dist.recv(_fake(torch.ones(3)), 1) in (1, -1)
    dist.send(_fake(torch.ones(3)), 1)


@on_ranks(P)
def test_conjugated_tensors_mean_what_they_say(rank):
    """torch's functions refuse them for every backend (view_as_real); the group itself takes them."""
    values = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    group = dist.group.WORLD
    summed, gathered = values.clone().conj(), [torch.zeros(2, dtype=values.dtype).conj() for _ in range(P)]
    group.allreduce([summed]).wait()
    assert summed.tolist() == (torch.tensor([1 - 2j, 3 + 1j]) * 3).tolist()
    group.allgather([gathered], [values.conj()]).wait()
    assert [t.tolist() for t in gathered] == [(torch.tensor([1 - 2j, 3 + 1j]) * (r + 1)).tolist() for r in range(P)]
    with pytest.raises(RuntimeError, match="view_as_real"):
        dist.all_reduce(values.conj())


@on_ranks(P)
def test_the_core_refuses_address_zero_with_a_size(rank):
    """Whatever comes past the checks at the door must not end the process."""
    core, shape = dist.group.WORLD.transport.core, (3,)
    here = torch.ones(3).data_ptr()
    tail = (10**9, 0, shape)
    for call in (
        lambda: core.all_reduce(0, here, 3, 12, 0, -1, *tail),
        lambda: core.all_reduce(here, 0, 3, 12, 0, -1, *tail),
        lambda: core.broadcast(0, 12, 12, 0, *tail),
        lambda: core.reduce_scatter((here, 0), (3, 3), here, 12, 0, *tail),
        lambda: core.gather(0, (here, here), (12, 12), 12, -1, *tail),
        lambda: core.gather(here, (here, 0), (12, 12), 12, -1, *tail),
        lambda: core.scatter((0, here), here, 12, 12, 0, *tail),
        lambda: core.scatter(None, 0, 12, 12, 0, *tail),
        lambda: core.all_to_all((here, 0), (12, 12), (here, here), (12, 12), 12, 0, *tail),
        lambda: core.all_to_all((here, here), (12, 12), (0, here), (12, 12), 12, 0, *tail),
        lambda: core.send(0, 12, 1 - rank, 0, 12, *tail),
        lambda: core.send_now(0, 12, 1 - rank, 0, 12, *tail),
    ):
        with pytest.raises(ValueError, match="address 0 with a size"):
            call()
    dist.barrier()
