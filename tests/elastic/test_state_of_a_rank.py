"""After a loss, every rank holds the bits of an undisturbed run, whatever its objects hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.elastic.jobs import Job, Strike
from tests.elastic.programs import Program, differences, train_program
from tests.elastic.small_agent import Ended, SmallAgent


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a program gives that nobody disturbs."""
    known: dict[Any, Ended] = {}

    def run(program: Program, world_size: int, job: Job) -> Ended:
        key = program, world_size
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            quiet = dataclasses.replace(job, folder=str(folder), strikes=())
            known[key] = SmallAgent(train_program, world_size, quiet, program, folder=folder).run()
        return known[key]

    return run


def check(program: Program, folder: Path, undisturbed: Any, *strikes: Strike, world_size: int = 2) -> None:
    """Everything is as if nobody had been lost."""
    job = Job(str(folder), strikes, samples=16 * world_size)
    ended = SmallAgent(train_program, world_size, job, program, folder=folder).run()
    assert len(list(folder.glob("struck-*"))) == len(strikes), "a fault found no occasion"
    expected = undisturbed(program, world_size, job)
    for rank, (mine, theirs) in enumerate(zip(ended.results, expected.results, strict=True)):
        assert not differences(mine, theirs), f"rank {rank}"


LOSSES = (Strike(1, "backward", 3), Strike(0, "commit", 5))


@pytest.mark.parametrize("layer", ["late", "growing", "none first", "retyped", "tied", "expanded"])
def test_buffers_that_change_their_form_are_kept_in_the_form_that_they_have(
    layer: str, tmp_path: Path, undisturbed: Any
) -> None:
    """A buffer that was registered late, or grew, was left out of the record, which was read by another layout then:
    the replacement's running_mean was old variances.
    """
    check(Program(("norm", layer)), tmp_path, undisturbed, *LOSSES)


@pytest.mark.parametrize("does", ["own value", "own list", "metric"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_each_rank_counts_for_itself_stays_its_own(
    does: str, world_size: int, tmp_path: Path, undisturbed: Any
) -> None:
    """A running mean became that of another rank, on the replacement, and on survivors that were a step behind. With
    two to receive a state, it was broadcast over everybody's.
    """
    strikes = (*LOSSES, Strike(2, "commit", 5)) if world_size == 3 else LOSSES
    check(Program(does=(does,)), tmp_path, undisturbed, *strikes, world_size=world_size)


@pytest.mark.parametrize("layer", ["extra", "attribute", "generator"])
def test_what_a_layer_keeps_outside_of_its_buffers_is_kept(layer: str, tmp_path: Path, undisturbed: Any) -> None:
    """Scales of float8 (`get_extra_state`), counters and generators were neither handed over nor rolled back."""
    check(Program(("norm", layer)), tmp_path, undisturbed, *LOSSES)


def test_state_of_an_optimizer_that_hangs_on_no_parameter_is_kept(tmp_path: Path, undisturbed: Any) -> None:
    """`state["global"]` was not handed over: only what had a parameter was."""
    check(Program(optimizer="global"), tmp_path, undisturbed, *LOSSES)


def test_a_loss_in_a_collective_that_a_step_has_now_and_then_is_taken_back(tmp_path: Path, undisturbed: Any) -> None:
    """The loss was reduced every fifth step: the survivor's scheduler missed the step in which it failed."""
    check(Program(does=("late reduce",)), tmp_path, undisturbed, Strike(1, "late", 3))


@pytest.mark.parametrize("does", ["average of buffers", "average"])
def test_the_buffers_of_an_average_are_those_of_the_rank(does: str, tmp_path: Path, undisturbed: Any) -> None:
    """Its weights were exact, and its buffers those of another rank."""
    check(Program(does=(does,)), tmp_path, undisturbed, *LOSSES)


def test_two_names_for_one_tensor_stay_two_names_for_one_tensor(tmp_path: Path, undisturbed: Any) -> None:
    """They were two tensors after a loss."""
    check(Program(does=("alias",)), tmp_path, undisturbed, *LOSSES)


def test_a_group_of_parameters_that_the_loop_adds_is_handed_over(tmp_path: Path, undisturbed: Any) -> None:
    """The next loss ended the job: "zip() argument 2 is longer"."""
    check(Program(does=("new group",)), tmp_path, undisturbed, Strike(1, "backward", 4), Strike(0, "commit", 6))


def test_a_replacement_has_the_batchnorm_layers_that_the_others_have(tmp_path: Path, undisturbed: Any) -> None:
    """`sync_batchnorm="auto"` had decided to span the ranks, in a step that the replacement had not seen."""
    check(Program(does=("auto",)), tmp_path, undisturbed, *LOSSES)


def test_a_chained_scheduler_is_kept(tmp_path: Path, undisturbed: Any) -> None:
    """`State` raised AttributeError: it has no `last_epoch` of its own."""
    check(Program(does=("chained",)), tmp_path, undisturbed, *LOSSES)
