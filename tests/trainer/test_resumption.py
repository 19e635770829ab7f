"""A job that was ended anywhere, and started again, ends as one that was left alone: generated cases."""

import contextlib

import pytest
import torch.utils.tensorboard  # noqa: F401 - imported once here, not once in each rank of each case
from tests.trainer.resumption import DATA, differing, draw_case, end, fit, scalars

import phalanx.checkpoint.series
import phalanx.trainer.trainer  # noqa: F401
from phalanx.testing import RankFailed, run_ranks


def _train(rank, world_size, case, folder):
    return fit(case, folder, rank, ends=False)


def _end(rank, world_size, case, folder):
    end(case, folder, rank)


def _numbers(effort, seed):
    """Which cases: some that differ much, or the next ones from `seed` on."""
    return (25, 57, 102) if (effort, seed) == (1, 0) else range(seed, seed + 3 * effort)


@pytest.mark.slow
def test_a_run_that_was_ended_anywhere_goes_on_to_the_same_bits(tmp_path, effort, seed):
    """What validation had measured was forgotten, callbacks of ranks that train apart got the state of rank 0's, and
    TensorBoard showed each point twice that had been written behind the checkpoint.
    """
    for number in _numbers(effort, seed):
        check_case(number, draw_case(number), tmp_path)


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")
@pytest.mark.parametrize("data", DATA[1:])
@pytest.mark.slow
def test_so_does_a_run_over_streams_what_has_no_length_and_several_loaders(tmp_path, effort, seed, data):
    for number in [*_numbers(effort, seed), 3]:
        case = draw_case(number, data)
        if data == "function" and case.strategy == "pipeline":
            continue
        check_case(number, case, tmp_path)


def check_case(number, case, tmp_path):
    folders = whole, cut = tmp_path / f"{number}" / "whole", tmp_path / f"{number}" / "cut"
    for folder in folders:
        folder.mkdir(parents=True)
    expected = run_ranks(_train, case.world_size, case, whole, timeout=150)
    lost = range(case.world_size) if case.end in ("kill all", "kill in a save") else []
    lost = [case.by] if case.end == "kill one" else lost
    with contextlib.suppress(RankFailed):  # some have an early stop first
        run_ranks(_end, case.world_size, case, cut, timeout=150, lost=lost)
    found = run_ranks(_train, case.world_size, case, cut, timeout=150)
    places = [f"rank {r}{p}" for r, (a, b) in enumerate(zip(expected, found, strict=True)) for p in differing(a, b)]
    places += [f"TensorBoard{place}" for place in differing(scalars(whole), scalars(cut))]
    assert not places, (number, case, places[:9])
