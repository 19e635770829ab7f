"""An optimizer that a strategy makes again has all that the first one had, or is refused with the reason."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import assert_equal
from tests.on_ranks import on_ranks
from torch import nn
from torch.nn import functional as F

from phalanx import strategies
from phalanx.strategies.recipe import Recipe
from phalanx.testing import run_ranks

WORDS = [("mirrored", {}), ("sharded", {}), ("sharded", {"shard": "model"}), ("pipeline", {"micro_batches": 2})]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))


class Schedule:
    """A setting that is an object, and has no way to be compared."""

    def __init__(self, factor):
        self.factors = [factor]


class Scaled(torch.optim.SGD):
    """An SGD of which two settings are in no group: a number, and one in an object."""

    def __init__(self, params, lr=0.1, momentum=0.0, scale=1.0, factor=1.0):
        super().__init__(params, lr=lr, momentum=momentum)
        self.scale, self.schedule, self.apply = scale, Schedule(factor), lambda x: x * scale

    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad.mul_(self.scale * self.schedule.factors[0])
        return super().step(closure)


class Passing(torch.optim.AdamW):
    """A class that hands its options to the class above."""

    def __init__(self, params, label="", **options):
        super().__init__(params, **options)
        self.label = label


class Asking(torch.optim.SGD):
    """A class with an argument that has no default."""

    def __init__(self, params, strength):
        super().__init__(params, lr=0.1)
        self.strength = strength


class Doubled(torch.optim.SGD):
    """A class that takes another rate than the one that it is given."""

    def __init__(self, params, lr, doubles=False):
        super().__init__(params, lr=2 * lr if doubles else lr)


def make_scaled(parameters):
    return Scaled(parameters, momentum=0.9, scale=0.25, factor=0.5)


def make_in_groups(parameters):
    """Group by shape, which works over parameters and not over groups."""
    first, second = [], []
    for one in parameters:
        (first if one.dim() > 1 else second).append(one)
    return torch.optim.AdamW([{"params": first}, {"params": second, "lr": 0.05}], lr=0.01)


def make_data(count):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 4, generator=generator), torch.randn(count, 1, generator=generator)


def train(strategy, optimizer_of, steps=3):
    """Return the losses of the global batches of 8, and how often a hook of the optimizer was called."""
    calls = []
    model = make_model()
    optimizer = optimizer_of(model)
    if isinstance(optimizer, torch.optim.Optimizer):
        before = optimizer.register_step_pre_hook(lambda optimizer, *_: calls.append(len(optimizer.param_groups)))
        removed = optimizer.register_step_post_hook(lambda *_: calls.append("removed"))
    strategy.setup(model, optimizer, F.mse_loss)
    if isinstance(optimizer, torch.optim.Optimizer):
        removed.remove()
    inputs, targets = make_data(8 * steps)
    losses, replicas = [], strategy.num_replicas_in_sync
    for x, y in zip(inputs.split(8), targets.split(8), strict=True):
        mine = slice(strategy.replica_id_in_sync_group, None, replicas)
        losses.append(strategy.reduce("mean", strategy.step(x[mine], y[mine])).item())
    if isinstance(optimizer, torch.optim.Optimizer):
        before.remove()
        strategy.update()
    strategy.close()
    return torch.tensor(losses), calls


def functions():
    return {
        "settings of its own": lambda _: make_scaled,
        "groups by shape": lambda _: make_in_groups,
        "a partial": lambda _: functools.partial(Asking, strength=3),
        "an object": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "an object that passes options on": lambda model: Passing(model.parameters(), lr=0.03, betas=(0.5, 0.6)),
    }


@pytest.mark.slow
def test_settings_outside_of_groups_and_hooks_are_kept_under_every_strategy():
    """The optimizer was made again of its class and its `defaults`: another scale became 1, and hooks were lost."""

    def run(rank, world_size):
        pairs = itertools.product(WORDS, functions().items())
        return {f"{word}: {what}": train(strategies.get(word[0], **word[1]), of) for word, (what, of) in pairs}

    alone = {what: train(strategies.SingleDeviceStrategy("cpu"), of) for what, of in functions().items()}
    for seen in run_ranks(run, 2):
        assert len(seen) == len(WORDS) * len(alone)
        for name, (losses, calls) in seen.items():
            expected, its_calls = alone[name.split(": ", 2)[-1]]
            torch.testing.assert_close(losses, expected, msg=f"{name}: {losses}, alone {expected}")
            assert calls == its_calls, name


@pytest.mark.parametrize("optimizer_of", functions().values(), ids=functions())
def test_an_optimizer_over_others_has_the_settings_of_the_first(optimizer_of):
    model, other = make_model(), make_model()
    given = optimizer_of(model)
    first = given if isinstance(given, torch.optim.Optimizer) else given(model.parameters())
    again = Recipe.of("Test", model, given).make(dict(other.named_parameters()))
    assert isinstance(again, type(first))
    assert again.defaults == first.defaults
    for one, optimizer in ((model, first), (other, again)):
        one(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert_equal(list(other.parameters()), list(model.parameters()))


@pytest.mark.parametrize(
    ("optimizer_of", "words"),
    [
        (lambda p: Scaled(p, scale=0.25), "the Scaled would lose its 'scale', which is not an option of its groups"),
        (lambda p: Scaled(p, factor=0.5), r"the Scaled would lose its 'schedule.factors\[0\]'"),
        (
            lambda p: Passing(p, "mine"),
            r"would lose its 'label'.*a function that creates it instead.*functools.partial\(Passing, ...\)",
        ),
        (lambda p: Asking(p, strength=1), "would lose an argument that its class requires .TypeError.*'strength'"),
        (lambda p: Doubled(p, lr=0.1, doubles=True), None),
    ],
)
def test_an_object_that_would_lose_a_setting_is_refused_by_its_name(optimizer_of, words):
    model = make_model()
    if words is None:  # what its constructor has made of its arguments is all in its groups
        Recipe.of("Test", model, optimizer_of(model.parameters()))
        return
    with pytest.raises(ValueError, match=words):
        Recipe.of("Test", model, optimizer_of(model.parameters()))


def test_settings_that_are_made_anew_but_alike_are_no_loss():
    model = make_model()
    assert Recipe.of("Test", model, Scaled(model.parameters(), momentum=0.9)).kind is Scaled


def test_a_function_that_cannot_be_called_over_groups_is_refused_with_what_it_was_given():
    model = make_model()

    def group_by_shape(parameters):
        return Scaled([one for one in parameters if one.dim() > 1], scale=0.25)

    with pytest.raises(ValueError, match=r"failed \(AttributeError.*let it pass its argument to the optimizer"):
        Recipe.of("Test", model, group_by_shape)
    with pytest.raises(ValueError, match="made one over other parameters"):
        Recipe.of("Test", model, lambda _: Scaled(model.parameters(), scale=0.25))


class Weighed(nn.Module):
    """A loss that learns a weight of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, output, target):
        return F.mse_loss(output, target) * torch.exp(-self.weight) + self.weight


@on_ranks(2)
def test_parameters_of_the_loss_are_refused_where_nothing_would_average_them():
    """Under `mirrored` and the strategies with rounds each rank trained a loss' parameters alone, without a word."""
    words = [*WORDS, ("multi_worker_mirrored", {}), ("local_sgd", {"sync_every": 2}), ("diloco", {})]
    for word, options in words:
        for is_function in (False, True):
            model, loss = make_model(), Weighed()

            def optimizer_of(parameters, loss=loss):
                return torch.optim.SGD([*parameters, *loss.parameters()], lr=0.1)

            strategy = strategies.get(word, **options)
            optimizer = optimizer_of if is_function else optimizer_of(model.parameters())
            with pytest.raises(ValueError, match=r"shape \(\) that is not a parameter of Sequential.*a loss function"):
                strategy.setup(model, optimizer, loss)
            dist.barrier()


class WithLoss(nn.Module):
    """It is what the refusal advises: it has the loss as a module, and computes it."""

    def __init__(self):
        super().__init__()
        self.net, self.loss = make_model(), Weighed()

    def forward(self, x, y):
        return self.loss(self.net(x), y)


def test_a_loss_inside_of_the_model_trains_as_in_one_process():
    def train_inside(strategy):
        model = WithLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy.setup(model, optimizer, loss_of=lambda model, batch: model(*batch))
        mine = slice(strategy.replica_id_in_sync_group, None, strategy.num_replicas_in_sync)
        for x, y in zip(*(one.split(8) for one in make_data(24)), strict=True):
            strategy.step(x[mine], y[mine])
        return {name: one.detach().clone() for name, one in strategy.bare_model.named_parameters()}

    alone = train_inside(strategies.SingleDeviceStrategy("cpu"))
    for seen in run_ranks(lambda rank, world_size: train_inside(strategies.MirroredStrategy()), 2):
        torch.testing.assert_close(seen, alone)
