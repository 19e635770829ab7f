"""A pipeline gives what the model gives in one process: losses, outputs, gradients, trained weights."""

import random

import pytest
import torch
from tests.pipeline.unsplit import draw_model, train_unsplit
from torch import nn
from torch.nn import functional

import phalanx.pipeline.pipeline  # noqa: F401 - imported once here, not once in each rank
from phalanx import Pipeline
from phalanx.pipeline import weight_gradients, wire
from phalanx.testing import run_ranks

STEPS = 2


def draw_cases(seed, world_size, count):
    draw = random.Random(seed)
    cases = []
    for _ in range(count):
        schedule = draw.choice(["gpipe", "1f1b", "interleaved", "zero_bubble"])
        micro_batches = draw.choice([n for n in (1, 2, 3, 5, 7, 8) if schedule == "gpipe" or n >= world_size])
        checkpoint = draw.choice(["never", "never", "except_last", "always"])
        cases.append((draw.randrange(10**6), schedule, micro_batches, checkpoint))
    return cases


def train(rank, world_size, cases):
    wire._LENT_BYTES = 64  # these models are small, and what goes from stage to stage shall be read where it lies
    found = []
    for seed, schedule, micro_batches, checkpoint in cases:
        weight_gradients._LEAST_PRODUCT = seed % 3 * 200  # and so that some of their weights are added to in products
        model, loss_fn, inputs, targets = draw_model(seed)
        stages = world_size if schedule != "interleaved" or world_size > 2 else 2 * world_size
        pipe = Pipeline(
            model, stages, micro_batches=micro_batches, schedule=schedule, checkpoint=checkpoint, loss_fn=loss_fn
        )
        optimizer = torch.optim.SGD(list(pipe.parameters()) or [torch.zeros(1)], lr=0.1, momentum=0.9)
        torch.manual_seed(7)
        losses = []
        for _ in range(STEPS):
            pipe.zero_grad()
            losses.append(pipe.step(inputs, target=targets))
            optimizer.step()
        gradients = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        pipe.eval()
        found.append((losses, pipe(inputs), gradients, pipe.state_dict()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "backend"), [(2, "phalanx"), (2, "gloo"), (3, "phalanx"), (4, "phalanx")])
def test_random_models_train_as_in_one_process(world_size, backend, effort):
    cases = draw_cases(world_size, world_size, 10 * effort if backend == "phalanx" else 6)
    ranks = run_ranks(train, world_size, cases, backend=backend, timeout=100)
    for number, case in enumerate(cases):
        losses, output, gradients, state = train_unsplit(case[0], case[2], STEPS)
        found = [rank[number] for rank in ranks]

        def same(ours, theirs, what, case=case):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text: f"{what} of {case} on {world_size} ranks: {text}"
            )

        for theirs in found:
            same(theirs[0], losses, "losses")
        same(found[-1][1], output, "output")
        assert [theirs[1] for theirs in found[:-1]] == [None] * (world_size - 1)
        for name, gradient in gradients.items():
            for theirs in (theirs[2][name] for theirs in found if name in theirs[2]):
                same(theirs, gradient, f"gradient of {name}")
        assert set().union(*(theirs[2] for theirs in found)) == set(gradients)
        for theirs in found:
            assert list(theirs[3]) == list(state)
            for name, value in state.items():
                same(theirs[3][name], value, name)


def test_the_random_state_travels_from_where_numbers_are_drawn():
    """It went with every micro-batch from every stage: a message of 5 KB more for each, of models that draw nothing."""

    def received(rank, world_size):
        layers = [nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Linear(4, 4), nn.Dropout(0.5)]
        torch.manual_seed(3)
        pipe = Pipeline(nn.Sequential(*layers), balance=[1, 2, 1, 1], loss_fn=functional.mse_loss)
        x = torch.ones(16, 4)
        loss = pipe.step(x, target=x)
        return sum(len(form.leaves) for edge, (form, _) in pipe._wire._forms.items() if edge.target == rank), loss

    found = run_ranks(received, 4)
    assert [tensors for tensors, _ in found] == [0, 1, 2, 2]
