"""Trainings drawn by a seed, for every optimizer of torch.optim: later groups, schedulers, closures, clipping.

`play` makes the same calls whatever wraps the optimizer, so that a wrapper can be compared with the plain class.
"""

import inspect
import itertools
import random
import warnings

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LinearLR, StepLR

OPTIMIZERS = [
    one
    for one in vars(torch.optim).values()
    if isinstance(one, type) and issubclass(one, torch.optim.Optimizer) and one is not torch.optim.Optimizer
]
_CHOICES = {
    "weight_decay": [0.0, 0.01],
    "momentum": [0.0, 0.9],
    "nesterov": [False],
    "amsgrad": [False, True],
    "maximize": [False, True],
    "centered": [False, True],
    "foreach": [None, False, True],
    "dampening": [0.0, 0.1],
    "initial_accumulator_value": [0.0, 0.1],
    "decoupled_weight_decay": [False, True],
}


def _cycles(optimizer):
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


_SCHEDULERS = [
    lambda optimizer: StepLR(optimizer, 2, 0.3),
    lambda optimizer: ExponentialLR(optimizer, 0.7),
    lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    lambda optimizer: LinearLR(optimizer, 0.1, total_iters=3),
    lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.05, 50, cycle_momentum=_cycles(optimizer)),
    lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.001, 0.1, 2, cycle_momentum=_cycles(optimizer)),
    lambda optimizer: lr_scheduler.ChainedScheduler([LinearLR(optimizer, 0.3), ExponentialLR(optimizer, 0.8)]),
    lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer, 0.1), ExponentialLR(optimizer, 0.7)], [2]
    ),
]


class Matrices(nn.Module):
    """Matrices alone, which every optimizer takes, with gradients of rows for an optimizer of sparse ones."""

    def __init__(self, draw, *, sparse):
        super().__init__()
        widths = [draw.randint(1, 7) for _ in range(draw.randint(3, 5))]
        self.sparse = sparse
        self.weights = nn.ParameterList(torch.randn(rows, columns) for rows, columns in itertools.pairwise(widths))

    def loss(self, draw):
        """Of a batch that is drawn."""
        total = torch.zeros(())
        for weight in self.weights:
            if weight.requires_grad and draw.random() < 0.9:
                rows = torch.tensor([draw.randrange(len(weight)) for _ in range(3)])
                taken = nn.functional.embedding(rows, weight, sparse=self.sparse)
                target = torch.tensor([draw.gauss(0, 1) for _ in range(weight.shape[1])])
                total = total + (taken - target).square().sum() + taken.sum().tanh()
        return total


def clip(optimizer, limit):
    """As a loop does it before the step."""
    clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], limit)


def groups_of(optimizer):
    """Its groups, to make another one over the same parameters."""
    return [{"params": group["params"]} for group in optimizer.param_groups]


def reload_plain(optimizer, options):
    """What a job does that ends and begins again."""
    again = type(optimizer)(groups_of(optimizer), **options)
    again.load_state_dict(optimizer.state_dict())
    return again


def find_difference(found, expected, equal=torch.equal):
    """The first one between what two `play`s have seen, in words, or None."""
    for step, ((parameters, options), (right, its_options)) in enumerate(zip(found, expected, strict=True)):
        if options != its_options:
            return f"step {step}: {options} in place of {its_options}"
        for number, (one, other) in enumerate(zip(parameters, right, strict=True)):
            if not equal(one, other):
                return f"step {step}, parameter {number}: {one} in place of {other}"
    return None


class Training:
    """One training of `optimizer_class`; `words` of the seed that are the same draw the same.

    `sparse`: with gradients of rows.
    """

    def __init__(self, optimizer_class, seed, *, sparse=None):
        self.optimizer_class = optimizer_class
        self._word = f"{optimizer_class.__name__} {seed}"
        self._is_sparse = optimizer_class is torch.optim.SparseAdam if sparse is None else sparse

    def _draw(self, word):
        return random.Random(f"{self._word} {word}")

    def model(self):
        """The same one each time."""
        torch.manual_seed(self._draw("values").randrange(1 << 30))
        return Matrices(self._draw("model"), sparse=self._is_sparse)

    def options(self, word):
        """Of the constructor, some of them."""
        draw = self._draw(word)
        known = inspect.signature(self.optimizer_class).parameters
        options = {"lr": draw.choice([0.001, 0.01, 0.1])}
        options |= {
            name: draw.choice(values) for name, values in _CHOICES.items() if name in known and draw.random() < 0.5
        }
        if self._is_sparse:
            options.pop("weight_decay", None)  # which touches all rows
        return options

    def play(self, model, make, *, reload=None, num_steps=8, parts=(0,), clip=clip, before_step=lambda step: None):
        """Train with `make(groups, **options)`; returns the parameters and the groups' options after each step.

        `reload(optimizer, options)` is what a job does that ends and begins again, and returns its optimizer.
        `parts`: whose batches are computed here; of several it is the mean of their gradients.
        """
        draw = self._draw("play")
        left = list(model.weights)
        groups = [{"params": [left.pop(0)], **self._of_group(f"group {n}")} for n in range(draw.randint(1, 2))]
        options = self.options("defaults")
        optimizer = make(groups, **options)
        scheduler = draw.choice([None, *_SCHEDULERS])
        scheduler = scheduler and scheduler(optimizer)
        frozen = groups[0]["params"][0] if draw.random() < 0.3 else None
        seen = []
        for step in range(num_steps):
            if frozen is not None:
                frozen.requires_grad_(step >= num_steps // 2)  # gradual unfreezing
            before_step(step)

            def compute(step=step, optimizer=optimizer):
                optimizer.zero_grad()
                return self._compute_mean(model, [f"batch {step} {part}" for part in parts])

            limit = draw.choice([0.1, 1.0]) if not self._is_sparse and draw.random() < 0.3 else None
            if limit is None and draw.random() < 0.4:
                loss = optimizer.step(compute)
                assert loss is not None
            else:
                compute()
                if limit is not None:
                    clip(optimizer, limit)
                optimizer.step()
            seen.append(self._look(model, optimizer))
            happening = draw.random()
            if happening < 0.3 and left:
                self._set(optimizer, draw)
                optimizer.add_param_group({"params": [left.pop(0)], **self._of_group(f"later {step}")})
                scheduler = None  # torch's know nothing of a group that comes later
            elif happening < 0.5:
                self._set(optimizer, draw)
            elif happening < 0.6 and reload is not None:
                optimizer, scheduler = reload(optimizer, options), None
            if scheduler is not None and draw.random() < 0.7:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of an order of calls that is meant
                    scheduler.step()
        return seen

    def _compute_mean(self, model, batches):
        """Leave the mean gradient of these batches, added in their order, where one that is missing counts as zeros."""
        found, total = [[] for _ in model.weights], torch.zeros(())
        for batch in batches:
            loss = model.loss(self._draw(batch))
            total = total + loss
            if loss.requires_grad:
                loss.backward()
            for grads, weight in zip(found, model.weights, strict=True):
                grads += [] if weight.grad is None else [weight.grad]
                weight.grad = None
        for grads, weight in zip(found, model.weights, strict=True):
            if grads and self._is_sparse:  # SGD would add the rows of one that is not coalesced one by one
                each = [grad.coalesce() for grad in grads]
                ids, values = torch.cat([one.indices() for one in each], 1), torch.cat([one.values() for one in each])
                grads[:] = [torch.sparse_coo_tensor(ids, values, weight.shape, check_invariants=False).coalesce()]
            if grads:
                weight.grad = sum(grads[1:], grads[0]) / len(batches) if len(batches) > 1 else grads[0]
        return total

    def _of_group(self, word):
        draw = self._draw(word)
        return {"lr": draw.choice([0.002, 0.02, 0.2])} if draw.random() < 0.5 else {}

    @staticmethod
    def _set(optimizer, draw):
        """As a scheduler by hand does it."""
        group = draw.choice(optimizer.param_groups)
        group["lr"] = draw.choice([0.003, 0.03, 0.3])

    @staticmethod
    def _look(model, optimizer):
        options = [
            {key: value for key, value in group.items() if key not in ("params", "foreach", "fused", "differentiable")}
            for group in optimizer.param_groups
        ]
        return [weight.detach().clone() for weight in model.weights], options
