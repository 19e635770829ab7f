"""The first steps of real ranks: each mistake is one line in the log of rank 0, and nothing else is said."""

import copy

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.logs import logged
from tests.on_ranks import on_ranks
from tests.small_models import batch_of, mlp
from tests.training import copy_parameters, copy_state
from torch import nn

from phalanx import DistributedDataParallel
from phalanx.ddp import first_steps
from phalanx.testing import run_ranks


def _lines(fn):
    """What the function logged, in this rank."""
    with logged() as lines:
        fn()
    return lines


def _train(ddp, rank, *, num_steps=5, batch=None, optimizer=None, before_step=None):
    """Some steps, on batches of the rank's own unless told otherwise."""
    generator = torch.Generator().manual_seed(rank)
    optimizer = optimizer or torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(num_steps):
        if before_step is not None:
            before_step(step)
        optimizer.zero_grad()
        inputs = torch.randn(4, 3, generator=generator) if batch is None else batch
        ddp(inputs).sum().backward()
        optimizer.step()


@on_ranks(3)
def test_training_as_it_should_be_says_nothing(rank, backend):
    ddp = DistributedDataParallel(mlp((3, 4, 2)))
    assert ddp._reducer.watch is not None
    lines = _lines(lambda: _train(ddp, rank))
    assert (lines, ddp._reducer.watch) == ([], None)


def test_the_same_batch_on_all_ranks(backend):
    def fn(rank, world_size):
        ddp = DistributedDataParallel(mlp((3, 4, 2)))
        return _lines(lambda: _train(ddp, rank, batch=torch.ones(2, 3)))

    (line,), *others = run_ranks(fn, 3, backend=backend)
    assert line.startswith(
        "DistributedDataParallel: all 3 ranks were given the same batch in each of the first 3 steps"
    )
    assert line.endswith("(check=False turns these checks off.)")
    assert others == [[], []]


@on_ranks(2)
def test_two_steps_are_too_few_to_speak_of_batches(rank):
    ddp = DistributedDataParallel(mlp((3, 4, 2)))
    assert _lines(lambda: _train(ddp, rank, num_steps=2, batch=torch.ones(2, 3))) == []


def test_dropout_that_is_the_same_on_all_ranks():
    def fn(rank, world_size, offset):
        ddp = DistributedDataParallel(nn.Sequential(mlp((3, 4, 2)), nn.Dropout(0.5)))
        torch.manual_seed(1 + offset * rank)
        lines = _lines(lambda: _train(ddp, rank))
        ddp.eval()
        return lines

    (line,), nothing = run_ranks(fn, 2, 0)
    assert "all 2 ranks draw the same random numbers in forward" in line
    assert nothing == []
    assert run_ranks(fn, 2, 1) == [[], []]


@on_ranks(2)
def test_the_same_seed_does_not_matter_where_nothing_is_drawn(rank):
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(mlp((3, 4, 2)), nn.Dropout(0.0)))
    assert _lines(lambda: _train(ddp, rank)) == []


def test_parameters_that_drift_apart_are_named_once():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(mlp((3, 4, 2)))

        def break_it(step):
            if step == 1 and rank == 1:
                with torch.no_grad():
                    ddp.module[2].bias.add_(1e-6)

        return _lines(lambda: _train(ddp, rank, before_step=break_it))

    (line,), *_ = run_ranks(fn, 3)
    assert "in step 2 parameter '2.bias' had different values on rank 1 than on rank 0" in line


def test_parameters_that_were_never_the_same():
    def fn(rank, world_size):
        model = mlp((3, 4, 2))
        with torch.no_grad():
            model[0].weight.add_(rank)
        ddp = DistributedDataParallel(model, init_sync=False)
        return _lines(lambda: _train(ddp, rank))

    (line,), _ = run_ranks(fn, 2)
    assert "in step 1 parameter '0.weight' had different values on rank 1" in line


@pytest.mark.parametrize("drifts", [False, True])
def test_parameters_that_are_moved_for_a_backward_and_put_back_do_not_differ(drifts):
    """Sharpness-aware minimization was told that every rank trains a model of its own, and got the same one on all."""

    def fn(rank, world_size):
        ddp = DistributedDataParallel(mlp((3, 4, 2)))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

        def train():
            for step in range(5):
                batch = batch_of(rank, step, shape=(2, 3))
                with ddp.no_sync():
                    ddp(batch).square().sum().backward()
                before = copy_parameters(ddp)
                with torch.no_grad():
                    for parameter in ddp.parameters():
                        parameter.add_(parameter.grad, alpha=0.05)
                optimizer.zero_grad()
                ddp(batch).square().sum().backward()
                with torch.no_grad():
                    for parameter, old in zip(ddp.parameters(), before, strict=True):
                        parameter.copy_(old + drifts * rank)
                optimizer.step()

        return _lines(train)

    lines, nothing = run_ranks(fn, 2)
    assert nothing == []
    assert ["different values on rank 1" in line for line in lines] == [True] * drifts, lines


def test_a_nan_in_the_output_of_one_rank():
    def fn(rank, world_size):
        ddp = DistributedDataParallel(mlp((3, 4, 2)))
        batch = torch.full((2, 3), float("nan") if rank == 1 else 1.0)
        return _lines(lambda: _train(ddp, rank, num_steps=1, batch=batch))

    (line,), *_ = run_ranks(fn, 3)
    assert "in step 1 the output of forward was NaN on rank 1 only" in line


def test_a_nan_in_the_gradient_of_one_rank(backend):
    def fn(rank, world_size):
        ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))

        def step():
            y = ddp(torch.full((2, 1), rank + 1.0))
            y.backward(torch.full_like(y, float("nan") if rank == 1 else 1.0))

        return _lines(step)

    (line,), _ = run_ranks(fn, 2, backend=backend)
    assert "in step 1 the gradient of 'weight' was NaN on rank 1 only" in line


@on_ranks(2)
def test_gradients_of_half_precision_may_overflow_while_the_scale_is_sought(rank):
    ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False).half())

    def step():
        y = ddp(torch.full((2, 1), float(rank + 1)).half())
        y.backward(torch.full_like(y, float("nan") if rank == 1 else 1.0))

    assert _lines(step) == []


def test_an_optimizer_of_another_copy_of_the_model(backend):
    def fn(rank, world_size):
        model = mlp((3, 4, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        ddp = DistributedDataParallel(copy.deepcopy(model))
        return _lines(lambda: _train(ddp, rank, optimizer=optimizer))

    (line,), nothing = run_ranks(fn, 2, backend=backend)
    assert "the optimizer of ranks 0 and 1 holds none of the model's parameters" in line
    assert nothing == []


@on_ranks(2)
def test_a_second_model_with_an_optimizer_of_its_own_is_no_mistake(rank):
    ddp, other = DistributedDataParallel(mlp((3, 4, 2))), mlp((3, 4, 2))
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def train_other(_step):
        other(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    assert _lines(lambda: _train(ddp, rank, before_step=train_other)) == []


@on_ranks(2)
def test_optimizers_are_watched_until_the_last_step_or_as_long_as_the_wrapper_lives(rank):
    watches = first_steps._watches
    ddp = DistributedDataParallel(mlp((3, 4, 2)))
    during = len(watches)
    _train(ddp, rank)
    after = len(watches)
    other = DistributedDataParallel(mlp((3, 4, 2)))
    del other
    assert (during, after, len(watches)) == (1, 0, 0)


@on_ranks(2)
def test_check_false_watches_nothing(rank):
    ddp = DistributedDataParallel(mlp((3, 4, 2)), check=False)
    assert ddp._reducer.watch is None
    assert _lines(lambda: _train(ddp, rank, batch=torch.ones(2, 3))) == []


@on_ranks(1)
def test_a_job_of_one_rank_is_not_watched(rank):
    ddp = DistributedDataParallel(mlp((3, 4, 2)))
    assert (_lines(lambda: _train(ddp, rank)), ddp._reducer.watch) == ([], None)


@on_ranks(2)
def test_ranks_that_disagree_about_watching_are_told_at_construction(rank):
    with pytest.raises(dist.DistBackendError, match="rank 1 passes check=False, rank 0 check=True"):
        DistributedDataParallel(mlp((3, 4, 2)), check=rank == 0)


@on_ranks(3)
def test_different_numbers_of_forwards_and_of_local_backwards_keep_ranks_in_step(rank, backend):
    ddp = DistributedDataParallel(mlp((3, 4, 2)), broadcast_buffers=False)
    generator = torch.Generator().manual_seed(rank)

    def step():
        for _ in range(rank):  # looks at samples that it does not train on
            ddp(torch.randn(1, 3, generator=generator))
        with ddp.no_sync():
            for _ in range(rank):
                ddp(torch.randn(2, 3, generator=generator)).sum().backward()
        ddp(torch.randn(2, 3, generator=generator)).sum().backward()

    assert _lines(lambda: [step() for _ in range(5)]) == []


@on_ranks(2)
def test_gradients_are_the_same_with_and_without_watching(rank):
    states = []
    for check in (True, False):
        ddp = DistributedDataParallel(mlp((3, 4, 2)), check=check)
        _train(ddp, rank)
        states.append(copy_state(ddp))
    assert_equal(*states)


@on_ranks(2)
def test_every_kind_of_gradient_can_be_looked_at(rank):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 3, sparse=True)
            self.turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.head = nn.Linear(3, 2, dtype=torch.bfloat16)

        def forward(self, index):
            return self.head((self.embedding(index) * self.turn).real.bfloat16())

    ddp = DistributedDataParallel(Model())

    def step():
        ddp(torch.tensor([rank, 4])).sum().backward()

    assert _lines(lambda: [step() for _ in range(4)]) == []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
@on_ranks(2)
def test_ragged_batches_train_and_are_not_looked_at(rank, layout):
    # They used to end the first forward: the digest cannot read nested tensors, nor could the look at epochs.
    class Padded(nn.Linear):
        def forward(self, rows):
            return super().forward(torch.nested.to_padded_tensor(rows, 0.0))

    torch.manual_seed(0)
    ddp = DistributedDataParallel(Padded(3, 2))
    batch = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
    assert _lines(lambda: _train(ddp, rank, batch=batch)) == []
