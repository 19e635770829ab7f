"""After a loss, every rank holds the bits of an undisturbed run, whatever its objects hold."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.elastic.jobs import Job, Strike
from tests.elastic.programs import GlobalSGD, Program, differences, train_program
from tests.elastic.small_agent import Ended, SmallAgent
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

import phalanx
from phalanx import elastic
from phalanx.elastic.objects import Objects
from phalanx.elastic.step import StepTracker
from phalanx.testing import run_ranks


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run a program that nobody disturbs, once, and return how it ends."""
    known: dict[Any, Ended] = {}

    def run(program: Program, world_size: int, job: Job) -> Ended:
        key = program, world_size
        if key not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            quiet = dataclasses.replace(job, folder=str(folder), strikes=())
            known[key] = SmallAgent(train_program, world_size, quiet, program, folder=folder).run()
        return known[key]

    return run


def check(program: Program, folder: Path, undisturbed: Any, *strikes: Strike, world_size: int) -> None:
    """Everything is as if nobody had been lost."""
    job = Job(str(folder), strikes, samples=16 * world_size)
    ended = SmallAgent(train_program, world_size, job, program, folder=folder).run()
    assert len(list(folder.glob("struck-*"))) == len(strikes), "a fault found no occasion"
    expected = undisturbed(program, world_size, job)
    for rank, (mine, theirs) in enumerate(zip(ended.results, expected.results, strict=True)):
        assert not differences(mine, theirs), f"rank {rank}"


# Of each rank in turn; in a collective that a step has now and then; two at once, on three ranks.
LOSSES = {
    "each rank": (2, Program(), (Strike(1, "backward", 3), Strike(0, "commit", 5))),
    "late": (2, Program(), (Strike(1, "late", 3),)),
    "two at once": (3, Program(), (Strike(1, "backward", 3), Strike(0, "commit", 5), Strike(2, "commit", 5))),
    "after few trials": (2, Program(trial=2), (Strike(1, "commit", 1), Strike(0, "commit", 4))),
    "BatchNorm over the ranks": (2, Program(sync=True), (Strike(1, "backward", 3), Strike(0, "commit", 5))),
}


@pytest.mark.slow(but=("each rank",))
@pytest.mark.parametrize("loss", LOSSES)
def test_state_of_every_kind_is_after_a_loss_what_it_would_have_been(
    loss: str, tmp_path: Path, undisturbed: Any
) -> None:
    """A buffer that was registered late, or grew, was read by another layout: running means were old variances. Scales
    of float8 (`get_extra_state`), counters, generators and state of an optimizer that hangs on no parameter were not
    handed over; values that a rank counts for itself, and buffers of averages, became those of another rank; two names
    for one tensor became two tensors, a group of parameters that the loop had added ended the job, and a rank that was
    lost drew the same numbers again.
    """
    world_size, program, strikes = LOSSES[loss]
    check(program, tmp_path, undisturbed, *strikes, world_size=world_size)


class Counting:
    """A hook that counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, state: Any, bucket: Any) -> Any:
        self.calls += 1
        return allreduce_hook(None, bucket)


def closure_over(hook: Any) -> Any:
    return lambda state, bucket: hook(state, bucket)


@pytest.mark.parametrize(
    ("hook", "state", "is_refused"),
    [
        (powerSGD_hook, PowerSGDState(None), True),
        (allreduce_hook, [0], True),
        (Counting(), None, True),
        (closure_over(Counting()), None, True),
        (fp16_compress_wrapper(allreduce_hook), None, False),
    ],
)
def test_a_comm_hook_that_remembers_something_is_refused_by_name(hook: Any, state: Any, is_refused: bool) -> None:
    """The replacement's hook began anew: the job went on, and ended many steps later, when hooks differed."""

    def refuse(rank: int, world_size: int) -> str:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        model._comm_hooks.append((hook, state))
        try:
            Objects({"model": model}).refuse_unsupported(2)
        except ValueError as error:
            return str(error)
        return ""

    (said,) = run_ranks(refuse, 1)
    assert ("has the comm hook" in said) == is_refused, said


@pytest.mark.parametrize("wrapper", [phalanx.DistributedDataParallel, nn.parallel.DistributedDataParallel])
def test_a_model_whose_wrapper_state_does_not_have_is_refused_by_name(wrapper: Any) -> None:
    """After a loss the wrapper stayed in the old group, and the next forward blamed the model's parameters."""

    def refuse(rank: int, world_size: int) -> tuple[str, ...]:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        ddp = wrapper(net)

        def message(**things: Any) -> str:
            try:
                Objects(things).refuse_unsupported(2)
            except ValueError as error:
                return str(error)
            return ""

        accepted = message(model=ddp), message(model=ddp, net=net), message(average=copy.deepcopy(net))
        refused = message(model=net), message(average=copy.deepcopy(net), model=net[1])
        del ddp
        return (*accepted, message(model=net), *refused)

    (messages,) = run_ranks(refuse, 1)
    assert messages[:4] == ("", "", "", "")
    for found in messages[4:]:
        assert found.startswith("phalanx.elastic: 'model' is wrapped by a DistributedDataParallel that State does not")


class _Around(torch.optim.SGD):
    """An optimizer that lets another one make the update, as wrappers do."""

    inner: torch.optim.Optimizer

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_an_optimizer_that_steps_and_that_state_does_not_have_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """A replacement trained with new momenta: other parameters than its peers', and exit code 0."""
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    for parameter in (*net.parameters(), *other.parameters()):
        parameter.grad = torch.ones_like(parameter)
    around = _Around(net.parameters(), lr=0.1)
    around.inner = torch.optim.Adam(net.parameters())
    forgotten = torch.optim.Adam(net.parameters())
    watch = StepTracker(Objects({"net": net, "around": around}), None).watch_other_optimizers()
    around.step()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert not caplog.messages, "one is inside another, one updates no model of State, one does not step"
    forgotten.step()
    forgotten.step()
    watch.remove()
    torch.optim.AdamW(net.parameters()).step()
    (said,) = caplog.messages
    assert said.startswith("phalanx.elastic: Adam updates parameters of 'net', but State does not have this optimizer.")


def _train_sharded() -> None:
    with phalanx.init(timeout=60.0):
        model = phalanx.DistributedDataParallel(nn.Linear(2, 2), check=False)
        optimizer = phalanx.ZeroRedundancyOptimizer(model.parameters(), GlobalSGD, lr=0.1)

        @elastic.run(elastic.State(model=model, optimizer=optimizer))
        def train(state: Any) -> None:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            state.commit()

        train()


def test_state_of_no_parameter_in_a_sharded_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    """It was left out of what is kept, and of checkpoints, in silence."""
    with pytest.raises(RuntimeError, match=r"GlobalSGD keeps state\['global'\], which belongs to no parameter"):
        SmallAgent(_train_sharded, 2, folder=tmp_path).run()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit.script, as PyTorch's optimizer is imported
def test_an_optimizer_in_shards_whose_shards_are_not_kept_is_refused_by_name() -> None:
    """On two hosts the first loss ended the job by a ValueError of shared_empty, which nobody had called."""

    def refuse(rank: int, world_size: int) -> list[str]:
        some, gloo, said = dist.new_group([0, 1]), dist.new_group(backend="gloo"), []
        for group in (some, gloo, None) if rank < 2 else (gloo, None):
            parameters = nn.Linear(2, 2).parameters()
            optimizer = phalanx.ZeroRedundancyOptimizer(parameters, torch.optim.SGD, process_group=group, lr=0.1)
            try:
                Objects({"optimizer": optimizer}).refuse_unsupported(world_size)
            except ValueError as error:
                said.append(str(error))
        dist.barrier()
        return said

    for *some, gloo in run_ranks(refuse, 3):
        assert all("is a ZeroRedundancyOptimizer over some ranks of the job" in one for one in some)
        assert "is a ZeroRedundancyOptimizer over ranks that share no memory" in gloo
