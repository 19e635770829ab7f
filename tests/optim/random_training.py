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


SCHEDULERS = [
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
        self.is_sparse = optimizer_class is torch.optim.SparseAdam if sparse is None else sparse

    def draw(self, word):
        return random.Random(f"{self._word} {word}")

    def model(self):
        """The same one each time."""
        torch.manual_seed(self.draw("values").randrange(1 << 30))
        return Matrices(self.draw("model"), sparse=self.is_sparse)

    def options(self, word):
        """Of the constructor, some of them."""
        draw = self.draw(word)
        known = inspect.signature(self.optimizer_class).parameters
        options = {"lr": draw.choice([0.001, 0.01, 0.1])}
        options |= {
            name: draw.choice(values) for name, values in _CHOICES.items() if name in known and draw.random() < 0.5
        }
        if self.optimizer_class is torch.optim.LBFGS:
            options["max_iter"] = 2  # more would make much of the last bits, by which nothing can be compared
        if self.is_sparse:
            options.pop("weight_decay", None)  # which touches all rows
        return options

    def play(self, model, make, *, num_steps=8, parts=(0,), before_step=lambda step: None, **calls):
        """Train with `make(groups, **options)`; returns the parameters and the groups' options after each step.

        `parts`: whose batches are computed here; of several it is the mean of their gradients. `calls`: as of `Play`.
        """
        play = Play(self, model, make, unfreezes_at=num_steps // 2, **calls)
        seen = []
        for step in range(num_steps):
            before_step(step)
            seen.append(play.step(step, parts))
        return seen

    def compute_mean(self, model, batches):
        """Leave the mean gradient of these batches, added in their order, where one that is missing counts as zeros."""
        found, total = [[] for _ in model.weights], torch.zeros(())
        for batch in batches:
            loss = model.loss(self.draw(batch))
            total = total + loss
            if loss.requires_grad:
                loss.backward()
            for grads, weight in zip(found, model.weights, strict=True):
                grads += [] if weight.grad is None else [weight.grad]
                weight.grad = None
        for grads, weight in zip(found, model.weights, strict=True):
            if grads and self.is_sparse:  # SGD would add the rows of one that is not coalesced one by one
                each = [grad.coalesce() for grad in grads]
                ids, values = torch.cat([one.indices() for one in each], 1), torch.cat([one.values() for one in each])
                grads[:] = [torch.sparse_coo_tensor(ids, values, weight.shape, check_invariants=False).coalesce()]
            if grads:
                weight.grad = sum(grads[1:], grads[0]) / len(batches) if len(batches) > 1 else grads[0]
        return total

    def group_options(self, word):
        draw = self.draw(word)
        return {"lr": draw.choice([0.002, 0.02, 0.2])} if draw.random() < 0.5 else {}


class Play:
    """The loop of one training: its optimizer, its scheduler, and the groups that are still to come.

    `clip(optimizer, limit)`: what the loop does before a step that it clips.
    `reload(optimizer, options)`: what a job does that ends and begins again; returns its optimizer.
    `unfreezes_at`: the step at which a parameter is unfrozen, in some trainings; None freezes none.
    """

    def __init__(self, training, model, make, *, clip=clip, reload=None, unfreezes_at=None):
        self._training, self._model, self._clip, self._reload = training, model, clip, reload
        self._draw = draw = training.draw("play")
        self._needs_closure = training.optimizer_class is torch.optim.LBFGS
        self._left = list(model.weights)
        if self._needs_closure:  # it has one group, and options of all
            groups, self._left = [{"params": self._left}], []
        else:
            groups = [
                {"params": [self._left.pop(0)], **training.group_options(f"group {n}")}
                for n in range(draw.randint(1, 2))
            ]
        self._options = training.options("defaults")
        self.optimizer = make(groups, **self._options)
        scheduler = draw.choice([None, *SCHEDULERS])
        self._scheduler = scheduler and scheduler(self.optimizer)
        self._unfreezes_at = unfreezes_at
        self._frozen = groups[0]["params"][0] if draw.random() < 0.3 and unfreezes_at is not None else None

    def step(self, step, parts=(0,)):
        """One step, and what happens behind it; returns the parameters and the groups' options between the two."""
        draw, optimizer = self._draw, self.optimizer
        if self._frozen is not None:
            self._frozen.requires_grad_(step >= self._unfreezes_at)  # gradual unfreezing

        def compute():
            optimizer.zero_grad()
            return self._training.compute_mean(self._model, [f"batch {step} {part}" for part in parts])

        can_clip = not self._training.is_sparse and not self._needs_closure
        limit = draw.choice([0.1, 1.0]) if can_clip and draw.random() < 0.3 else None
        if self._needs_closure or (limit is None and draw.random() < 0.4):
            assert optimizer.step(compute) is not None
        else:
            compute()
            if limit is not None:
                self._clip(optimizer, limit)
            optimizer.step()
        seen = _look(self._model, optimizer)
        happening = draw.random()
        if happening < 0.3 and self._left:
            _set_lr(optimizer, draw)
            optimizer.add_param_group({"params": [self._left.pop(0)], **self._training.group_options(f"later {step}")})
            self._scheduler = None  # torch's know nothing of a group that comes later
        elif happening < 0.5:
            _set_lr(optimizer, draw)
        elif happening < 0.6 and self._reload is not None:
            self.optimizer, self._scheduler = self._reload(optimizer, self._options), None
        if self._scheduler is not None and draw.random() < 0.7:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of an order of calls that is meant
                self._scheduler.step()
        return seen


def _set_lr(optimizer, draw):
    """As a scheduler by hand does it."""
    group = draw.choice(optimizer.param_groups)
    group["lr"] = draw.choice([0.003, 0.03, 0.3])


def _look(model, optimizer):
    options = [
        {key: value for key, value in group.items() if key not in ("params", "foreach", "fused", "differentiable")}
        for group in optimizer.param_groups
    ]
    return [weight.detach().clone() for weight in model.weights], options
