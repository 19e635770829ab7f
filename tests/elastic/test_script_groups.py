"""Groups that a script makes before `elastic.run` go on after a loss, or say by name that they can't."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.elastic.jobs import Job, Strike
from tests.elastic.small_agent import SmallAgent
from tests.logs import logged
from torch.distributed.device_mesh import init_device_mesh

import phalanx
from phalanx import elastic
from phalanx.elastic.group import plan_groups


def test_a_group_is_formed_of_those_who_all_name_it() -> None:
    told = [[("1", (0, 1)), ("2", (0, 2))], [("1", (0, 1))], [("2", (1, 2))]]
    assert plan_groups(told[0], told) == [True, False]
    assert plan_groups(told[2], told) == [False]


def add_up(group: Any) -> float:
    summed = torch.tensor(float(10 ** dist.get_rank()))
    dist.all_reduce(summed, group=group)
    return summed.item()


def use_groups(job: Job) -> bool:
    """Each step uses every kind of group; whether they are the objects that they were."""
    with phalanx.init(timeout=60.0):
        rank = dist.get_rank()
        everybody = dist.new_group(group_desc="metrics")
        pairs, _ = dist.new_subgroups(2)
        own = dist.new_group([rank], use_local_synchronization=True)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        tp, dp = float(sum(10**r for r in pair)), float(10 ** (rank % 2) + 10 ** (rank % 2 + 2))
        made = [id(group) for group in (everybody, pairs, own, mesh.get_group("dp"), mesh.get_group("tp"))]
        state = elastic.State()

        @elastic.run(state)
        def train(state: Any) -> None:
            inside = dist.new_group([0, 3])
            while state.step < 6:
                job.strike("batch", state.step)
                groups = (everybody, pairs, own, mesh.get_group("dp"), mesh.get_group("tp"))
                assert [id(group) for group in groups] == made
                assert list(map(add_up, groups)) == [1111.0, tp, float(10**rank), dp, tp]
                assert rank not in (0, 3) or add_up(inside) == 1001.0
                assert dist.get_process_group_ranks(pairs) == pair
                state.commit()

        train(state)
        return state.step == 6


@pytest.mark.slow
def test_groups_and_meshes_that_were_made_before_are_the_same_objects_after_a_loss(tmp_path: Path) -> None:
    """They were "not initialized in the world group map", in the first step after it. Two losses, one of rank 0."""
    job = Job(str(tmp_path), (Strike(3, "batch", 2), Strike(0, "batch", 4)))
    ended = SmallAgent(use_groups, 4, job, folder=tmp_path).run()
    assert ended.generations == 2
    assert ended.results == [True] * 4


def use_with_fewer(job: Job) -> tuple[float, str]:
    with phalanx.init(timeout=60.0):
        everybody, pairs = dist.new_group(), dist.new_subgroups(2)[0]
        state = elastic.State(said="", sums=0.0)

        @elastic.run(state)
        def train(state: Any) -> None:
            while state.step < 4:
                job.strike("batch", state.step)
                state.sums = add_up(everybody)
                try:
                    add_up(pairs)
                except phalanx.PhalanxError as error:
                    if "before elastic.run" not in str(error):
                        raise
                    state.said = str(error)
                state.commit()

        train(state)
        return state.sums, state.said


def test_a_group_whose_ranks_have_other_numbers_is_refused_by_name(tmp_path: Path) -> None:
    job = Job(str(tmp_path), (Strike(1, "batch", 2),))
    ended = SmallAgent(use_with_fewer, 4, job, folder=tmp_path, replace=False).run()
    assert len(ended.results) == 3
    for summed, said in ended.results:
        assert summed == 111.0
        assert "was created before elastic.run, for a job of 4 ranks, but is used" in said
        assert "after a loss. The job now has 3 ranks" in said
        assert "Create the group in the function that elastic.run" in said


@pytest.mark.slow(but=("phalanx",))
@pytest.mark.parametrize("wrapper", ["phalanx", "torch"])
def test_a_wrapper_over_a_group_of_its_own_stays_with_it(wrapper: str, tmp_path: Path) -> None:
    """It was moved to the default group, and averaged over all ranks from then on."""
    job = Job(str(tmp_path), (Strike(2, "batch", 2),), wrapper=wrapper)
    ended = SmallAgent(train_in_pairs, 4, job, folder=tmp_path).run()
    assert ended.generations == 1
    assert ended.results == [0.5, 0.5, 2.5, 2.5]


def train_in_pairs(job: Job) -> float:
    """The gradient is the mean of the pair's ranks."""
    with phalanx.init(timeout=60.0):
        pairs = dist.new_subgroups(2)[0]
        model = torch.nn.Linear(1, 1, bias=False)
        kind: Any = torch.nn.parallel.DistributedDataParallel if job.wrapper == "torch" else None
        wrapped = (
            kind(model, process_group=pairs) if kind else phalanx.DistributedDataParallel(model, process_group=pairs)
        )
        state = elastic.State(model=wrapped, grad=0.0)

        @elastic.run(state)
        def train(state: Any) -> None:
            while state.step < 4:
                job.strike("batch", state.step)
                model.weight.grad = None
                wrapped(torch.tensor([[float(dist.get_rank())]])).sum().backward()
                assert model.weight.grad is not None
                state.grad = model.weight.grad.item()
                dist.barrier()
                state.commit()

        train(state)
        return float(state.grad)


def agree_before(job: Job) -> tuple[list[str], list[str], float]:
    """Return the warnings and errors of collectives that the script calls before `elastic.run`, and the model's sum."""
    errors = []
    with phalanx.init(timeout=60.0), logged() as warnings:
        rank = dist.get_rank()
        model = torch.nn.Linear(1, 1)
        for _ in range(2):
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
        dist.all_reduce(torch.ones(1))
        dist.all_gather_object([None] * dist.get_world_size(), rank)
        dist.broadcast(torch.ones(1), 1)  # this rank's own in the replacement
        dist.barrier()
        try:
            dist.broadcast_object_list(["run-1" if rank == 0 else None])
        except phalanx.PhalanxError as error:
            errors.append(str(error))
        state = elastic.State(model=phalanx.DistributedDataParallel(model))

        @elastic.run(state)
        def train(state: Any) -> None:
            while state.step < 4:
                job.strike("batch", state.step)
                state.model(torch.ones(1, 1)).sum().backward()
                state.commit()

        train(state)
        return (
            [line for line in warnings if "joins the other ranks" in line],
            errors,
            sum(p.sum().item() for p in model.parameters()),
        )


def test_a_replacement_is_warned_of_what_the_script_exchanges_before_run(tmp_path: Path) -> None:
    """Its `all_reduce` returned another mean than the others had, and `broadcast_object_list` memory's old content."""
    ended = SmallAgent(agree_before, 2, Job(str(tmp_path), (Strike(1, "batch", 2),)), folder=tmp_path).run()
    (no_warnings, no_errors, weights), (warnings, errors, weights_there) = ended.results
    assert (no_warnings, no_errors) == ([], [])
    assert weights == weights_there
    assert [warning.partition(" at ")[0] for warning in warnings] == ["broadcast", "all_reduce", "all_gather_object"]
    assert all("test_script_groups.py:" in text for text in (*warnings, *errors))
    [error] = errors
    assert error.startswith("broadcast_object_list at ")
    assert "keep the result in State" in error
