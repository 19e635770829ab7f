"""Gradients of weights that are made apart from the backward are those of autograd, and hooks on them are called."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from phalanx._base.partition.layers import list_layers
from phalanx._base.partition.parts import split
from phalanx.pipeline import weight_gradients
from phalanx.pipeline.micro_batch_random import MicroBatchRandom
from phalanx.pipeline.stage import Stage
from phalanx.pipeline.weight_gradients import Weights, saved_bytes


@pytest.fixture(autouse=True)
def _products_of_any_size(monkeypatch):
    monkeypatch.setattr(weight_gradients, "_LEAST_PRODUCT", 0)


class Tied(nn.Module):
    """A weight that is used twice, once as it is and once transposed, and one that is an embedding, too."""

    def __init__(self):
        super().__init__()
        self.embed, self.once = nn.Embedding(7, 6), nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        y = self.embed(x.argmax(-1) % 7) + x
        y = self.once(y).tanh() @ self.weight
        return self.head(functional.linear(y, self.weight).tanh() + self.once(y))


class Product(torch.autograd.Function):
    """A program's own derivative."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Called(nn.Module):
    """A layer whose forward is a function."""

    def __init__(self, layer, forward):
        super().__init__()
        self.layer, self._forward = layer, forward

    def forward(self, x):
        return self._forward(self.layer, x)


def _frozen(layer):
    layer.weight.requires_grad_(False)
    return layer


NONE, SOME, ALL = 0.0, 300.0, float("inf")
ROWS = (5, 3, 6)
IMAGES = (4, 2, 5, 5)
CASES = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)), ROWS, 2),
    "without biases": (lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)), ROWS, 2),
    "normalized": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2)), ROWS, 2),
    "frozen": (lambda: nn.Sequential(nn.Linear(6, 6), _frozen(nn.Linear(6, 6)), nn.Linear(6, 6)), ROWS, 2),
    "tied": (Tied, ROWS, 4),
    "transformer": (lambda: nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True), ROWS, 4),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False, groups=2, stride=2),
            nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 2, 3),
        ),
        IMAGES,
        3,
    ),
    "convolutions in one dimension": (lambda: nn.Sequential(nn.Conv1d(3, 3, 1), nn.Conv1d(3, 3, 3)), ROWS, 2),
    "checkpointed": (
        lambda: nn.Sequential(
            Called(nn.Linear(6, 6), lambda layer, x: checkpoint(layer, x, use_reentrant=False)), nn.Linear(6, 6)
        ),
        ROWS,
        1,
    ),
    "reentrant": (
        lambda: nn.Sequential(
            nn.Linear(6, 6), Called(nn.Linear(6, 6), lambda layer, x: checkpoint(layer, x, use_reentrant=True))
        ),
        ROWS,
        0,
    ),
    "with a function": (
        lambda: nn.Sequential(nn.Linear(6, 6), Called(nn.Linear(6, 6), lambda layer, x: Product.apply(layer(x)))),
        ROWS,
        0,
    ),
    "kept elsewhere": (
        lambda: nn.Sequential(
            nn.Linear(6, 6), Called(nn.Linear(6, 6), lambda layer, x: _kept_elsewhere(layer, x)), nn.Linear(6, 6)
        ),
        ROWS,
        2,
    ),
    "double": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double(), ROWS, 2),
    "embedding": (lambda: Called(nn.Embedding(9, 4), lambda layer, x: layer(x.abs().long() % 9)), ROWS, 0),
}  # fmt: skip


def _kept_elsewhere(layer, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return layer(x)


def _train(model, inputs, backward):
    """Gradients of the inputs and parameters after all micro-batches."""
    grads = []
    for number, x in enumerate(inputs):
        torch.manual_seed(number)
        x = x.clone().requires_grad_()
        loss = model(x).square().mean()
        backward(loss)
        grads.append(x.grad)
    return grads, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("room", [NONE, SOME, ALL])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_autograd(case, room):
    build, shape, products = CASES[case]
    torch.manual_seed(1)
    model = build()
    dtype = next(model.parameters()).dtype
    inputs = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    apart, weights, counts = copy.deepcopy(model), Weights(), []

    def backward(loss):
        found = weights.find([loss], room)
        counts.append(0 if found is None else len(found._products))
        if found is None:
            loss.backward()
            return
        found.backward([loss], [None])
        found.run()

    expected = _train(model, inputs, torch.Tensor.backward)
    torch.testing.assert_close(_train(apart, inputs, backward), expected)
    if "convolutions" not in case or room != SOME:
        assert counts == [products if "convolutions" not in case or room == ALL else 0] * 3


def test_a_stage_without_gradients_to_send_finds_its_first_weight_too():
    """The graph leads to nothing but the weight: nobody would come to its product but for its bias."""
    for bias in (True, False):
        model = nn.Sequential(nn.Linear(6, 6, bias=bias), nn.ReLU(), nn.Linear(6, 6, bias=bias))
        other, x = copy.deepcopy(model), torch.randn(4, 6)
        loss = model(x).square().sum()
        found = Weights().find([loss], NONE)
        assert len(found._products) == (2 if bias else 1)
        found.backward([loss], [None])
        other(x).square().sum().backward()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_hooks_of_parameters_and_values_are_called_as_often_as_by_autograd():
    seen = []
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].weight.register_hook(lambda grad: grad * 3)
    model[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    between = []

    def watch(layer, args, output):
        output.register_hook(lambda grad: between.append(grad))

    model[2].register_forward_hook(watch)
    x = torch.randn(4, 6, requires_grad=True)
    loss = model(x).sum()
    found = Weights().find([loss], ALL)
    assert [product.weight for _, product in found._products] == [model[3].weight, model[2].weight]
    found.backward([loss], [None])
    found.run()
    mine = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(mine, [p.grad for p in model.parameters()])
    torch.testing.assert_close(seen[0], seen[1])
    assert len(seen) == len(between) == 2


def test_what_comes_before_is_added_to_in_place_and_what_is_no_tensor_of_its_own_is_left_to_autograd():
    layer, x = nn.Linear(6, 6), torch.randn(4, 6, requires_grad=True)
    layer.weight.grad = before = torch.ones(6, 6)
    loss = layer(x).sum()
    found = Weights().find([loss], NONE)
    found.backward([loss], [None])
    assert layer.weight.grad is before
    torch.testing.assert_close(before, 1 + x.detach().sum(0).expand(6, 6))
    layer.weight.grad = torch.ones(6, 6).requires_grad_()
    assert Weights().find([layer(x).sum()], NONE) is None


def test_those_of_the_first_layers_are_left_for_later_as_far_as_there_is_room():
    """What they are made of is kept; when the backward comes to them, it has let go of the rest."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4))
    y = model(torch.randn(16, 6, requires_grad=True))
    assert saved_bytes([y]) == 16 * (6 + 8 + 4) * 4
    largest, first, second = 8 * 6 * 4, 16 * (6 + 8) * 4, 16 * (8 + 4) * 4
    for room, later in ((0, 0), (first - largest, 1), (first + second - largest, 2), (ALL, 3)):
        found = Weights().find([y], room)
        assert {product.weight: not product.at_once for _, product in found._products} == {
            model[at].weight: number < later for number, at in enumerate((0, 2, 4))
        }
    found = Weights().find([y], first - largest)
    found.backward([y], [torch.ones_like(y)])
    before = {at: model[at].weight.grad is None for at in (0, 2, 4)}
    found.run()
    assert before == {0: True, 2: False, 4: False}
    assert model[0].weight.grad is not None


def test_nothing_of_a_micro_batch_outlives_it():
    """Nodes of the graph that are remembered would keep what they saved."""
    import gc
    import weakref

    weights, model = Weights(), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    x = torch.randn(4, 6, requires_grad=True)
    dying = weakref.ref(x)
    loss = (model(x) @ x.t()).sum()
    found = weights.find([loss], NONE)
    found.backward([loss], [None])
    found.run()
    del x, loss, found
    gc.collect()
    assert dying() is None


@pytest.mark.parametrize("room", [NONE, ALL])
def test_a_layer_kept_out_of_autocast_gets_a_gradient_of_its_own_dtype(room):
    """The product was made under the loop's autocast, in bfloat16, which is no gradient of a float32 weight."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    torch.manual_seed(1)
    other, x = copy.deepcopy(model), torch.randn(4, 6)

    def loss_of(layers):
        with torch.autocast("cpu", enabled=False):
            return layers(x.clone().requires_grad_()).square().sum()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            loss = loss_of(model)
            found = Weights().find([loss], room)
            assert len(found._products) == 2
            found.backward([loss], [None])
            found.run()
            loss_of(other).backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0.05, atol=0.1)  # autograd makes them in bfloat16


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize("which", ["weight", "bias"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, None])
def test_gradients_of_another_dtype_than_their_parameter_are_left_to_autograd(which, grad_dtype):
    """Sums kept in float32 of a bfloat16 parameter: the product was added to them, or took their place."""
    for layer, shape in ((nn.Linear(6, 6), (4, 6)), (nn.Conv1d(3, 3, 1), (4, 3, 6))):
        if which == "bias" and type(layer) is nn.Linear:
            continue
        layer.bfloat16()
        parameter = getattr(layer, which)
        parameter.grad_dtype = grad_dtype
        if grad_dtype is None:
            parameter.grad = torch.ones(parameter.shape)
        x = torch.randn(shape, dtype=torch.bfloat16, requires_grad=True)
        assert Weights().find([layer(x).sum()], ALL) is None


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        transposed = self.weight.t()
        return x @ transposed, transposed


def test_a_transpose_with_other_uses_brings_the_weight_their_gradient_too():
    """It was taken for one that the product alone uses, and what came from the next stage was lost."""
    model = Transposed()
    other, x = copy.deepcopy(model), torch.randn(4, 6, requires_grad=True)
    roots, grads = model(x), [torch.randn(4, 6), torch.randn(6, 6)]
    found = Weights().find(roots, ALL)
    if found is None:
        torch.autograd.backward(roots, grads)
    else:
        found.backward(list(roots), list(grads))
        found.run()
    torch.autograd.backward(other(x), grads)
    torch.testing.assert_close(model.weight.grad, other.weight.grad)


def test_a_convolution_of_no_samples_is_left_to_autograd():
    x = torch.randn(0, 2, 5, 5, requires_grad=True)
    assert Weights().find([nn.Conv2d(2, 4, 3)(x).sum()], ALL) is None


def test_convolutions_are_left_for_later_in_the_last_backward_of_a_stage_alone():
    """In 1F1B each was made by two calls, with what is laid out anew for both: 0.3 ms of 5.6 in each micro-batch.

    The stage before has work meanwhile, and waits for the last of them alone.
    """
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(50, 6))
    other, layers = copy.deepcopy(model), list_layers(model)
    (part,) = split(layers, [3])
    stage = Stage(part, True, model, layers.output, MicroBatchRandom(torch.device("cpu")), list(model.parameters()))
    stage.begin(1)
    (node,) = layers.inputs
    for micro_batch, is_last, left in ((0, False, 1), (1, False, 1), (2, True, 2)):
        x = torch.randn(IMAGES, requires_grad=True)
        stage.forward(
            micro_batch, {node: x}, {0: [x]}, training=True, in_training=True, recompute=False,
            finish=lambda results: next(iter(results.values())).sum(),
        )  # fmt: skip
        stage.prepare_backward(micro_batch, is_last=is_last)
        assert len(stage.in_flight[micro_batch].weights._products) == left
        stage.backward(micro_batch, {})
        stage.backward_weights(micro_batch)
        other(x.detach().requires_grad_()).sum().backward()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
