"""The layer on several ranks against torch's BatchNorm in one process that has the whole batch."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.nn.batchnorms import CHANNELS, _batch, _check, _randomized, _slopes, _steps
from tests.on_ranks import on_ranks
from tests.training import copy_gradients, copy_state, train
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx import DistributedDataParallel, SyncBatchNorm
from phalanx.nn.sync_batchnorm import combine, measure
from phalanx.testing import RankFailed, run_ranks

OPTIONS = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.5, "momentum": 0.7}]


@pytest.mark.parametrize("sizes", [(4,), (3, 2), (1, 4, 2), (0, 5, 1)], ids=str)
def test_ranks_with_parts_train_like_one_process_with_the_whole_batch(backend, sizes):
    inputs, slopes = _batch(sum(sizes), 5), _slopes(sum(sizes), CHANNELS, 5)

    def fn(rank, world_size):
        layers = [_randomized(SyncBatchNorm(CHANNELS, **options)) for options in OPTIONS]
        return [_steps(layer, inputs.split(sizes)[rank], slopes.split(sizes)[rank]) for layer in layers]

    results = run_ranks(fn, len(sizes), backend=backend)
    for index, options in enumerate(OPTIONS):
        expected = _steps(_randomized(nn.BatchNorm1d(CHANNELS, **options)), inputs, slopes)
        _check([result[index] for result in results], expected, sizes, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "shape"), [(nn.BatchNorm1d, ()), (nn.BatchNorm2d, (2, 3)), (nn.BatchNorm3d, (2, 1, 2))], ids=str
)
def test_inputs_of_every_number_of_dimensions(kind, shape):
    inputs, slopes = _batch(5, *shape), _slopes(5, CHANNELS, *shape)
    expected = _steps(_randomized(kind(CHANNELS)), inputs, slopes)

    def fn(rank, world_size):
        return _steps(_randomized(SyncBatchNorm(CHANNELS)), inputs.split([3, 2])[rank], slopes.split([3, 2])[rank])

    _check(run_ranks(fn, 2), expected, [3, 2], rtol=1e-5, atol=1e-5)


def test_double_precision_is_kept():
    inputs, slopes = _batch(5, 4, dtype=torch.float64), _slopes(5, CHANNELS, 4, dtype=torch.float64)
    expected = _steps(_randomized(nn.BatchNorm1d(CHANNELS, dtype=torch.float64)), inputs, slopes)

    def fn(rank, world_size):
        layer = _randomized(SyncBatchNorm(CHANNELS, dtype=torch.float64))
        return _steps(layer, inputs.split([3, 2])[rank], slopes.split([3, 2])[rank])

    _check(run_ranks(fn, 2), expected, [3, 2], rtol=1e-12, atol=1e-12)


@pytest.mark.slow(but=("torch.bfloat16-float32 layer", "torch.float16-half layer"))
@pytest.mark.parametrize("layer_dtype", [torch.float32, None], ids=["float32 layer", "half layer"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_differ_from_float32_by_one_rounding(dtype, layer_dtype):
    inputs, slopes = _batch(6, 3, dtype=dtype), _slopes(6, CHANNELS, 3).to(dtype)
    expected = _steps(_randomized(nn.BatchNorm1d(CHANNELS)), inputs.float(), slopes.float(), num_steps=1)

    def fn(rank, world_size):
        layer = _randomized(SyncBatchNorm(CHANNELS)).to(layer_dtype or dtype)
        result = _steps(layer, inputs.split([2, 4])[rank], slopes.split([2, 4])[rank], num_steps=1)
        assert result["outputs"][0].dtype == result["input gradients"][0].dtype == dtype
        assert layer.weight.grad.dtype == layer.running_mean.dtype == layer.weight.dtype
        return result

    results = run_ranks(fn, 2)
    ulp = torch.finfo(dtype).eps
    # A layer in half precision has rounded parameters, too: two roundings more.
    tolerance = {"rtol": ulp * (1 if layer_dtype else 3), "atol": ulp, "check_dtype": False}
    for name in ("outputs", "input gradients"):
        for result, part in zip(results, expected[name][0].split([2, 4]), strict=True):
            torch.testing.assert_close(result[name][0], part, **tolerance)
    for key in ("running_mean", "running_var"):
        torch.testing.assert_close(results[0]["state"][key], expected["state"][key], **tolerance)


def test_channels_last_stays_channels_last():
    inputs = _batch(4, 2, 5).to(memory_format=torch.channels_last)
    slopes = _slopes(4, CHANNELS, 2, 5)
    expected = _steps(_randomized(nn.BatchNorm2d(CHANNELS)), inputs, slopes)

    def fn(rank, world_size):
        result = _steps(_randomized(SyncBatchNorm(CHANNELS)), inputs.split(2)[rank], slopes.split(2)[rank])
        assert result["outputs"][0].is_contiguous(memory_format=torch.channels_last)
        assert result["input gradients"][0].is_contiguous(memory_format=torch.channels_last)
        return result

    _check(run_ranks(fn, 2), expected, [2, 2], rtol=1e-5, atol=1e-5)


def test_a_mean_far_from_zero_leaves_gradients_as_exact_as_torch_has_them():
    # In steps of 1/64, so that float32 holds the mean of any part exactly: rounding it weighs more than what is tested.
    inputs, slopes = (torch.randn(8, CHANNELS, 16) * 64).round() / 64 + 1000.0, _slopes(8, CHANNELS, 16)

    def error(dx, reference):
        return (dx.double() - reference).abs().max().item()

    exact = _steps(nn.BatchNorm1d(CHANNELS, dtype=torch.float64), inputs.double(), slopes.double(), 1)
    plain = _steps(nn.BatchNorm1d(CHANNELS), inputs, slopes, 1)

    def fn(rank, world_size):
        return _steps(SyncBatchNorm(CHANNELS), inputs.split(4)[rank], slopes.split(4)[rank], 1)["input gradients"][0]

    reference = exact["input gradients"][0]
    ours = torch.cat(run_ranks(fn, 2))
    assert error(ours, reference) <= 4 * error(plain["input gradients"][0], reference) + 1e-6


@on_ranks(2)
def test_no_values_on_any_rank_leave_the_running_statistics():
    layer = _randomized(SyncBatchNorm(CHANNELS))
    before = copy.deepcopy(layer.state_dict())
    x = torch.empty(0, CHANNELS, 2, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(layer.running_mean, before["running_mean"])
    assert torch.equal(layer.running_var, before["running_var"])
    assert layer.weight.grad.tolist() == [0.0] * CHANNELS
    assert tuple(x.grad.shape) == (0, CHANNELS, 2)


def test_evaluation_uses_running_statistics_and_no_collective(backend):
    def fn(rank, world_size):
        layer = _randomized(SyncBatchNorm(CHANNELS)).eval()
        if rank == 0:  # alone: a collective would wait for the others
            plain = nn.BatchNorm1d(CHANNELS).eval()
            plain.load_state_dict(layer.state_dict())
            x = torch.randn(4, CHANNELS)
            return torch.equal(layer(x), plain(x))
        return None

    assert run_ranks(fn, 2, backend=backend) == [True, None]


def test_an_input_without_gradient_costs_backward_no_collective():
    def fn(rank, world_size):
        layer = SyncBatchNorm(CHANNELS)
        y = layer(torch.randn(4, CHANNELS))
        if rank == 0:
            y.sum().backward()
        return layer.weight.grad is not None

    assert run_ranks(fn, 2) == [True, False]


def test_without_a_process_group_it_is_batchnorm():
    x = torch.randn(6, CHANNELS)
    plain, layer = nn.BatchNorm1d(CHANNELS), SyncBatchNorm(CHANNELS)
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.running_var, plain.running_var)


def test_one_of_several_groups():
    x = torch.randn(4, 2, CHANNELS)

    def fn(rank, world_size):
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        layer = SyncBatchNorm(CHANNELS, process_group=groups[rank // 2])
        layer(x[rank])
        return layer.running_mean

    means = run_ranks(fn, 4)
    for rank, mean in enumerate(means):
        pair = x[:2] if rank < 2 else x[2:]
        torch.testing.assert_close(mean, 0.1 * pair.mean([0, 1]))


def test_one_value_per_channel_on_all_ranks_together_is_refused_everywhere():
    def fn(rank, world_size):
        layer = SyncBatchNorm(CHANNELS)
        with pytest.raises(
            ValueError, match="all ranks together have 1; on this rank the input has the shape"
        ) as caught:
            layer(torch.randn(1 - rank, CHANNELS))
        return str(caught.value)

    assert [text[-6:] for text in run_ranks(fn, 2)] == ["(1, 3)", "(0, 3)"]


@on_ranks(2)
def test_double_backward_is_refused_by_name():
    x = torch.randn(4, CHANNELS, requires_grad=True)
    y = SyncBatchNorm(CHANNELS)(x).square().sum()
    with pytest.raises(RuntimeError, match=r"SyncBatchNorm: backward\(create_graph=True\) is refused"):
        torch.autograd.grad(y, x, create_graph=True)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(CHANNELS), ValueError, "at least 2 dimensions, got 1"),
        (torch.ones(2, 5), ValueError, "has 3 channels, but dimension 1 of the input of shape (2, 5) is 5"),
        (torch.ones(2, CHANNELS, dtype=torch.int64), TypeError, "real floating point input, got torch.int64"),
        (torch.ones(2, CHANNELS, dtype=torch.complex64), TypeError, "real floating point input, got torch.complex64"),
    ],
    ids=str,
)
def test_inputs_of_a_wrong_form_are_refused(x, error, message):
    with pytest.raises(error) as caught:
        SyncBatchNorm(CHANNELS)(x)
    assert message in str(caught.value)


# Conversion


def _model():
    shared = nn.BatchNorm1d(4)
    return nn.Sequential(
        nn.Linear(4, 4), shared, nn.Sequential(nn.ReLU(), nn.BatchNorm2d(2, affine=False)), shared, nn.SyncBatchNorm(5)
    )


def test_conversion_keeps_everything_but_the_class():
    model = _model()
    model[1].weight.requires_grad_(False)
    model[1].eval()
    model[1].double()
    calls = []
    hook = model[1].register_forward_hook(lambda *_: calls.append(1))
    before, parameters = model.state_dict(keep_vars=True), list(model.parameters())

    converted = SyncBatchNorm.convert_sync_batchnorm(model)

    assert converted is model
    assert [type(layer).__name__ for layer in model.modules()].count("SyncBatchNorm") == 3
    assert model[1] is model[3]
    assert not model[1].training
    assert model[4].training
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == {
        name: id(t) for name, t in before.items()
    }
    model[1](torch.ones(2, 4, dtype=torch.float64))
    assert calls == [1]
    hook.remove()
    model[1](torch.ones(2, 4, dtype=torch.float64))
    assert calls == [1]


def test_a_layer_by_itself_and_a_model_without_any():
    layer = nn.BatchNorm1d(3, momentum=None)
    assert isinstance(SyncBatchNorm.convert_sync_batchnorm(layer), SyncBatchNorm)
    assert layer.momentum is None
    linear = nn.Linear(1, 1)
    assert SyncBatchNorm.convert_sync_batchnorm(linear) is linear


@on_ranks(2)
def test_converted_layers_span_the_given_group():
    group = dist.new_group([0, 1])
    assert SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(1), group).process_group is group


def test_converted_models_can_be_copied_saved_and_loaded():
    model = SyncBatchNorm.convert_sync_batchnorm(_model())
    copied = copy.deepcopy(model)
    assert isinstance(copied[1], SyncBatchNorm)
    _model().load_state_dict(model.state_dict())
    model.load_state_dict(_model().state_dict())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert isinstance(torch.load(file, weights_only=False)[1], SyncBatchNorm)


class _WithActivation(nn.BatchNorm2d):
    def forward(self, input):
        return torch.relu(super().forward(input))


def test_a_layer_with_a_forward_of_its_own_is_left_and_named(caplog):
    model = nn.Sequential(nn.BatchNorm2d(3), _WithActivation(3))
    SyncBatchNorm.convert_sync_batchnorm(model)
    assert [type(layer) for layer in model] == [SyncBatchNorm, _WithActivation]
    assert "keeps layer '1': its class _WithActivation overrides forward" in caplog.text


def test_a_lazy_layer_is_refused_until_it_knows_its_shape():
    model = nn.Sequential(nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match="layer '0' has no shape yet: run one forward"):
        SyncBatchNorm.convert_sync_batchnorm(model)
    model(torch.randn(2, 3))
    assert isinstance(SyncBatchNorm.convert_sync_batchnorm(model)[0], SyncBatchNorm)


def test_arguments_are_those_of_torch():
    layer = SyncBatchNorm(3, 1e-3, 0.2, True, False, None, "cpu", torch.float64, bias=False)
    assert (layer.eps, layer.momentum, layer.weight.dtype, layer.bias) == (1e-3, 0.2, torch.float64, None)
    assert layer.running_mean is None
    assert list(SyncBatchNorm(3).state_dict()) == list(nn.SyncBatchNorm(3).state_dict())


# With the wrappers


def _train(model, batches):
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), batches, nn.functional.mse_loss)


def _network():
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.BatchNorm2d(3))


@pytest.mark.slow(but=("phalanx-2-ours", "phalanx-3-torch"))
@pytest.mark.parametrize(
    "wrapper", [DistributedDataParallel, nn.parallel.DistributedDataParallel], ids=["ours", "torch"]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_training_under_ddp_is_that_of_one_process(backend, wrapper, world_size):
    torch.manual_seed(1)
    batches = [(torch.randn(6, 2, 5, 5), torch.randn(6, 3, 3, 3)) for _ in range(3)]
    reference = _network()
    _train(reference, batches)

    def fn(rank, world_size):
        model = SyncBatchNorm.convert_sync_batchnorm(_network())
        part = 6 // world_size
        _train(wrapper(model), [(x.split(part)[rank], y.split(part)[rank]) for x, y in batches])
        return copy_state(model)

    for state in run_ranks(fn, world_size, backend=backend):
        torch.testing.assert_close(state, copy_state(reference), rtol=1e-5, atol=1e-5)


def test_a_rank_that_leaves_is_named():
    def fn(rank, world_size):
        if rank == 0:
            SyncBatchNorm(2)(torch.randn(4, 2))

    with pytest.raises(RankFailed, match="rank 1"):
        run_ranks(fn, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it, and silences it its own way
@on_ranks(2)
def test_a_compiled_model_trains_alike(rank):
    x = torch.randn(2, 6, 3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), SyncBatchNorm(3), nn.ReLU())
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    model(x[rank]).sum().backward()
    compiled(x[rank]).sum().backward()
    assert_equal(copy_gradients(model), copy_gradients(compiled))
    assert_equal(model[1].running_var, compiled._orig_mod[1].running_var)


@pytest.mark.parametrize("use_reentrant", [True, False])
@on_ranks(2)
def test_activation_checkpointing_runs_its_collectives_again(rank, use_reentrant):
    x = torch.randn(2, 6, 3)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), SyncBatchNorm(3), nn.ReLU())
    gradients = []
    for run in (model, lambda inputs: checkpoint(model, inputs, use_reentrant=use_reentrant)):
        model.zero_grad()
        run(x[rank].clone().requires_grad_()).square().sum().backward()
        gradients.append(copy_gradients(model))
    assert_equal(*gradients)


@on_ranks(2)
def test_a_layer_costs_one_collective_forward_and_one_backward(rank, monkeypatch):
    calls = []
    for name in ("all_gather", "all_reduce"):
        real = getattr(dist, name)
        monkeypatch.setattr(
            dist, name, lambda *args, real=real, name=name, **more: calls.append(name) or real(*args, **more)
        )
    model = nn.Sequential(SyncBatchNorm(CHANNELS), nn.Tanh(), SyncBatchNorm(CHANNELS))
    y = model(torch.randn(4 + rank, CHANNELS, 5, requires_grad=True))
    forward, calls[:] = list(calls), []
    y.sum().backward()
    assert (forward, calls) == (["all_gather"] * 2, ["all_reduce"] * 2)


def test_autocast_hands_it_half_types():
    def fn(rank, world_size):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        ddp = DistributedDataParallel(model, sync_batchnorm=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = ddp(torch.randn(4, 3) + rank)
        y.float().square().sum().backward()
        return y.dtype, ddp.module[1].running_var

    (first, mine), (second, other) = run_ranks(fn, 2)
    assert first == second == torch.bfloat16
    assert torch.equal(mine, other)


# Statistics of a batch, and of the batches of all ranks together.


@pytest.mark.parametrize("sizes", [(6,), (4, 2), (1, 1, 4), (3, 0, 2), (0, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_parts_combine_to_the_statistics_of_the_whole(sizes, dtype):
    values = torch.randn(sum(sizes), 3, 2, dtype=dtype)
    statistics = combine(torch.stack([measure(part) for part in values.split(sizes)]))
    variance, mean = torch.var_mean(values, [0, 2], correction=0)
    assert statistics.count == sum(sizes) * 2
    assert statistics.mean.dtype == dtype
    torch.testing.assert_close(statistics.mean, mean)
    torch.testing.assert_close(statistics.variance, variance)
    torch.testing.assert_close(statistics.unbiased_variance, torch.var(values, [0, 2]))


def test_a_mean_far_from_zero_costs_the_variance_no_digits():
    values = torch.randn(64, 2, generator=torch.Generator().manual_seed(1)) + torch.tensor([1e4, 0.0])
    statistics = combine(torch.stack([measure(part) for part in values.split(16)]))
    expected = values.double().var(0, correction=0)  # sums of squares would have no digit of it left
    torch.testing.assert_close(
        statistics.variance.double(), expected, rtol=1e-4, atol=0
    )  # sums of squares would have no digit left


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_are_measured_in_float32(dtype):
    values = (torch.randn(4096, 2) + 3).to(dtype)
    message = measure(values)
    assert message.dtype == torch.float32
    assert message[-1] == 4096  # more than either type can count to
    torch.testing.assert_close(combine(message[None]).mean.double(), values.double().mean(0), rtol=1e-6, atol=0)


def test_no_values_at_all_have_a_count_of_zero():
    statistics = combine(torch.stack([measure(torch.empty(0, 3)), measure(torch.empty(0, 3))]))
    assert statistics.count == 0
    assert statistics.mean.tolist() == [0.0, 0.0, 0.0]


def test_any_memory_format_is_measured_alike():
    values = torch.randn(2, 3, 4, 5)
    for other in (values.to(memory_format=torch.channels_last), values.transpose(2, 3).contiguous().transpose(2, 3)):
        torch.testing.assert_close(measure(other), measure(values))
