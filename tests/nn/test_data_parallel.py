"""Replicas in threads against the same module on the whole batch."""

import collections
import copy
import pickle
import threading
import warnings
from dataclasses import dataclass

import pytest
import torch
from tests.comparisons import assert_equal
from tests.small_models import batch_of, mlp
from tests.training import copy_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx import DataParallel


def _batch(rows=8, step=0):
    return batch_of(0, step, shape=(rows, 6))


def _gradients(module, x):
    module.zero_grad()
    module(x).square().mean().backward()
    return copy_gradients(module)


class _Recorded(nn.Module):
    """Remembers, over all replicas, what each was given."""

    def __init__(self):
        super().__init__()
        self.seen = []
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args, **kwargs):
        self.seen.append((args, kwargs))
        return args[0] * self.weight if args else self.weight * 2


# Values


@pytest.mark.parametrize("rows", [8, 7, 5, 1])
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_outputs_and_gradients_are_those_of_the_module_on_the_whole_batch(replicas, rows):
    module, x = mlp(), _batch(rows)
    expected, output = _gradients(module, x), module(x)
    parallel = DataParallel(module, ["cpu"] * replicas)
    torch.testing.assert_close(parallel(x), output, rtol=0, atol=1e-6)
    torch.testing.assert_close(_gradients(parallel, x), expected, rtol=0, atol=1e-6)


def test_training_for_some_steps_is_that_of_one_process():
    def train(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(5):
            optimizer.zero_grad()
            model(_batch(7, step)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        return list(model.parameters())

    torch.testing.assert_close(train(DataParallel(mlp(), 3)), train(mlp()), rtol=0, atol=1e-6)


def test_two_runs_have_the_same_bits():
    runs = [_gradients(DataParallel(mlp(), 4), _batch(64)) for _ in range(3)]
    for other in runs[1:]:
        assert_equal(other, runs[0])


def test_an_empty_batch_goes_through():
    parallel = DataParallel(mlp(), 2)
    output = parallel(_batch(0))
    assert output.shape == (0, 4)
    output.sum().backward()
    assert not parallel.module[0].weight.grad.any()


def test_gradients_accumulate_and_autograd_grad_gives_them():
    module, x = mlp(), _batch()
    expected = _gradients(module, x)
    parallel = DataParallel(module, 2)
    module.zero_grad()
    for count in (1, 2):
        parallel(x).square().mean().backward()
        torch.testing.assert_close(module[0].weight.grad, count * expected[0])
    found = torch.autograd.grad(parallel(x).square().mean(), list(module.parameters()))
    torch.testing.assert_close(found, tuple(expected))


def test_a_graph_that_is_kept_can_be_gone_through_twice_and_another_cannot():
    module, x = mlp(), _batch()
    expected = _gradients(module, x)
    module.zero_grad()
    loss = DataParallel(module, 2)(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(module[0].weight.grad, 2 * expected[0])
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_inputs_that_need_gradients_get_them_and_may_be_changed_in_place():
    module = nn.Sequential(nn.ReLU(inplace=True), mlp())
    x = _batch(5)
    plain, cut = x.clone().requires_grad_(), x.clone().requires_grad_()
    module(plain * 1).square().mean().backward()
    DataParallel(module, 2)(cut * 1).square().mean().backward()
    torch.testing.assert_close(cut.grad, plain.grad, rtol=0, atol=1e-6)


def test_a_module_within_a_model_is_trained_with_what_is_before_and_after_it():
    def build(wrap):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), wrap(mlp(seed=3)), nn.Linear(4, 2))

    expected = _gradients(build(lambda module: module), _batch())
    torch.testing.assert_close(_gradients(build(lambda m: DataParallel(m, 3)), _batch()), expected, rtol=0, atol=1e-6)


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x):
        assert self.two.weight is self.one.weight
        assert len(list(self.parameters())) == 3
        return self.two(self.one(x))


class _Checkpointed(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.stem, self.body, self.use_reentrant = nn.Linear(6, 6), mlp(), use_reentrant

    def forward(self, x):
        return checkpoint(self.body, self.stem(x), use_reentrant=self.use_reentrant)


class _LSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.lstm(x[:, None].expand(-1, 3, -1))[0]


class _Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x):
        return (x * self.turn).abs()


class _Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(6) * i for i in range(3))
        self.nothing, self.gap = nn.ModuleList(), None
        self.register_buffer("scale", torch.full((6,), 2.0, requires_grad=True))

    def forward(self, x):
        assert len(self.nothing) == 0
        return sum(x * weight for weight in self.weights) * self.scale


def _frozen():
    module = mlp()
    module[0].requires_grad_(False)
    return module


def _parametrized():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), nn.LayerNorm(4))


@pytest.mark.parametrize(
    "build",
    [
        _Tied,
        _frozen,
        lambda: _Checkpointed(use_reentrant=True),
        lambda: _Checkpointed(use_reentrant=False),
        _LSTM,
        _Complex,
        _Lists,
        _parametrized,
        lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.TransformerEncoderLayer(3, 1, 8, dropout=0.0, batch_first=True)
        ),
    ],
    ids=["tied", "frozen", "reentrant", "checkpoint", "lstm", "complex", "lists", "parametrized", "transformer"],
)
def test_models_of_every_kind_get_the_gradients_of_the_whole_batch(build):
    torch.manual_seed(0)
    module = build()
    expected = _gradients(module, _batch(7))
    for mine, reference in zip(_gradients(DataParallel(module, 3), _batch(7)), expected, strict=True):
        if reference is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-6)


def test_sparse_gradients_stay_sparse():
    def gradient(wrap):
        torch.manual_seed(0)
        table = nn.Embedding(11, 3, sparse=True)
        wrap(table)(torch.tensor([1, 4, 4, 9, 1])).square().sum().backward()
        assert table.weight.grad.is_sparse
        return table.weight.grad.to_dense()

    torch.testing.assert_close(gradient(lambda table: DataParallel(table, 3)), gradient(lambda table: table))


def test_a_parameter_that_no_replica_uses_has_no_gradient_and_one_that_a_replica_uses_has_its_part():
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large, self.idle = (nn.Parameter(torch.ones(1)) for _ in range(3))

        def forward(self, x):
            return x * (self.small if x.max() < 2 else self.large)

    parallel = DataParallel(Chooses(), 2)
    parallel(torch.tensor([1.0, 1.0, 3.0, 3.0])).sum().backward()
    assert (parallel.module.small.grad.item(), parallel.module.large.grad.item()) == (2.0, 6.0)
    assert parallel.module.idle.grad is None


# Scatter


def test_the_batch_is_cut_as_torch_chunk_cuts_it_and_views_are_passed():
    module = _Recorded()
    x = torch.arange(5.0)
    with torch.no_grad():
        DataParallel(module, 4)(x)
    parts = sorted((args[0] for args, _ in module.seen), key=lambda part: part[0])
    assert [part.tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert {part.untyped_storage().data_ptr() for part in parts} == {x.untyped_storage().data_ptr()}


Pair = collections.namedtuple("Pair", ["x", "label"])


@dataclass
class Opaque:
    tensor: torch.Tensor


def test_tensors_are_cut_in_nested_containers_and_in_keywords_and_everything_else_is_shared():
    module, opaque = _Recorded(), Opaque(torch.ones(4))
    counts = collections.defaultdict(int, {"n": torch.arange(4.0)})
    with torch.no_grad():
        DataParallel(module, 2)(torch.arange(4.0), [Pair(torch.arange(4), "a"), 3], opaque, key={"k": (counts,)})
    assert len(module.seen) == 2
    for args, kwargs in module.seen:
        x, nested, shared = args
        assert shared is opaque
        assert isinstance(nested[0], Pair)
        assert nested[0].x.tolist() == x.tolist()
        assert nested[1:] == [3]
        inner = kwargs["key"]["k"][0]
        assert inner["n"].tolist() == x.tolist()
        assert inner["missing"] == 0
    assert "missing" not in counts


def test_keywords_alone_and_arguments_without_a_tensor():
    class Named(nn.Module):
        def forward(self, *, x=None, scale=1):
            return None if x is None else x * scale

    parallel = DataParallel(Named(), 3)
    assert parallel(x=torch.arange(3.0), scale=2).tolist() == [0, 2, 4]
    assert parallel(x=torch.arange(2.0), scale=2).tolist() == [0, 2]  # a small batch: the third has nothing to do
    assert parallel(scale=2) is None


def test_without_arguments_one_replica_runs():
    module = _Recorded()
    assert DataParallel(module, 3)().tolist() == [2.0]
    assert len(module.seen) == 1


def test_another_dimension_is_cut_and_joined():
    x = torch.randn(3, 4, 5)
    torch.testing.assert_close(DataParallel(nn.Tanh(), 2, dim=1)(x), x.tanh())
    torch.testing.assert_close(DataParallel(nn.Tanh(), 2, dim=-1)(x), x.tanh())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(4), torch.tensor(1.0)), r"can't cut a tensor of shape \(\) along dimension 0.*as a Python number"),
        ((torch.ones(8), torch.ones(3)), r"shape \(3,\) makes 3 parts and shape \(8,\) makes 4"),
    ],
)
def test_what_can_not_be_cut_is_refused_with_its_shape(arguments, message):
    with pytest.raises(ValueError, match=message):
        DataParallel(_Recorded(), 4)(*arguments)


# Gather


class _Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make, self.weight = make, nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.make(x * self.weight)


def test_nested_outputs_are_joined():
    def make(y):
        return {
            "pair": Pair(y, None),
            "list": [y * 2, (y.detach(),)],
            "ordered": collections.OrderedDict(n=y.sum(0)[None]),
        }

    output = DataParallel(_Returns(make), 2)(torch.arange(4.0))
    assert isinstance(output["pair"], Pair)
    assert output["pair"].x.tolist() == [0, 1, 2, 3]
    assert output["pair"].label is None
    assert output["list"][0].tolist() == [0, 2, 4, 6]
    assert not output["list"][1][0].requires_grad
    assert output["ordered"]["n"].tolist() == [1, 5]


def test_scalars_become_a_vector_with_pytorchs_warning_and_their_mean_trains():
    module = _Returns(lambda y: y.mean())
    with pytest.warns(UserWarning, match="Was asked to gather along dimension 0, but all input tensors were scalars"):
        losses = DataParallel(module, 2)(torch.tensor([1.0, 3.0, 5.0, 7.0]))
    assert losses.tolist() == [2.0, 6.0]
    losses.mean().backward()
    assert module.weight.grad.item() == 4.0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda y: 3, TypeError, "forward returned int, which can't be joined over replicas"),
        (lambda y: [y] * int(y[0] + 1), ValueError, r"replicas returned a list of different lengths: \[1, 2\]"),
        (lambda y: y if y[0] else None, ValueError, "replicas returned different things: NoneType, Tensor"),
        (lambda y: {str(int(y[0])): y}, ValueError, r"dicts with different keys: \[\['0'\], \['1'\]\]"),
    ],
)
def test_outputs_that_can_not_be_joined_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        DataParallel(_Returns(make), 2)(torch.tensor([0.0, 1.0]))


# Replicas


def test_replicas_run_in_threads_of_their_own_at_the_same_time():
    meet = threading.Barrier(3, timeout=30)

    class Meets(nn.Module):
        def forward(self, x):
            meet.wait()  # returns only if all three are in forward
            return torch.full_like(x, threading.get_ident(), dtype=torch.int64)

    assert len(set(DataParallel(Meets(), 3)(torch.ones(3)).tolist()) - {threading.get_ident()}) == 3


def test_backward_runs_in_threads_at_the_same_time():
    meet = threading.Barrier(2, timeout=30)

    class Meets(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, slope):
            meet.wait()
            return slope

    module = _Returns(Meets.apply)
    DataParallel(module, 2)(torch.tensor([1.0, 2.0])).sum().backward()
    assert module.weight.grad.item() == 3.0


def test_buffers_change_on_replica_0_only_and_attributes_not_at_all():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(1))
            self.calls = 0

        def forward(self, x):
            self.total += x.sum()
            self.calls += 1
            return x

    parallel = DataParallel(Counts(), 2)
    for count in (1, 2):
        parallel(torch.tensor([1.0, 10.0]))
        assert parallel.module.total.item() == count
        assert parallel.module.calls == 0


def test_batchnorm_normalizes_each_part_and_remembers_the_first():
    x = _batch(8)
    parts = x.chunk(2)
    plain, parallel = nn.BatchNorm1d(6), DataParallel(nn.BatchNorm1d(6), 2)
    output = parallel(x)
    torch.testing.assert_close(output, torch.cat([plain(part) for part in parts]))
    only_first = nn.BatchNorm1d(6)
    only_first(parts[0])
    torch.testing.assert_close(parallel.module.state_dict(), only_first.state_dict())


def test_hooks_run_once_per_replica():
    module = mlp()
    called = []
    module.register_forward_pre_hook(lambda *_: called.append("before"))
    module[0].register_forward_hook(lambda *_: called.append("after"))
    module[2].register_full_backward_hook(lambda *_: called.append("backward"))
    module[0].weight.register_post_accumulate_grad_hook(lambda _: called.append("gradient"))
    DataParallel(module, 3)(_batch(6)).sum().backward()
    assert collections.Counter(called) == {"before": 3, "after": 3, "backward": 3, "gradient": 1}


def test_an_exception_of_a_replica_has_its_class_and_the_replicas_number():
    class Fails(nn.Module):
        def forward(self, x):
            if x[0] == 2:
                raise FloatingPointError("two is too much")
            return x

    with pytest.raises(FloatingPointError, match="Caught FloatingPointError in replica 2 of 4") as caught:
        DataParallel(Fails(), 4)(torch.arange(4))
    assert "two is too much" in str(caught.value)


def test_an_exception_in_backward_has_the_replicas_number():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.fails = bool(x[0] == 1)
            return x * 1

        @staticmethod
        def backward(ctx, slope):
            if ctx.fails:
                raise FloatingPointError("not this one")
            return slope

    loss = DataParallel(_Returns(Fails.apply), 2)(torch.tensor([0.0, 1.0])).sum()
    with pytest.raises(FloatingPointError, match="in backward of replica 1 of 2"):
        loss.backward()


def test_the_threads_have_the_callers_modes():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), self.layer(x).dtype == torch.bfloat16
            return torch.tensor([modes])

    parallel, x = DataParallel(Asks(), 2), torch.ones(2, 2)
    with torch.no_grad():
        assert parallel(x).tolist() == [[False, False, False]] * 2
    with torch.inference_mode():
        assert parallel(x).tolist() == [[False, True, False]] * 2
    with torch.autocast("cpu", torch.bfloat16):
        assert parallel(x).tolist() == [[True, False, True]] * 2
    assert parallel(x).tolist() == [[True, False, False]] * 2


def test_autocast_trains_the_full_precision_parameters():
    def gradients(model):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(_batch()).float().square().mean()
        loss.backward()
        return copy_gradients(model)

    module = mlp()
    expected = gradients(module)
    found = gradients(DataParallel(module, 2))
    assert {gradient.dtype for gradient in found} == {torch.float32}
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=1e-2)


def test_replicas_share_the_intra_op_threads_between_them():
    class Asks(nn.Module):
        def forward(self, x):
            return torch.tensor([torch.get_num_threads()])

    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        assert DataParallel(Asks(), 2)(torch.ones(2)).tolist() == [2, 2]
        assert torch.get_num_threads() == 5
        assert len(DataParallel(Asks()).device_ids) == 5
    finally:
        torch.set_num_threads(before)


# The wrapper


def test_without_an_accelerator_devices_are_numbers_names_or_a_count():
    cpu = torch.device("cpu")
    for device_ids in (2, [0, 1], ["cpu", torch.device("cpu")]):
        assert DataParallel(mlp(), device_ids, output_device=0).device_ids == [cpu, cpu]
    assert DataParallel(mlp()).device_ids == [cpu] * torch.get_num_threads()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_ids": 0}, "device_ids=0 replicas; it takes 1 or more"),
        ({"device_ids": []}, "device_ids names no device"),
        ({"device_ids": ["cuda:0"]}, "device_ids names cuda:0, but this machine has no accelerator"),
        ({"device_ids": 2, "output_device": "cuda"}, "output_device names cuda, but this machine has no accelerator"),
    ],
)
def test_devices_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataParallel(mlp(), **options)


def test_where_there_is_an_accelerator_it_is_pytorchs_own_unless_the_cpu_is_named(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert type(DataParallel(mlp())) is nn.DataParallel
    assert type(DataParallel(mlp(), ["cpu", "cpu"])) is DataParallel
    assert type(DataParallel(mlp(), 2)) is DataParallel
    with pytest.raises(ValueError, match=r"all on the CPU or all on accelerators, got \['cpu', 0\]"):
        DataParallel(mlp(), ["cpu", 0])


def test_state_is_pytorchs_and_copies_and_pickles_train():
    module = mlp()
    parallel = DataParallel(module, 2)
    assert parallel.module is module
    assert parallel.state_dict().keys() == nn.DataParallel(module).state_dict().keys()
    twin = copy.deepcopy(parallel)
    twin.load_state_dict({name: torch.zeros_like(value) for name, value in parallel.state_dict().items()})
    assert not twin(_batch()).any()
    assert parallel(_batch()).any()
    torch.testing.assert_close(pickle.loads(pickle.dumps(parallel))(_batch()), parallel(_batch()))


def test_functional_call_runs_with_other_parameters_and_trains_them():
    parallel = DataParallel(nn.Linear(2, 1, bias=False), 2)
    weight = torch.tensor([[2.0, 3.0]], requires_grad=True)
    output = torch.func.functional_call(parallel, {"module.weight": weight * 2}, (torch.ones(4, 2),))
    assert output.flatten().tolist() == [10.0] * 4
    output.sum().backward()
    assert weight.grad.tolist() == [[8.0, 8.0]]


def test_a_subclass_may_cut_in_its_own_way():
    class Halves(DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            (x,) = inputs
            return ((x[:1],), (x[1:],)), ({}, {})

    assert Halves(nn.Tanh(), 2)(torch.ones(5)).shape == (5,)


def test_a_module_that_is_elsewhere_is_refused_in_pytorchs_words():
    with pytest.raises(RuntimeError, match=r"on device cpu \(device_ids\[0\]\) but found one of them on device: meta"):
        DataParallel(nn.Linear(2, 2, device="meta"), 2)(torch.ones(2, 2))


def test_double_backward_is_refused_by_name():
    x = _batch().requires_grad_()
    with pytest.raises(RuntimeError, match=r"DataParallel: backward\(create_graph=True\) is refused"):
        torch.autograd.grad(DataParallel(mlp(), 2)(x).sum(), x, create_graph=True)


def test_a_compiled_module_is_refused_and_compiling_the_wrapper_changes_nothing():
    compiled = torch.compile(mlp(), backend="eager")
    with pytest.raises(TypeError, match=r"can't replicate 'the module', which torch\.compile has returned"):
        DataParallel(compiled, 2)(_batch())
    parallel = DataParallel(mlp(), 2)
    torch.testing.assert_close(torch.compile(parallel, backend="eager")(_batch()), parallel(_batch()))


def test_a_step_that_fails_leaves_no_thread():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("every replica")

    before = set(threading.enumerate())
    with warnings.catch_warnings(), pytest.raises(KeyError):
        DataParallel(Fails(), 4)(torch.ones(4))
    assert set(threading.enumerate()) == before


def test_gradients_that_share_memory_within_a_replica_are_not_added_twice():
    """With one sample on each replica the gradients of `one` and `other` are views of one tensor; what the second
    replica added to the first's `one` was in its `other` as well, and was added there again. So was it in the tensor
    that the caller had given to backward."""

    class Added(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = (nn.Parameter(torch.zeros(4, 4)) for _ in range(2))

        def forward(self, x):
            return x + self.one.unsqueeze(0) + self.other.unsqueeze(0)

    for replicas in (2, 3):
        module = Added()
        slope = torch.randn(replicas, 4, 4)
        given = slope.clone()
        DataParallel(module, replicas)(torch.ones(replicas, 4, 4)).backward(given)
        assert torch.equal(given, slope)
        torch.testing.assert_close(module.one.grad, slope.sum(0))
        torch.testing.assert_close(module.other.grad, slope.sum(0))
