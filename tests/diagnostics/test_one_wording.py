"""The same mistake is told in the same words whatever carries the group: shared memory, hosts, Gloo alone.

There were three wordings: only shared memory said where the ranks diverged, whose timeout to raise, and what a rank
that was lost had done last.
"""

import re
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.system.hosts_jobs import on_hosts

from phalanx._comm.backend import create
from phalanx.errors import PhalanxError
from phalanx.testing import run_ranks, why_no_hosts

ADVICE = (
    "Only some ranks reach a call under `if rank == 0`, or under another condition that not every rank meets.\n"
    "Move the call out of the condition, or give those ranks their own group (dist.new_group). "
    "The group can no longer be used."
)
ORDER = "If every rank makes these calls, make them in the same order: a loop over a set has no fixed order."


def error_of(call):
    """What `call` raises, without what differs from run to run: processes, numbers, lines and the group's name."""
    with pytest.raises(PhalanxError) as caught:
        call()
    error = caught.value
    assert str(error).startswith(f"{error.operation} #{error.seq} in group {error.group!r} on rank {error.rank}: ")
    assert error.call_site.rpartition(":")[0].endswith("test_one_wording.py")
    text = re.sub(r"\(pid \d+[^)]*\)", "(pid n)", str(error))
    text = re.sub(r"[^\s(]*(test_one_wording\.py):\d+", r"\1", text)
    text = re.sub(r"group '\d+'", "group 'g'", re.sub(r"#\d+", "#n", text))  # a transport may count its own
    return type(error).__name__, text, list(error.positions)


def mistakes(rank, folder):
    """Each in a group of its own; two ranks."""
    seen = {}
    group = dist.new_group()
    dist.barrier(group)
    call = dist.barrier if rank == 1 else dist.all_reduce
    seen["mismatch"] = error_of(lambda: call(group) if rank == 1 else call(torch.ones(2, 3), group=group))

    group = dist.new_group()
    dist.barrier(group)
    seen["size"] = error_of(lambda: dist.all_reduce(torch.ones(2 + rank), group=group))

    group = dist.new_group()
    dist.barrier(group)
    group.set_timeout(timedelta(seconds=0.5))  # for what is to fail, not for what leads to it
    given_up = Path(folder, "given up")
    if rank == 0:
        seen["late"] = error_of(lambda: dist.all_reduce(torch.ones(2), group=group))
        given_up.touch()
    else:
        while not given_up.exists():
            time.sleep(0.01)

    group = dist.new_group()
    dist.barrier(group)
    if rank == 1:
        dist.destroy_process_group(group)
    else:
        seen["left"] = error_of(lambda: dist.all_reduce(torch.ones(2), group=group))
    dist.barrier()
    return seen


def told_by(transport, folder, monkeypatch):
    """What each of two ranks is told of each mistake."""
    if transport == "Gloo":
        monkeypatch.setattr(create, "_core", None)  # as without a C compiler
    if transport in ("shared memory", "Gloo"):
        return run_ranks(lambda rank, world_size: mistakes(rank, folder), 2)
    if reason := why_no_hosts():
        pytest.skip(reason)
    return on_hosts((1, 1), lambda rank, world_size, machines: mistakes(rank, folder))


@pytest.mark.slow(but=("shared memory",))
@pytest.mark.parametrize("transport", ["shared memory", "hosts", "Gloo"])
def test_a_mistake_is_told_in_the_same_words(transport, tmp_path, monkeypatch):
    told = told_by(transport, tmp_path, monkeypatch)
    for rank in range(2):
        name = ("all_reduce", "barrier")[rank]
        assert told[rank]["mismatch"] == (
            "MismatchError",
            f"{name} #n in group 'g' on rank {rank}: the ranks' calls do not match; no tensor was changed.\n"
            "  rank 0: all_reduce(SUM) of float32 (2, 3) at test_one_wording.py\n"
            "  rank 1: barrier at test_one_wording.py\n"
            "Rank 0 is in all_reduce #n (test_one_wording.py), which rank 1 has not reached: it is in barrier #n "
            "(test_one_wording.py).\n" + ADVICE.replace(" The group", f" {ORDER} The group"),
            [],
        )
        assert told[rank]["size"] == (
            "MismatchError",
            f"all_reduce #n in group 'g' on rank {rank}: the ranks' calls do not match; no tensor was changed.\n"
            "  rank 0: all_reduce(SUM) of float32 (2,) at test_one_wording.py\n"
            "  rank 1: all_reduce(SUM) of float32 (3,) at test_one_wording.py\n"
            "Make every rank call the same operation with the same dtype, size and options, in the same order. "
            "The group can no longer be used.",
            [],
        )
    assert told[0]["late"] == (
        "DeadlineError",
        "all_reduce #n in group 'g' on rank 0: no answer from rank 1 within 0.5 s.\n"
        "Rank 1 (pid n) last finished barrier #n (test_one_wording.py).\n"
        "Read the log of the missing rank first; if it is only slow, raise the timeout of the group.\n"
        f"{ADVICE}",
        [1],
    )
    assert told[0]["left"] == (
        "PeerLostError",
        "all_reduce #n in group 'g' on rank 0: rank 1 (pid n) is gone: it left the group (destroy_process_group).\n"
        "It last finished barrier #n (test_one_wording.py). Read its log first.\n"
        "Rank 0 is in all_reduce #n (test_one_wording.py), which rank 1 can never reach.\n"
        f"{ADVICE}",
        [1],
    )
