"""A collective that only some ranks can ever reach, as under `if rank == 0`: every one of them is told as such."""

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import phalanx
from phalanx._comm.diagnostics.divergence import (
    JOIN_ADVICE,
    describe_divergence,
    describe_earlier_divergence,
    describe_left_alone,
)
from phalanx._comm.diagnostics.failure_report import ORDER_ADVICE
from phalanx._comm.diagnostics.flight_recorder import Record, read
from phalanx.errors import DeadlineError, MismatchError, PeerLostError
from phalanx.testing import run_ranks

ADVICE = (
    "Only some ranks reach a call under `if rank == 0`, or under another condition that not every rank meets.\n"
    "Move the call out of the condition, or give those ranks their own group (dist.new_group)."
)


def evaluate(group=None, *, async_op=False):
    """What stands under `if rank == 0` here."""
    work = dist.all_reduce(torch.ones(3), group=group, async_op=async_op)
    if work is not None:
        work.wait()


def train(model):
    model(torch.ones(2, 4)).sum().backward()


def plain(message):
    """Without numbers of operations, lines, processes and spans, and with nothing of a path but the file."""
    message = re.sub(r"pid \d+", "pid n", message)
    message = re.sub(r"[^\s(]*/(\w+\.py):\d+", r"\1", message)
    return re.sub(r"#\d+", "#n", re.sub(r" for \d+\.\d s", "", message))


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("end", ["destroy", "exit"])
def test_the_others_have_finished(end, async_op):
    def check(rank, world_size):
        dist.barrier()
        if rank == 0:
            with pytest.raises(PeerLostError) as caught:
                evaluate(async_op=async_op)
            return plain(str(caught.value))
        if end == "destroy":
            dist.destroy_process_group()
        return None  # `run_ranks` leaves the group as a program does that ends

    message = run_ranks(check, 3)[0]
    first, second, third, fourth = message.split("\n", 3)
    assert first.startswith("all_reduce #n in group '0' on rank 0: rank ")
    assert first.endswith("is gone: it left the group (destroy_process_group).")
    assert second == "It last finished barrier #n (test_divergence.py). Read its log first."
    last = (
        r"(last finished|is in) barrier #n \(test_divergence\.py\)"  # one may not have left yet, or not have woken up
    )
    which = rf"(ranks 1, 2 can never reach|rank 1 can never reach; rank 2 {last}|rank 2 can never reach; rank 1 {last})"
    assert re.fullmatch(rf"Rank 0 is in all_reduce #n \(test_divergence\.py\), which {which}\.", third), third
    assert fourth == f"{ADVICE} The group can no longer be used."


@pytest.mark.parametrize("world_size", [3])
def test_the_others_wait_in_a_barrier(world_size):
    def check(rank, world_size):
        dist.barrier()
        with pytest.raises(MismatchError) as caught:
            evaluate() if rank == 0 else dist.barrier()
        return plain(str(caught.value))

    who, they_are = {
        2: ("rank 1 has", "it is"),
        3: ("ranks 1, 2 have", "they are"),
        4: ("ranks 1, 2, 3 have", "they are"),
    }[world_size]
    for message in run_ranks(check, world_size):
        assert (
            f"\nRank 0 is in all_reduce #n (test_divergence.py), which {who} not reached: "
            f"{they_are} in barrier #n (test_divergence.py).\nOnly some ranks reach a call under `if rank == 0`"
        ) in message
        assert message.endswith(f"\n{ADVICE} {ORDER_ADVICE} The group can no longer be used.")


def train_and_meet(model):
    train(model)
    dist.barrier()


@pytest.mark.parametrize("wrapper", [phalanx.DistributedDataParallel, nn.parallel.DistributedDataParallel])
def test_the_others_stand_in_the_next_step_of_training(wrapper):
    def check(rank, world_size):
        model = wrapper(nn.Linear(4, 4))
        for _ in range(2):
            train(model)
        # torch's own hears of it through a future, which can carry the text of an error and not its class
        ours = rank == 0 or wrapper is phalanx.DistributedDataParallel
        with pytest.raises(MismatchError if ours else RuntimeError) as caught:
            evaluate() if rank == 0 else train_and_meet(model)
        return plain(str(caught.value))

    for message in run_ranks(check, 3):
        assert (
            "Rank 0 is in all_reduce #n (test_divergence.py), which ranks 1, 2 have not reached: they are in "
            in message
        )
        assert ADVICE in message
        assert "of bytes" not in message


@pytest.mark.parametrize("wrapper", [phalanx.DistributedDataParallel, nn.parallel.DistributedDataParallel])
def test_a_rank_without_further_data_is_advised_to_give_all_as_many_batches(wrapper):
    def check(rank, world_size):
        model = wrapper(nn.Linear(4, 4))
        for _ in range(2):
            train(model)
        with pytest.raises((MismatchError, RuntimeError)) as caught:
            train(model) if rank == 0 else dist.all_reduce(torch.ones(()))  # one more batch; the mean of the losses
        return str(caught.value)

    for message in run_ranks(check, 2):
        assert f"If a rank has run out of data instead: {JOIN_ADVICE}" in message


def test_in_a_sub_group_its_own_numbers_count():
    def check(rank, world_size):
        group = dist.new_group([1, 2, 3])
        if rank == 0:
            return None
        with pytest.raises(MismatchError) as caught:
            evaluate(group) if rank == 2 else dist.barrier(group)
        return plain(str(caught.value))

    for message in run_ranks(check, 4)[1:]:
        assert "Rank 1 is in all_reduce #n (test_divergence.py), which ranks 0, 2 have not reached: they are" in message


def stands_in_barrier(rank):
    records = read(dist.group.WORLD.symm_mem.core, rank)
    return bool(records) and records[-1].name == "barrier" and not records[-1].leave_ns


def test_the_others_wait_in_another_group():
    def check(rank, world_size):
        group = dist.new_group()
        group.set_timeout(timedelta(seconds=0.5))
        if rank == 0:
            while not all(stands_in_barrier(other) for other in (1, 2)):
                pass  # however long it takes
            with pytest.raises(DeadlineError) as caught:
                evaluate(group)
            dist.barrier()
            return plain(str(caught.value))
        dist.barrier()
        return None

    message = run_ranks(check, 3)[0]
    for rank in (1, 2):
        assert (
            f"\nRank {rank} (pid n) has called nothing yet; it has been in barrier #n "
            "(test_divergence.py) of group '0'.\n" in message
        )
    assert message.endswith(f"\n{ADVICE} The group can no longer be used.")


def test_a_call_that_another_line_answered_is_told_when_the_ranks_part():
    def check(rank, world_size):
        dist.barrier()
        if rank == 0:
            evaluate()  # answered by the others' next step
        else:
            dist.all_reduce(torch.ones(3))
        with pytest.raises(MismatchError) as caught:
            dist.all_reduce(torch.ones(3)) if rank == 0 else dist.barrier()
        return str(caught.value)

    line = evaluate.__code__.co_firstlineno + 2
    for message in run_ranks(check, 3):
        assert re.search(
            rf"\nBefore that, they called all_reduce #2 from different lines: rank 0 at \S+:{line}, rank 1 at", message
        )


def test_a_rank_that_crashed_is_no_rank_that_cannot_come():
    def check(rank, world_size):
        dist.barrier()
        if rank == 1:
            dist.group.WORLD.transport.set_exit_reason("it ended with ValueError: bad luck")
            dist.destroy_process_group()
            return None
        with pytest.raises(PeerLostError, match="bad luck") as caught:
            evaluate()
        return str(caught.value)

    assert "if rank == 0" not in run_ranks(check, 2)[0]


def call(kind, seq, call_site, dtype=12):
    return Record(seq, kind, dtype, 0, -1, -1, 1, (1,), 5, 0, 0, call_site)


ALL_REDUCE, BARRIER, BROADCAST, GRADIENTS = 3, 1, 2, 12


def test_ranks_in_one_line_have_not_parted_whatever_else_differs():
    calls = [call(ALL_REDUCE, 4, "a.py:1"), call(ALL_REDUCE, 4, "a.py:1", dtype=13)]
    assert describe_divergence({rank: call.place for rank, call in enumerate(calls)}) == ""


def test_the_few_are_named_before_the_many_and_those_without_a_call_last():
    a, b, c = (
        call(kind, 4, call_site).place
        for kind, call_site in [(ALL_REDUCE, "a.py:1"), (BARRIER, "b.py:2"), (BROADCAST, "c.py:3")]
    )
    assert describe_divergence({0: a, 1: a, 2: b}) == (
        "Rank 2 is in barrier #4 (b.py:2), which ranks 0, 1 have not reached: they are in all_reduce #4 (a.py:1)."
    )
    assert describe_divergence({0: "", 1: a, 2: a}) == (
        "Ranks 1, 2 are in all_reduce #4 (a.py:1), which rank 0 has not reached: it has called nothing yet."
    )
    assert describe_divergence({0: a, 1: b, 2: c, 3: c}) == (
        "Rank 0 is in all_reduce #4 (a.py:1), which ranks 1, 2, 3 have not reached: "
        "rank 1 is in barrier #4 (b.py:2); ranks 2, 3 are in broadcast #4 (c.py:3)."
    )


def test_who_is_left_alone_hears_where_the_others_are():
    assert describe_left_alone("all_reduce #4 (a.py:1)", [0, 3], [1], {2: "last finished barrier #3"}) == (
        "Ranks 0, 3 are in all_reduce #4 (a.py:1), which rank 1 can never reach; rank 2 last finished barrier #3."
    )


def test_the_latest_earlier_parting_is_told_and_rounds_of_gradients_are_counted_apart():
    ours = [call(ALL_REDUCE, 1, "a.py:1"), call(ALL_REDUCE, 2, "a.py:2"), call(GRADIENTS, 3, "a.py:3")]
    theirs = [call(ALL_REDUCE, 1, "b.py:1"), call(ALL_REDUCE, 2, "b.py:2"), call(GRADIENTS, 3, "b.py:3")]
    assert describe_earlier_divergence([ours, theirs], 4) == (
        "Before that, they called all_reduce #2 from different lines: rank 0 at a.py:2, rank 1 at b.py:2."
    )
    assert describe_earlier_divergence([ours, ours], 4) == ""
    assert describe_earlier_divergence([ours, []], 4) == ""
