"""Tensors whose elements do not lie in order, or do not mean what their memory says: right, or refused by name."""

import pytest
import torch
import torch.distributed as dist
from tests.backend.inputs import assert_same, tensor_of
from tests.on_ranks import on_ranks

LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "every other column": lambda t: torch.zeros(t.shape[0], 2 * t.shape[1], dtype=t.dtype)[:, ::2].copy_(t),
    "an offset into memory": lambda t: torch.zeros(t.numel() + 3, dtype=t.dtype)[3:].view(t.shape).copy_(t),
    "channels last": lambda t: t.view(1, t.shape[0], 1, t.shape[1]).clone(memory_format=torch.channels_last)[0, :, 0],
    "requires grad": lambda t: t.clone().requires_grad_(),
    "a view of a leaf that requires grad": lambda t: t.clone().requires_grad_().detach().view(t.shape),
}


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_every_layout_is_read_and_written_in_place(rank, world_size):
    shape = (world_size * 2, 30)
    plain = [tensor_of(r, shape) for r in range(world_size)]
    total = sum(plain[1:], plain[0])
    for name, laid_out in LAYOUTS.items():
        tensor = laid_out(plain[rank])
        dist.all_reduce(tensor)
        assert_same(tensor, total, ("all_reduce", name))

        tensor = laid_out(plain[rank])
        dist.broadcast(tensor, world_size - 1)
        assert_same(tensor, plain[-1], ("broadcast", name))

        outputs = [laid_out(torch.zeros(shape)) for _ in range(world_size)]
        dist.all_gather(outputs, laid_out(plain[rank]))
        for r, output in enumerate(outputs):
            assert_same(output, plain[r], ("all_gather", name))

        whole = laid_out(torch.zeros(world_size * shape[0], shape[1]))
        dist.all_gather_single(whole, laid_out(plain[rank]))
        assert_same(whole, torch.cat(plain), ("all_gather_into_tensor", name))

        output = laid_out(torch.zeros(shape))
        dist.scatter(output, [laid_out(p) for p in plain] if rank == 0 else None, 0)
        assert_same(output, plain[rank], ("scatter", name))

        output = laid_out(torch.zeros(shape))
        dist.all_to_all_single(output, laid_out(plain[rank]))
        expected = torch.cat([p[2 * rank : 2 * rank + 2] for p in plain])
        assert_same(output, expected, ("all_to_all_single", name))

        output = laid_out(torch.zeros(2, 30))
        dist.reduce_scatter_single(output, laid_out(plain[rank]))
        assert_same(output, total[2 * rank : 2 * rank + 2], ("reduce_scatter_tensor", name))

        output = laid_out(torch.zeros(2, 30))
        dist.reduce_scatter(output, [laid_out(part) for part in plain[rank].chunk(world_size)])
        assert_same(output, total[2 * rank : 2 * rank + 2], ("reduce_scatter", name))

        if world_size > 1:
            work = dist.isend(laid_out(plain[rank]), (rank + 1) % world_size)
            output = laid_out(torch.zeros(shape))
            dist.recv(output, (rank - 1) % world_size)
            work.wait()
            assert_same(output, plain[rank - 1], ("recv", name))


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_conjugate_and_negative_views_mean_what_they_say(rank, world_size):
    group = dist.group.WORLD  # torch's front door refuses conjugate views; its C++ callers do not
    plain = [tensor_of(r, 20, torch.complex64) for r in range(world_size)]
    for view in (torch.Tensor.conj, lambda t: torch._neg_view(t)):
        tensor = view(plain[rank].clone())
        group.allreduce([tensor]).wait()
        expected = sum(view(p).resolve_conj().resolve_neg() for p in plain)
        assert torch.equal(tensor.resolve_conj().resolve_neg(), expected)

        tensor = view(plain[rank].clone())
        group.broadcast([tensor]).wait()
        assert torch.equal(tensor.resolve_conj().resolve_neg(), view(plain[0]).resolve_conj().resolve_neg())

        outputs = [view(torch.zeros(20, dtype=torch.complex64)) for _ in range(world_size)]
        group.allgather([outputs], [view(plain[rank])]).wait()
        for r, output in enumerate(outputs):
            assert torch.equal(output.resolve_conj().resolve_neg(), view(plain[r]).resolve_conj().resolve_neg())


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_tensors_without_dimensions(rank, world_size):
    tensor = torch.tensor(float(rank))
    dist.all_reduce(tensor)
    assert tensor.item() == sum(range(world_size))
    outputs = [torch.tensor(-1.0) for _ in range(world_size)]
    dist.all_gather(outputs, torch.tensor(float(rank)))
    assert [o.item() for o in outputs] == list(range(world_size))
    whole = torch.zeros(world_size)
    dist.all_gather_single(whole, torch.tensor(float(rank)))
    assert whole.tolist() == list(range(world_size))
    part = torch.tensor(0.0)
    dist.reduce_scatter_single(part, torch.arange(float(world_size)))
    assert part.item() == world_size * rank


@on_ranks(2)
def test_expanded_tensors_are_read_but_never_written(rank, world_size):
    expanded = torch.tensor([[float(rank)]]).expand(3, 4)
    outputs = [torch.zeros(3, 4) for _ in range(world_size)]
    dist.all_gather(outputs, expanded)
    assert [o.tolist() for o in outputs] == [[[float(r)] * 4] * 3 for r in range(world_size)]

    writers = {
        "all_reduce": lambda: dist.all_reduce(expanded),
        "broadcast": lambda: dist.broadcast(expanded, 0),
        "reduce": lambda: dist.reduce(expanded, 0),
        "all_gather": lambda: dist.all_gather([expanded] * world_size, torch.zeros(3, 4)),
        "all_gather_into_tensor": lambda: dist.all_gather_single(torch.zeros(1, 1).expand(6, 4), torch.zeros(3, 4)),
        "scatter": lambda: dist.scatter(expanded, [torch.zeros(3, 4)] * 2 if rank == 0 else None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(expanded, [torch.zeros(3, 4)] * 2),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_single(expanded, torch.zeros(6, 4)),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.zeros(1, 1).expand(2, 4), torch.zeros(2, 4)),
        "recv": lambda: dist.recv(expanded, 1 - rank),
    }
    for name, write in writers.items():
        with pytest.raises(ValueError, match=rf"^{name}: elements of .* share memory") as caught:
            write()
        assert "clone" in str(caught.value)
    dist.barrier()
