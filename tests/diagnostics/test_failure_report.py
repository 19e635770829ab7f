"""A failure report is facts; one place makes the sentences, the same for every transport and on every rank."""

import pickle

import pytest

from phalanx._comm.diagnostics.divergence import DIVERGENCE_ADVICE, JOIN_ADVICE
from phalanx._comm.diagnostics.failure_report import (
    KILLED,
    NOTHING_CALLED,
    ORDER_ADVICE,
    QUIET_END,
    FailedOperation,
    FailureReport,
    RankCall,
    describe_interruption,
    describe_wait,
)
from phalanx._comm.diagnostics.flight_recorder import RankPosition
from phalanx._comm.diagnostics.rank_list import format_ranks, name_ranks
from phalanx.errors import DeadlineError, InternalError, MismatchError, PeerLostError, PhalanxError

HERE = FailedOperation("all_reduce #42", "dp", 3, 42, "train.py:88")
OVER = "The group can no longer be used."
LATE = "Read the log of the missing rank first; if it is only slow, raise the timeout of the group."
IN_BARRIER = RankPosition(41, "barrier #41 (eval.py:7)", inside=True, seconds=3.14)
DONE = RankPosition(41, "broadcast #41 (train.py:80)")
ONE = RankCall("all_reduce(SUM) of float32 (4,) at train.py:88", "all_reduce #42 (train.py:88)")
OTHER = RankCall("barrier at eval.py:7", "barrier #42 (eval.py:7)")

REPORTS = {
    "mismatch": (
        FailureReport("mismatch", calls={0: OTHER, 1: ONE, 2: ONE}),
        MismatchError,
        "the ranks' calls do not match; no tensor was changed.\n"
        f"  rank 0: {OTHER.text}\n  rank 1: {ONE.text}\n  rank 2: {ONE.text}\n"
        "Rank 0 is in barrier #42 (eval.py:7), which ranks 1, 2 have not reached: they are in all_reduce #42 "
        "(train.py:88).\n"
        f"{DIVERGENCE_ADVICE} {ORDER_ADVICE}",
    ),
    "a rank that called nothing": (
        FailureReport("mismatch", calls={0: ONE, 1: NOTHING_CALLED}),
        MismatchError,
        f"the ranks' calls do not match; no tensor was changed.\n  rank 0: {ONE.text}\n  rank 1: nothing yet\n"
        "Rank 0 is in all_reduce #42 (train.py:88), which rank 1 has not reached: it has called nothing yet.\n"
        f"{DIVERGENCE_ADVICE} {ORDER_ADVICE}",
    ),
    "lines that are not known": (
        FailureReport("mismatch", calls={0: RankCall("all_to_all that sends 8 bytes to rank 1"), 1: ONE}),
        MismatchError,
        "the ranks' calls do not match; no tensor was changed.\n"
        f"  rank 0: all_to_all that sends 8 bytes to rank 1\n  rank 1: {ONE.text}\n"
        "Make every rank call the same operation with the same dtype, size and options, in the same order.",
    ),
    "a message that does not fit": (
        FailureReport("mismatch", calls={0: RankCall("send"), 1: RankCall("recv")}, is_collective=False),
        MismatchError,
        "send and recv do not match; the tensor was not changed.\n  rank 0: send\n  rank 1: recv\n"
        "Make the receiver's tensor as large as the sender's, with the same dtype.",
    ),
    "lost": (
        FailureReport("lost", (1,), {1: "pid 17 on Node3"}, {1: DONE}, reason="killed by SIGKILL"),
        PeerLostError,
        "rank 1 (pid 17 on Node3) is gone: killed by SIGKILL.\n"
        "It last finished broadcast #41 (train.py:80). Read its log first.",
    ),
    "lost, and nobody knows where": (
        FailureReport("lost", (1,), {1: "pid 17"}, reason=KILLED),
        PeerLostError,
        "rank 1 (pid 17) is gone: it ended without notice (killed, or crashed).\nRead its log first.",
    ),
    "lost, because its data ended": (
        FailureReport(
            "lost", (1,), {1: "pid 17"}, {1: RankPosition(41, "all_reduce #41 (train.py:88)")}, reason=QUIET_END
        ),
        PeerLostError,
        f"rank 1 (pid 17) is gone: {QUIET_END}, after all_reduce #41, on the line that this rank has reached.\n"
        f"If it ran out of data: {JOIN_ADVICE}\nOtherwise read its log first.",
    ),
    "interrupted": (
        FailureReport("interrupted", (1,), {1: "pid 17"}, {1: IN_BARRIER}, reason="KeyboardInterrupt"),
        PeerLostError,
        "rank 1 (pid 17) was interrupted (KeyboardInterrupt) while the group waited; it has been in barrier #41 "
        "(eval.py:7) for 3.1 s.",
    ),
    "late": (
        FailureReport("late", (1, 2), {1: "pid 17 on Node3", 2: "pid 18"}, {1: IN_BARRIER}, timeout_s=30.0, waiter=3),
        DeadlineError,
        "no answer from ranks 1, 2 within 30.0 s.\n"
        "Rank 1 (pid 17 on Node3) has been in barrier #41 (eval.py:7) for 3.1 s.\n"
        f"Rank 2 (pid 18) does not answer: it hangs, is stopped, or is cut off.\n{LATE}\n{DIVERGENCE_ADVICE}",
    ),
    "late, and another rank gave up": (
        FailureReport("late", (1,), {1: "pid 17"}, {1: DONE}, waiter=0, is_collective=False),
        DeadlineError,
        "no answer from rank 1; rank 0 gave up waiting.\n"
        f"Rank 1 (pid 17) last finished broadcast #41 (train.py:80).\n{LATE}",
    ),
    "late, and now all have come": (
        FailureReport("late", timeout_s=2.0),
        DeadlineError,
        "the operation did not complete within 2.0 s; every rank has arrived since.\n"
        "A rank or the network is too slow: raise the timeout of the group.",
    ),
    "no memory": (
        FailureReport("no memory", (1,), {1: "pid 17"}),
        PhalanxError,
        "rank 1 (pid 17) had no memory for a message that arrived before its receive.",
    ),
    "broken": (FailureReport("broken", reason="MPI failed: it did"), PhalanxError, "MPI failed: it did."),
    "internal": (
        FailureReport("internal", reason="the core answered 99"),
        InternalError,
        "the core answered 99. Please report this with the program that shows it.",
    ),
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_becomes_an_error_with_its_sentences_and_its_fields(name):
    report, kind, text = REPORTS[name]
    error = report.error(HERE)
    assert type(error) is kind
    assert str(error) == f"all_reduce #42 in group 'dp' on rank 3: {text} {OVER}"
    assert (error.operation, error.seq, error.group, error.rank) == ("all_reduce", 42, "dp", 3)
    assert error.call_site == "train.py:88"
    assert error.positions == {rank: str(position) for rank, position in report.positions.items()}
    if kind is MismatchError:
        assert error.calls == {rank: call.text for rank, call in report.calls.items()}
    elif kind in (PeerLostError, DeadlineError):
        assert (error.ranks if kind is PeerLostError else error.missing) == report.ranks


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_travels_to_other_hosts_and_its_error_to_other_processes(name):
    report, _, _ = REPORTS[name]
    there = FailureReport.from_json(report.to_json())
    assert there == report
    error = there.error(HERE)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_gradients_and_buffers_may_have_changed_before_a_mismatch_is_seen():
    for call, changed in (
        ("gradients at train.py:9", "some gradients may already be averaged"),
        ("broadcast_buffers(src=0) of bytes (8,) at train.py:9", "some buffers may already hold the root's values"),
    ):
        text = FailureReport("mismatch", calls={0: RankCall(call, "x"), 1: ONE}).message(HERE)
        assert f"the ranks' calls do not match; {changed}.\n" in text


def test_an_interrupted_wait_says_for_whom_it_was():
    assert describe_interruption(HERE, KeyboardInterrupt(), {1: "pid 17"}, {1: DONE}) == (
        "all_reduce #42 in group 'dp' on rank 3: interrupted (KeyboardInterrupt) while waiting for rank 1.\n"
        f"Rank 1 (pid 17) last finished broadcast #41 (train.py:80).\n{OVER}"
    )
    assert describe_interruption(HERE, KeyboardInterrupt(), {}, None) == (
        f"all_reduce #42 in group 'dp' on rank 3: interrupted (KeyboardInterrupt) while under way.\n{OVER}"
    )


def test_a_long_wait_says_for_whom_or_where_it_is():
    assert describe_wait("barrier #2", "dp", 0, [1, 2], 5.0, "rank 1 has called nothing yet") == (
        "barrier #2 in group 'dp' on rank 0: waiting for ranks 1, 2 for 5 s (rank 1 has called nothing yet)"
    )
    assert describe_wait("barrier #2", "dp", 0, [], 5.0, "other ranks") == (
        "barrier #2 in group 'dp' on rank 0: waiting for other ranks for 5 s"
    )


@pytest.mark.parametrize(
    ("ranks", "name", "prefix"),
    [
        ([3], "rank 3", "3"),
        ([1, 0], "ranks 0, 1", "0-1"),
        ([1, 2, 3], "ranks 1, 2, 3", "1-3"),
        ([0, 1, 2, 3, 7], "ranks 0-3, 7", "0-3,7"),
        (range(64), "ranks 0-63", "0-63"),
        ([], "ranks ", ""),
    ],
)
def test_ranks_are_named_in_sentences_and_in_front_of_lines(ranks, name, prefix):
    assert (name_ranks(ranks), format_ranks(ranks)) == (name, prefix)
