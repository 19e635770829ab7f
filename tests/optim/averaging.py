"""Local SGD, DiLoCo, elastic averaging, gossip and streaming DiLoCo of k replicas in one process, as in the papers.

`task`: what is trained; it has `model()`, `inner_of`, `outer_of` and `train_step`, as tests.optim.replicas does.
"""

import itertools

import torch
from tests.optim import replicas
from tests.optim.replicas import floats


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
def simulate_local(steps_of, sync_every, task=replicas):
    """Stich (2019): x_i <- mean of x_j."""
    all_of = Simulated(steps_of, task)
    for counting in all_of.rounds(sync_every):
        means = [torch.stack(each).mean(0) for each in zip(*(floats(all_of.models[r]) for r in counting), strict=True)]
        for model in all_of.models:
            set_values(model, means)
    return floats(all_of.models[0])


@torch.no_grad()
def simulate_diloco(steps_of, sync_every, task=replicas):
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


@torch.no_grad()
def simulate_easgd(steps_of, sync_every, beta, task=replicas):
    """The center, and the buffers; equations 2.3 and 2.4 of Zhang et al. (2015) without their gradient terms."""
    all_of = Simulated(steps_of, task)
    center = [p.detach().clone() for p in trained(task.model())]
    alpha = beta / len(steps_of)
    for counting in all_of.rounds(sync_every):
        before = [p.clone() for p in center]
        for rank in counting:
            for x, c, old in zip(trained(all_of.models[rank]), center, before, strict=True):
                c += alpha * (x - old)
                x -= alpha * (x - old)
        set_mean_buffers(all_of.models, counting)
    return center + buffers(all_of.models[0])


@torch.no_grad()
def simulate_gossip(steps_of, sync_every, plan, task=replicas):
    all_of = Simulated(steps_of, task)
    for number, counting in enumerate(all_of.rounds(sync_every)):
        for group in plan.round(number).groups:
            voices = [rank for rank in group if rank in counting] or group
            means = [
                torch.stack(each).mean(0) for each in zip(*(floats(all_of.models[r]) for r in voices), strict=True)
            ]
            for rank in group:
                set_values(all_of.models[rank], means)
    return [torch.stack(each).mean(0) for each in zip(*map(floats, all_of.models), strict=True)]


@torch.no_grad()
def simulate_streaming(steps_of, sync_every, fragments, delay, mix, task=replicas):
    """Algorithm 2 of Douillard et al. (2025), fragment by fragment."""
    all_of = Simulated(steps_of, task)
    anchor = task.model()
    outer = task.outer_of(anchor)
    window = sync_every // len(fragments)
    given_at = [[0] * len(fragments) for _ in steps_of]
    num_last = 0
    for number in itertools.count():
        fragment = number % len(fragments)
        begins = (number + 1) * window
        all_of.advance(begins)
        counting = [rank for rank, done in enumerate(all_of.done) if done > given_at[rank][fragment]]
        for rank, done in enumerate(all_of.done):
            given_at[rank][fragment] = done
        outer.zero_grad()
        for index in fragments[fragment] if counting else ():
            t = trained(anchor)[index]
            t.grad = torch.stack([t - trained(all_of.models[rank])[index] for rank in counting]).mean(0)
        given = [[b.clone() for b in buffers(model)] for model in all_of.models]
        if counting:
            outer.step()
        are_finished = all(steps < begins for steps in steps_of)
        all_of.advance(begins + delay)
        for model in all_of.models:
            for index in fragments[fragment] if counting or are_finished else ():
                x, t = trained(model)[index], trained(anchor)[index]
                x.copy_((0 if are_finished else mix) * x + (1 - (0 if are_finished else mix)) * t)
            if counting and fragment == len(fragments) - 1:
                for i, buffer in enumerate(buffers(model)):
                    buffer.copy_(torch.stack([given[rank][i] for rank in counting]).mean(0))
        num_last = num_last + 1 if are_finished else 0
        if num_last == len(fragments):
            return floats(all_of.models[0])
