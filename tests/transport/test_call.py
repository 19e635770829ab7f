"""Fingerprints: a head of fixed size that holds what must agree, and the call in words."""

from dataclasses import replace

import pytest
import torch

from phalanx._comm.diagnostics.failure_report import RankCall
from phalanx._comm.transport.call import HEAD_BYTES, CollectiveCall, describe_call, disagreement, split_heads

CALL = CollectiveCall("all_reduce", dtype=12, redop=0, count=12, shape=(3, 4), place="train.py:88")


def received(call):
    """What other ranks read in the head of `call`, their 7th, if theirs differs."""
    return disagreement({0: call.head(7), 1: CollectiveCall("other").head(7)}, 7)[0]


def test_other_ranks_read_the_call_as_its_rank_made_it():
    assert received(CALL) == RankCall("all_reduce(SUM) of float32 (3, 4) at train.py:88", "all_reduce #7 (train.py:88)")
    broadcast = CollectiveCall("broadcast", dtype=12, root=2, shape=(5,))
    assert received(broadcast) == RankCall("broadcast(src=2) of float32 (5,)", "broadcast #7")
    assert received(CollectiveCall("barrier")) == RankCall("barrier", "barrier #7")


@pytest.mark.parametrize("letter", ["x", "ß", "字"])
def test_of_a_long_path_the_end_is_kept(letter):
    call = received(replace(CALL, place=letter * 1000 + "/train.py:88"))
    assert call.text.startswith("all_reduce(SUM) of float32")
    assert call.text.endswith(f"{letter}/train.py:88")
    assert call.operation.endswith(f"{letter}/train.py:88)")


def test_calls_that_differ_only_in_place_and_shape_agree():
    other = replace(CALL, shape=(12,), place="elsewhere.py:1")
    assert disagreement({0: CALL.head(1), 1: other.head(1)}, 1) == {}


@pytest.mark.parametrize(
    "change", [{"name": "reduce"}, {"dtype": 13}, {"redop": 1}, {"root": 1}, {"count": 11}, {"sizes": (1, 2)}], ids=str
)
def test_any_other_difference_is_told_in_every_ranks_words(change):
    other = replace(CALL, **change)
    assert disagreement({0: CALL.head(7), 1: other.head(7)}, 7) == {0: received(CALL), 1: received(other)}


def test_another_number_in_the_sequence_is_a_difference():
    assert disagreement({0: CALL.head(1), 1: CALL.head(2)}, 1)


def test_a_head_has_one_size_however_long_the_words_are():
    long = replace(CALL, place="x" * 1000)
    assert len(long.head(1)) == len(CALL.head(1)) == HEAD_BYTES
    assert split_heads(CALL.head(1) + long.head(1), [4, 2]) == {4: CALL.head(1), 2: long.head(1)}


def test_a_call_that_comes_again_is_described_once():
    """Gloo hashed the fingerprint of every call anew, with the words in it."""
    tensor = torch.zeros(3, 4)
    call = describe_call("all_reduce", tensor, "train.py:88", redop=0)
    assert call == CALL
    assert describe_call("all_reduce", tensor.clone(), "train.py:88", redop=0) is call
    assert describe_call("all_to_all", tensor, "train.py:88", count=-1).count == -1
