"""Parameters that a backward leaves out: found, averaged with those who used them, or reported by name."""

from dataclasses import dataclass

import pytest
import torch
from tests.on_ranks import on_ranks
from torch import nn

from phalanx import DistributedDataParallel
from phalanx.testing import run_ranks


@dataclass
class Output:
    chosen: dict


class Experts(nn.Module):
    """Uses one expert per call; `idle` is never used."""

    def __init__(self, wrap=None):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(3, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(3, 2, bias=False) for _ in range(3))
        self.idle = nn.Linear(3, 2, bias=False)
        self._wrap = wrap

    def forward(self, inputs, choice):
        output = self.experts[choice](self.stem(inputs))
        return Output({"logits": [output]}) if self._wrap else output


def _gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _trained(model):
    return {name for name, gradient in _gradients(model).items() if gradient is not None}


def _ones(model, choice):
    output = model(torch.ones(2, 3), choice)
    return output.chosen["logits"][0].sum() if isinstance(output, Output) else output.sum()


@pytest.mark.parametrize("as_view", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_a_parameter_that_some_rank_used_has_the_mean_and_others_count_as_zero(backend, as_view, nested):
    def fn(rank, world_size):
        ddp = DistributedDataParallel(
            Experts(wrap=nested), find_unused_parameters=True, gradient_as_bucket_view=as_view, bucket_cap_mb=0.00001
        )
        for _ in range(2):
            ddp.zero_grad()
            _ones(ddp, rank).backward()
        return _gradients(ddp.module)

    world_size = 2
    alone = Experts()
    for gradients in run_ranks(fn, world_size, backend=backend):
        for choice in range(world_size):
            alone.zero_grad()
            _ones(alone, choice).backward()
            name = f"experts.{choice}.weight"
            torch.testing.assert_close(gradients[name], _gradients(alone)[name] / world_size)
        assert gradients["experts.2.weight"] is None
        assert gradients["idle.weight"] is None


def test_a_gradient_that_nobody_used_stays_as_the_user_left_it(backend):
    def fn(rank, world_size):
        ddp = DistributedDataParallel(Experts(), find_unused_parameters=True)
        mine = torch.full((2, 3), float(rank))
        ddp.module.idle.weight.grad = mine
        _ones(ddp, 0).backward()
        assert ddp.module.idle.weight.grad is mine
        return mine

    assert [grad[0, 0].item() for grad in run_ranks(fn, 2, backend=backend)] == [0.0, 1.0]


def test_use_inside_no_sync_counts_as_use(backend):
    def fn(rank, world_size):
        ddp = DistributedDataParallel(Experts(), find_unused_parameters=True)
        with ddp.no_sync():
            _ones(ddp, 2 * rank).backward()
        _ones(ddp, 1).backward()
        return _gradients(ddp.module)

    first, second = run_ranks(fn, 2, backend=backend)
    alone = Experts()
    _ones(alone, 2).backward()
    for gradients in (first, second):
        torch.testing.assert_close(gradients["experts.2.weight"], alone.experts[2].weight.grad / 2)
        assert gradients["idle.weight"] is None


@on_ranks(2, backend="gloo")
def test_outputs_that_the_loss_leaves_out_are_found_at_the_end_of_backward():
    class TwoHeads(Experts):
        def forward(self, inputs):
            hidden = self.stem(inputs)
            return self.experts[0](hidden), self.experts[1](hidden)

    ddp = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.ones(2, 3))[0].sum().backward()
    assert _trained(ddp.module) == {"stem.weight", "experts.0.weight"}


@on_ranks(2, backend="gloo")
def test_a_forward_without_backward_does_not_disturb_the_next():
    ddp = DistributedDataParallel(Experts(), find_unused_parameters=True)
    _ones(ddp, 1)
    _ones(ddp, 0).backward()
    assert _trained(ddp.module) == {"stem.weight", "experts.0.weight"}


def test_a_static_graph_learns_what_is_unused_in_its_first_backward(backend):
    def fn(rank, world_size):
        ddp = DistributedDataParallel(Experts(), static_graph=True, bucket_cap_mb=0.00001)
        for _ in range(3):
            ddp.zero_grad()
            _ones(ddp, rank).backward()
        return _gradients(ddp.module)

    alone = Experts()
    _ones(alone, 1).backward()
    for gradients in run_ranks(fn, 2, backend=backend):
        torch.testing.assert_close(gradients["experts.1.weight"], alone.experts[1].weight.grad / 2)
        assert gradients["idle.weight"] is None


@on_ranks(2)
def test_a_parameter_without_gradient_is_named_at_the_end_of_the_first_backward(rank, backend):
    ddp = DistributedDataParallel(Experts())
    with pytest.raises(RuntimeError) as caught:
        _ones(ddp, 0).backward()
    message = str(caught.value)
    assert message.startswith(
        f"DistributedDataParallel on rank {rank}: backward left 3 of 5 parameters without a gradient: "
        "'experts.1.weight' (Linear), 'experts.2.weight' (Linear), 'idle.weight' (Linear). "
    )
    assert "find_unused_parameters=True" in message


@on_ranks(2)
def test_a_parameter_that_is_left_out_later_is_named_at_the_next_forward(backend):
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, inputs, both):
            return self.two(self.one(inputs)) if both else self.one(inputs)

    ddp = DistributedDataParallel(Skips())
    ddp(torch.ones(1, 2), both=True).sum().backward()
    ddp(torch.ones(1, 2), both=False).sum().backward()
    with pytest.raises(RuntimeError, match=r"left 2 of 4 parameters without a gradient: 'two\.weight' \(Linear\)"):
        ddp(torch.ones(1, 2), both=True)


@on_ranks(1, backend="gloo")
def test_a_parameter_frozen_after_wrapping_is_named():
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    ddp.module[0].weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'0\.weight' \(Linear\) no longer requires a gradient: freeze parameters"):
        ddp(torch.ones(1, 2)).sum().backward()


@on_ranks(2, backend="gloo")
def test_two_backwards_that_share_the_parameters_between_them_make_one_round(rank):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}), bucket_cap_mb=1)
    ddp.module.forward = lambda inputs: (ddp.module["a"](inputs), ddp.module["b"](inputs))
    first, second = ddp(torch.full((1, 2), float(rank)))
    first.sum().backward()
    second.sum().backward()
    assert [module.weight.grad[0, 0].item() for module in ddp.module.values()] == [0.5, 0.5]


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
@on_ranks(2)
def test_a_rank_whose_backward_reaches_no_parameter_does_not_keep_the_others_waiting(rank, backend, options):
    # It took no part in the round, and the others waited for it until time was up; in PyTorch they still do.
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2, bias=False)

        def forward(self, inputs, skip):
            return inputs * 2 if skip else self.layer(inputs)

    ddp = DistributedDataParallel(Skips(), **options)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.ones(1, 2, requires_grad=True), skip=rank == 1).sum().backward()
    assert ddp.module.layer.weight.grad.flatten().tolist() == [0.5] * 4


@on_ranks(2)
def test_gradients_that_are_only_asked_for_make_no_round(rank):
    ddp, x = DistributedDataParallel(Experts(), find_unused_parameters=True), torch.ones(2, 3, requires_grad=True)
    if rank == 0:  # alone: a round would wait for the other
        torch.autograd.grad(ddp(x, 0).sum(), x)
        ddp(x, 0).sum().backward(inputs=[x])
    _ones(ddp, 1).backward()
    assert _trained(ddp.module) == {"stem.weight", "experts.1.weight"}


@on_ranks(2)
def test_outputs_that_hide_their_tensors_can_leave_parameters_out():
    class Hidden:
        def __init__(self, tensor):
            self.tensor = tensor

    class Hides(Experts):
        def forward(self, inputs, choice):
            return Hidden(super().forward(inputs, choice)), torch.zeros(())

    ddp = DistributedDataParallel(Hides(), find_unused_parameters=True)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.ones(2, 3), 1)[0].tensor.sum().backward()
    assert _trained(ddp.module) == {"stem.weight", "experts.1.weight"}
