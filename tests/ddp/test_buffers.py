"""Buffers before each forward: rank 0's, bit for bit as with PyTorch's wrapper, and rank 0 waits for nobody."""

import copy
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks
from torch import nn

from phalanx import DeadlineError, DistributedDataParallel, MismatchError, PeerLostError
from phalanx.testing import run_ranks


class Odd(nn.Module):
    """Buffers of many forms, which each forward changes, on each rank in another way."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.conv = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
        self.register_buffer("bfloat", torch.randn(7).to(torch.bfloat16))
        self.register_buffer("complex", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("small", torch.tensor([1, 2, 3], dtype=torch.int8))
        self.register_buffer("wide", torch.randn(5, dtype=torch.float64))
        self.register_buffer("transposed", torch.randn(3, 5).t())
        self.register_buffer("last", torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last))
        self.register_buffer("whole", torch.randn(6))
        self.register_buffer("part", self.whole[2:4])
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(0.5))
        self.register_buffer("unsaved", torch.randn(2), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("large", torch.randn(70000))  # more than the core keeps a place for

    def forward(self, inputs, shift):
        if self.training:
            with torch.no_grad():
                for buffer in (
                    self.bfloat,
                    self.complex,
                    self.wide,
                    self.transposed,
                    self.last,
                    self.whole,
                    self.large,
                ):
                    buffer.add_(shift)
                self.scalar += shift
                if hasattr(self, "flags"):
                    self.flags.logical_not_()
                self.small.add_(1 + int(shift))
        hidden = self.norm(self.linear(inputs))
        return self.conv(hidden[:, None, :, None]).sum() + self.whole.sum()


def _replace(model):
    model.whole = torch.arange(8.0)
    model.part = model.whole[1:3]
    del model.flags
    model.register_buffer("late", torch.ones(3))
    model.norm._buffers["running_mean"] = torch.full((4,), 2.0)
    model.conv.append(nn.BatchNorm2d(2, affine=False))


def _train(wrapper, rank, kind):
    torch.manual_seed(1)
    ddp = wrapper(Odd())
    generator = torch.Generator().manual_seed(100 + rank)

    def forward():
        return ddp(torch.randn(4, 3, generator=generator), float(rank + 1))

    seen = []

    def look():
        seen.append({name: buffer.clone() for name, buffer in ddp.module.named_buffers(remove_duplicate=False)})

    for step in range(4):
        if kind == "replaced" and step == 2:
            _replace(ddp.module)
        if kind == "no_sync" and step in (1, 2):
            with ddp.no_sync():
                forward().backward()
        else:
            forward().backward()
        look()
        if kind == "written between":
            ddp.module.whole.data = ddp.module.whole.clone().mul_(rank)
        if kind == "eval" and step % 2:
            ddp.eval()
            with torch.no_grad():
                forward()
            look()
            ddp.train()
    return seen


KINDS = ("plain", "no_sync", "eval", "written between", "replaced")


@pytest.mark.slow(but=("1",))
@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_buffers_are_those_of_pytorch_bit_for_bit(rank, world_size):
    for kind in KINDS:
        ours = _train(lambda module: DistributedDataParallel(module, check=False), rank, kind)
        theirs = _train(nn.parallel.DistributedDataParallel, rank, kind)
        assert len(ours) == len(theirs)
        for step, (mine, reference) in enumerate(zip(ours, theirs, strict=True)):
            assert mine.keys() == reference.keys()
            for name, buffer in reference.items():
                assert torch.equal(mine[name], buffer), (kind, step, name)
                assert mine[name].stride() == buffer.stride()


@on_ranks(3)
def test_rank_0_goes_on_while_others_have_not_come_to_their_forward(rank):
    """Each forward was a sync of all ranks: two waits a step, where one is needed."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), check=False)
    store = dist.group.WORLD.get_group_store()
    for step in range(6):
        if rank:  # not before rank 0 has been through
            store.wait([f"forward {step}"])
        loss = ddp(torch.randn(4, 3)).sum()
        if rank == 0:
            store.set(f"forward {step}", "")
        loss.backward()


@on_ranks(3)
def test_a_forward_that_one_rank_leaves_out_is_told_on_all(rank):
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), check=False)
    dist.barrier()
    for _ in range(2):
        ddp(torch.randn(4, 3)).sum().backward()
    dist.group.WORLD.set_timeout(timedelta(seconds=2))

    def leave_out():
        if rank != 1:
            ddp(torch.randn(4, 3)).sum().backward()
        dist.all_reduce(torch.ones(1))

    with pytest.raises((MismatchError, PeerLostError, DeadlineError)) as told:
        leave_out()
    text = str(told.value)
    assert "rank 1" in text or "Rank 1" in text


def test_two_wrappers_of_one_group_keep_their_buffers_apart():
    def fn(rank, world_size):
        torch.manual_seed(rank)
        first = DistributedDataParallel(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), check=False)
        second = DistributedDataParallel(copy.deepcopy(first.module), check=False)
        for _ in range(3):
            loss = first(torch.randn(4, 3)).sum() + second(torch.randn(4, 3)).sum()
            loss.backward()
        first.eval(), second.eval()
        with torch.no_grad():
            first(torch.randn(4, 3)), second(torch.randn(4, 3))
        return [ddp.module[1].running_mean for ddp in (first, second)]

    for mine, *theirs in zip(*run_ranks(fn, 3), strict=True):
        assert all(torch.equal(mine, other) for other in theirs)


def test_a_forward_of_rank_0_alone_is_told_in_the_next_step():
    """The others took its buffers for those of their step, and from then on those of the step before, without a word:
    rank 0 waits for nobody, so every broadcast found one to pair with.
    """

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(1))

        def forward(self, inputs):
            seen.append(self.count.item())
            self.count += 1
            return self.linear(inputs)

    seen = []

    def check(rank, world_size):
        ddp = DistributedDataParallel(Counting())

        def train():
            for step in range(8):
                if rank == 0 and step == 5:
                    ddp(torch.randn(2, 4))
                steps.append(step)
                ddp(torch.randn(2, 4)).sum().backward()

        with pytest.raises(MismatchError):
            train()
        return max(steps)

    steps = []
    assert all(last <= 6 for last in run_ranks(check, 2))


@on_ranks(2)
def test_a_broadcast_that_is_refused_leaves_its_places_in_turn():
    """The next one used the place that the others may still read from."""

    def in_thread(call):
        raised = []

        def run():
            try:
                call()
            except DeadlineError as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    group = dist.group.WORLD
    large = torch.zeros(200_000, dtype=torch.uint8)
    for number in range(3):
        group.broadcast_buffers(large, 0, number=number)
    (places,) = group.transport._areas.values()
    before = [id(place) for place in places]
    group.set_timeout(timedelta(seconds=0.05))
    with group.transport.lock, pytest.raises(DeadlineError):
        in_thread(lambda: group.broadcast_buffers(large, 0, number=3))
    group.set_timeout(timedelta(seconds=30))
    assert [id(place) for place in places] == before
    group.broadcast_buffers(large, 0, number=3)
    assert [id(place) for place in places] == before[::-1]


@pytest.mark.parametrize("backend", ["phalanx", "gloo"])
@on_ranks(2)
def test_a_buffer_of_another_dtype_on_one_rank_is_told(rank, backend):
    """As many bytes travel: the rank read rank 0's as its own dtype, 0.0078 in place of 0.0, and nobody was told."""
    model = nn.Linear(2, 2)
    model.register_buffer("scale", torch.arange(4.0))
    ddp = DistributedDataParallel(model, check=False)
    ddp(torch.ones(1, 2)).sum().backward()
    if rank == 1:
        model.scale = torch.arange(2.0, dtype=torch.float64)
    # Over Gloo only who receives can see it; rank 0 sees that it has left.
    with pytest.raises(MismatchError if rank == 1 or backend == "phalanx" else RuntimeError):
        ddp(torch.ones(1, 2)).sum().backward()


VIEWS = {
    "expanded": lambda values: values[:1].real.clone().expand(6),
    "expanded inside": lambda values: values.real.clone()[:, None].expand(4, 3).t(),
    "conjugated": lambda values: values.conj(),
    "negative": lambda values: values.conj().imag,
    "conjugated and transposed": lambda values: values.view(2, 2).mH,
    "conjugated and expanded": lambda values: values[1:2].conj().expand(5),
    "window": lambda values: values.real.clone().as_strided((3, 2), (1, 1)),
    "strided": lambda values: values.view(2, 2).real[:, 1:],
}


class WithView(nn.Module):
    def __init__(self, rank, kind, *, is_parameter):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        values = torch.arange(1.0, 5.0) * (1 + rank) + 1j * torch.arange(4.0) * (2 + rank)
        view = VIEWS[kind](values.to(torch.complex64))
        if is_parameter:
            self.view = nn.Parameter(view, requires_grad=False)
        else:
            self.register_buffer("view", view)

    def forward(self, inputs):
        return self.linear(inputs).sum()


@on_ranks(2)
def test_views_of_all_kinds_are_made_rank_0s(rank):
    """Rank 1 raised on an expanded or a negative view, and rank 0 heard of a lost peer; a conjugate raised on both."""
    wrong = []
    for kind in VIEWS:
        for is_parameter in (False, True):
            first = WithView(0, kind, is_parameter=is_parameter).view
            for backend in ("phalanx", "gloo"):
                group = dist.new_group(backend=backend)
                model = WithView(rank, kind, is_parameter=is_parameter)
                wrapper = DistributedDataParallel(model, process_group=group)
                if not torch.equal(model.view, first) or model.view.is_conj() != first.is_conj():
                    wrong.append((kind, is_parameter, backend, "wrapped"))
                for _ in range(2):
                    wrapper(torch.ones(1, 2)).backward()
                if not is_parameter:
                    model.view = WithView(rank + 1, kind, is_parameter=False).view
                wrapper(torch.ones(1, 2)).backward()
                if not is_parameter and not torch.equal(model.view, WithView(1, kind, is_parameter=False).view):
                    wrong.append((kind, backend, "before a forward"))
    assert wrong == []


@on_ranks(2)
def test_a_sparse_buffer_is_refused_on_all_ranks_and_the_group_goes_on(rank):
    model = WithView(rank, "strided", is_parameter=False)
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    with pytest.raises(RuntimeError, match=r"a parameter or buffer \(sparse_coo, torch.float32\) cannot be sent"):
        DistributedDataParallel(model)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2.0


@on_ranks(2)
def test_a_first_forward_in_inference_mode_leaves_training_possible(rank):
    """The memory for buffers was made there, and could not be written outside."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    with torch.inference_mode():
        model.eval()(torch.ones(4, 2))
    for _ in range(3):
        model.train()(torch.randn(4, 2)).sum().backward()
