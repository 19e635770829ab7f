"""The decisions: what is said of which observations."""

import itertools

import pytest

from phalanx.ddp.mistakes import NUM_STEPS, Observation, decide_warnings

NAMES = ["fc.weight", "fc.bias"]


def _kinds(steps, differing=()):
    return [mistake.kind for mistake in decide_warnings(steps, NAMES, differing)]


def _text(steps, differing=()):
    (mistake,) = decide_warnings(steps, NAMES, differing)
    return mistake.text


def _inputs(*rows):
    """One step per row; a number per rank is the digest of its batch, None is a rank that was given no tensor."""
    return [
        [Observation(has_inputs=int(value is not None), inputs=value or 0, parameters=1) for value in row]
        for row in rows
    ]


def test_an_observation_survives_its_row():
    observation = Observation(1, 2, 1, -3, 4, 1, 2, 1, 5)
    assert Observation(*observation.row()) == observation


def test_all_is_well():
    steps = [[Observation(1, 10 * step + rank, 1, rank, step) for rank in range(3)] for step in range(NUM_STEPS)]
    for count in range(1, NUM_STEPS + 1):
        assert _kinds(steps[:count]) == []


def test_a_rank_by_itself_is_told_nothing():
    alone = [[Observation(1, 5, 1, 5, 5, 1, 1, 1)]] * NUM_STEPS
    assert _kinds(alone) == []


# Equal batches


@pytest.mark.parametrize("world_size", [2, 3])
def test_equal_batches_are_told_after_the_last_step_only(world_size):
    steps = _inputs(*[[step] * world_size for step in range(1, NUM_STEPS + 1)])
    assert [_kinds(steps[:count]) for count in range(1, NUM_STEPS + 1)] == [[], [], ["equal batches"]]
    text = _text(steps)
    assert text.startswith(f"all {world_size} ranks were given the same batch in each of the first 3 steps")
    assert "DataLoader(dataset, sampler=phalanx.DistributedSampler(dataset), ...)" in text


def test_batches_that_are_equal_in_every_combination_of_three_ranks_and_three_steps():
    for digests in itertools.product(range(2), repeat=9):
        rows = [digests[0:3], digests[3:6], digests[6:9]]
        columns = list(zip(*rows, strict=True))
        assert bool(_kinds(_inputs(*rows))) == (len(set(columns)) < 3), rows


def test_some_ranks_with_the_same_batches_are_named():
    steps = _inputs([1, 2, 1, 2], [3, 4, 3, 4], [5, 6, 5, 6])
    assert _text(steps).startswith("ranks 0 and 2; ranks 1 and 3 were given the same batch")
    assert _text(_inputs(*[[7, 7, 1, 7]] * 3)).startswith("ranks 0, 1 and 3 were given")


def test_forwards_without_tensors_say_nothing_about_batches():
    assert _kinds(_inputs(*[[None, None]] * 3)) == []
    assert _kinds(_inputs([None, None], [1, 1], [1, 1])) == []


# Equal draws


@pytest.mark.parametrize("draws", list(itertools.product([0, 1], repeat=2)))
@pytest.mark.parametrize("generators", [(5, 5), (5, 6)])
def test_equal_draws_need_draws_and_equal_generators(draws, generators):
    step = [Observation(draws=draw, generator=generator) for draw, generator in zip(draws, generators, strict=True)]
    assert bool(_kinds([step])) == (draws == (1, 1) and generators == (5, 5))


def test_equal_draws_come_with_the_line_to_add():
    text = _text([[Observation(draws=1, generator=5)] * 2])
    assert text.startswith("all 2 ranks draw the same random numbers in forward, so dropout")
    assert "torch.manual_seed(seed + torch.distributed.get_rank())" in text


# Parameters


def test_parameters_that_differ_are_named_with_their_ranks():
    step = [Observation(parameters=value) for value in (1, 1, 2)]
    assert _text([step], [1]).startswith("in step 1 parameter 'fc.bias' had different values on rank 2 than on rank 0")
    assert "'fc.weight' and 1 more had" in _text([step], [0, 1])
    assert "phalanx.check_replicas(model)" in _text([step], [1])


# NaN


@pytest.mark.parametrize("world_size", [2, 3])
def test_nan_is_told_when_some_ranks_have_it_and_others_not(world_size):
    for outputs in itertools.product([0, 1], repeat=world_size):
        for gradients in itertools.product([0, 2], repeat=world_size):
            step = [Observation(nan_output=o, nan_gradient=g) for o, g in zip(outputs, gradients, strict=True)]
            num_broken = sum(bool(o or g) for o, g in zip(outputs, gradients, strict=True))
            assert bool(_kinds([step])) == (0 < num_broken < world_size), (outputs, gradients)


def test_nan_names_the_rank_the_step_and_what_it_was_seen_in():
    fine = [Observation()] * 3
    output = [Observation(), Observation(), Observation(nan_output=1, nan_gradient=1)]
    text = _text([fine, output])
    assert text.startswith("in step 2 the output of forward was NaN on rank 2 only")
    assert "if torch.distributed.get_rank() == 2: assert all(torch.isfinite" in text
    gradient = [Observation(nan_gradient=2), Observation(nan_gradient=1), Observation()]
    assert "the gradient of 'fc.bias' was NaN on ranks 0 and 1 only" in _text([gradient])


# Optimizer


def test_a_stale_optimizer_is_told_after_the_last_step():
    step = [Observation(), Observation(stale_optimizer=1)]
    assert [_kinds([step] * count) for count in (1, 2, 3)] == [[], [], ["stale optimizer"]]
    text = _text([step] * 3)
    assert text.startswith("the optimizer of rank 1 holds none of the model's parameters")
    assert "optimizer = torch.optim.AdamW(model.parameters(), ...) after model =" in text


def test_several_mistakes_are_several_warnings():
    step = [Observation(1, 5, 1, 5, 5, 0, 0, 1)] * 2
    assert _kinds([step] * 3) == ["equal draws", "equal batches", "stale optimizer"]
