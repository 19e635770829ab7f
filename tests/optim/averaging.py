"""Local SGD and DiLoCo of k replicas in one process, as in the papers.

`task`: what is trained, with `model()`, `inner_of`, `outer_of` and `train_step`: a Task of test_generated_averaging.py.
"""

import torch
from tests.optim.replicas import floats

import phalanx

KINDS = {
    "local": lambda model, inner, outer, **options: phalanx.LocalSGD(model, inner, **options),
    "diloco": phalanx.DiLoCo,
}


class Simulated:
    """Replicas, each after so many of its own steps."""

    def __init__(self, steps_of, task):
        self.steps_of, self.done = steps_of, [0] * len(steps_of)
        self.models = [task.model() for _ in steps_of]
        self.optimizers = [task.inner_of(model) for model in self.models]
        self.task = task

    def advance(self, to):
        for rank, model in enumerate(self.models):
            while self.done[rank] < min(to, self.steps_of[rank]):
                with torch.enable_grad():
                    self.task.train_step(model, self.optimizers[rank], rank, self.done[rank])
                self.done[rank] += 1

    def rounds(self, sync_every):
        """At each round, the ranks that have stepped since the one before."""
        for begin in range(0, max(self.steps_of), sync_every):
            self.advance(begin + sync_every)
            yield [rank for rank, steps in enumerate(self.steps_of) if steps > begin]


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def buffers(model):
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def set_mean_buffers(models, counting):
    means = [torch.stack(each).mean(0) for each in zip(*(buffers(models[rank]) for rank in counting), strict=True)]
    for model in models:
        for buffer, mean in zip(buffers(model), means, strict=True):
            buffer.copy_(mean)


def set_values(model, values):
    for mine, value in zip(trained(model) + buffers(model), values, strict=True):
        mine.copy_(value)


@torch.no_grad()
def simulate_local(steps_of, sync_every, task):
    """Stich (2019): x_i <- mean of x_j."""
    all_of = Simulated(steps_of, task)
    for counting in all_of.rounds(sync_every):
        means = [torch.stack(each).mean(0) for each in zip(*(floats(all_of.models[r]) for r in counting), strict=True)]
        for model in all_of.models:
            set_values(model, means)
    return floats(all_of.models[0])


@torch.no_grad()
def simulate_diloco(steps_of, sync_every, task):
    """Algorithm 1 of Douillard et al. (2023)."""
    all_of = Simulated(steps_of, task)
    anchor = task.model()
    outer = task.outer_of(anchor)
    for counting in all_of.rounds(sync_every):
        for index, t in enumerate(trained(anchor)):
            t.grad = torch.stack([t - trained(all_of.models[rank])[index] for rank in counting]).mean(0)
        outer.step()
        set_mean_buffers(all_of.models, counting)
        for model in all_of.models:
            set_values(model, trained(anchor) + buffers(all_of.models[0]))
    return floats(all_of.models[0])
