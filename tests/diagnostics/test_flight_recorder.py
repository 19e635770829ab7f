"""The names that people read are those of torch, and the clauses say where a rank is."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.on_ranks import on_ranks

from phalanx._base import core_numbers, dtypes
from phalanx._comm.diagnostics.flight_recorder import Record, position_of, read

CALL = Record(7, 3, 12, 0, -1, -1, 6, (2, 3), 1_000_000_000, 0, 0, "train.py:88")


def test_every_name_is_the_one_that_torch_uses():
    assert {row.code: row.name for row in dtypes.DTYPES.values()} | {0: "bytes"} == core_numbers.DTYPE_NAMES
    assert {code: op.name for op, code in dtypes.REDUCTIONS.items()} == core_numbers.REDUCTION_NAMES


def test_a_call_is_told_as_it_was_made():
    assert CALL.call() == "all_reduce(SUM) of float32 (2, 3) at train.py:88"
    assert replace(CALL, kind=2, root=1, call_site="").call() == "broadcast(src=1) of float32 (2, 3)"
    assert replace(CALL, kind=1).call() == "barrier at train.py:88"


@on_ranks(2)
def test_dimensions_that_have_no_room_count_in_the_last_one(rank):
    """They were left out, and the report's bytes with them."""
    dist.all_reduce(torch.zeros(2, 3, 1, 2, 3, 5, 7))
    assert read(dist.group.WORLD.symm_mem.core, rank)[-1].shape == (2, 3, 1, 2, 105)


@pytest.mark.parametrize(
    ("records", "clause"),
    [
        ([], "has called nothing yet"),
        ([CALL], "has been in all_reduce #7 (train.py:88) for 2.5 s"),
        ([replace(CALL, leave_ns=1_100_000_000)], "last finished all_reduce #7 (train.py:88)"),
        ([replace(CALL, leave_ns=1_100_000_000, status=2)], "was in all_reduce #7 (train.py:88), which failed"),
        ([replace(CALL, kind=10, peer=3, call_site="")], "has been in send to rank 3 for 2.5 s"),
        ([replace(CALL, kind=11, peer=-1, leave_ns=2)], "last finished recv from any rank (train.py:88)"),
    ],
)
def test_a_clause_says_where_a_rank_is(records, clause):
    assert str(position_of(records, 3_500_000_000)) == clause


def test_numbers_from_a_newer_core_are_shown_as_numbers():
    record = replace(CALL, kind=99, dtype=77, status=55, leave_ns=2)
    assert (record.name, record.dtype_name, record.status_name) == ("operation 99", "dtype 77", "status 55")
