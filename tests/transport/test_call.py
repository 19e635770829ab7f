"""Fingerprints: a block of fixed size that holds what must agree, and the call in words."""

from dataclasses import replace

import pytest

from phalanx.diagnostics.failure_report import RankCall
from phalanx.transport.call import (
    BLOCK_BYTES,
    PAYLOAD_BYTES,
    Call,
    disagreement,
    payload_of,
    split_blocks,
)

CALL = Call("all_reduce", dtype=12, redop=0, count=12, shape=(3, 4), place="train.py:88")


def received(call):
    """What other ranks read in the block of `call`, their 7th, if theirs differs."""
    return disagreement({0: call.block(7), 1: Call("other").block(7)}, 7)[0]


def test_other_ranks_read_the_call_as_its_rank_made_it():
    assert received(CALL) == RankCall("all_reduce(SUM) of float32 (3, 4) at train.py:88", "all_reduce #7 (train.py:88)")
    broadcast = Call("broadcast", dtype=12, root=2, shape=(5,))
    assert received(broadcast) == RankCall("broadcast(src=2) of float32 (5,)", "broadcast #7")
    assert received(Call("barrier")) == RankCall("barrier", "barrier #7")


@pytest.mark.parametrize("letter", ["x", "ß", "字"])
def test_of_a_long_path_the_end_is_kept(letter):
    call = received(replace(CALL, place=letter * 1000 + "/train.py:88"))
    assert call.text.startswith("all_reduce(SUM) of float32")
    assert call.text.endswith(f"{letter}/train.py:88")
    assert call.operation.endswith(f"{letter}/train.py:88)")


def test_calls_that_differ_only_in_place_and_shape_agree():
    other = replace(CALL, shape=(12,), place="elsewhere.py:1")
    assert disagreement({0: CALL.block(1), 1: other.block(1)}, 1) == {}


@pytest.mark.parametrize(
    "change", [{"name": "reduce"}, {"dtype": 13}, {"redop": 1}, {"root": 1}, {"count": 11}, {"sizes": (1, 2)}], ids=str
)
def test_any_other_difference_is_told_in_every_ranks_words(change):
    other = replace(CALL, **change)
    assert disagreement({0: CALL.block(7), 1: other.block(7)}, 7) == {0: received(CALL), 1: received(other)}


def test_another_number_in_the_sequence_is_a_difference():
    assert disagreement({0: CALL.block(1), 1: CALL.block(2)}, 1)


def test_what_a_rank_brings_travels_behind_its_words_and_need_not_agree():
    payload = bytes(range(256))[:PAYLOAD_BYTES]
    block = replace(CALL, place="x" * 1000).block(1, payload)
    assert len(block) == BLOCK_BYTES
    assert payload_of(block) == payload
    assert payload_of(CALL.block(1)) == bytes(PAYLOAD_BYTES)
    assert disagreement({0: CALL.block(1, b"one"), 1: CALL.block(1, b"other")}, 1) == {}


def test_a_block_has_one_size_however_long_the_words_are():
    long = replace(CALL, place="x" * 1000)
    assert len(long.block(1)) == len(CALL.block(1)) == BLOCK_BYTES
    assert split_blocks(CALL.block(1) + long.block(1), [4, 2]) == {4: CALL.block(1), 2: long.block(1)}
