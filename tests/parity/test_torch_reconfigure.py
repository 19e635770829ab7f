"""A group gets other members while it lives (`torch.distributed._reconfigure`, torch 2.14 and on), as Gloo's does."""

import os
import random
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from phalanx.errors import DeadlineError, PhalanxError
from phalanx.testing import run_ranks

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="before torch 2.14 no group gets other members"
)
WORLD = 4


def _begin(rank, backend, path, **kwargs):
    store = dist.FileStore(path, -1)
    kwargs = {"timeout": timedelta(seconds=40), "enable_reconfigure": True, **kwargs}
    dist.init_process_group(backend, store=store, rank=rank, world_size=WORLD, **kwargs)
    return dist.FileStore(f"{path}-handles", -1)


def _exchange(meeting, step, me, members):
    """The members' handles, by the process's number, which is nobody's rank for long."""
    meeting.set(f"{step}/{me}", dist._get_reconfigure_handle())
    return [meeting.get(f"{step}/{member}").decode() for member in members]


def _use(me):
    """Return the results of the group's operations on the values of this process."""
    group, world_size = dist.group.WORLD, dist.get_world_size()
    total, first, parts = (
        torch.tensor([me + 1.0]),
        torch.tensor([me + 1.0]),
        [torch.empty(1) for _ in range(world_size)],
    )
    dist.all_reduce(total, async_op=True).wait()
    dist.broadcast(first, 0)
    dist.all_gather(parts, torch.tensor([me * 10.0]))
    received = torch.tensor([-1.0])
    if world_size > 1:
        right, left = (dist.get_rank() + 1) % world_size, (dist.get_rank() - 1) % world_size
        work = dist.isend(torch.tensor([float(me)]), right)
        dist.recv(received, left)
        work.wait()
    values = total.item(), first.item(), [p.item() for p in parts], received.item()
    return dist.get_rank(), world_size, group.rank(), group.size(), values


def _reduce_for_long():
    for _ in range(10_000):
        dist.all_reduce(torch.ones(1))


def _live(me, world_size, backend, path, plan):
    """Be a member in each step of the plan that names this process."""
    meeting = _begin(me, backend, path)
    lives = []
    for step, (members, as_set) in enumerate(plan):
        if me in members:
            handles = _exchange(meeting, step, me, members)
            assert dist._reconfigure(100 + step, set(handles) if as_set else handles).wait()
            lives.append((step, *_use(me)))
    if meeting.add("over", 1) == world_size:
        meeting.set("everybody", "1")
    meeting.wait(["everybody"])  # whoever ends earlier takes Gloo's connections along
    dist.destroy_process_group()
    return lives


@pytest.mark.parametrize("seed", range(3))
def test_random_memberships_give_gloos_values(seed, tmp_path):
    """Shrunk, grown, in another order, a set instead of a list: five steps, by chance."""
    draw = random.Random(seed)
    plan = [(list(range(WORLD)), False)]
    plan += [(draw.sample(range(WORLD), draw.randint(1, WORLD)), False) for _ in range(3)]
    plan += [(draw.sample(range(WORLD), WORLD), True)] if seed == 0 else [([2, 0], False), ([3, 1, 0, 2], False)]
    theirs, ours = (
        run_ranks(_live, WORLD, backend, str(tmp_path / backend), plan, init=False) for backend in ("gloo", "phalanx")
    )
    if seed == 0:  # a set's order is the backend's own: that of the ranks until then, where they differ
        theirs, ours = ([lives[:-1] for lives in result] for result in (theirs, ours))
    assert ours == theirs


@pytest.mark.parametrize("backend", ["gloo", "phalanx"])
def test_another_process_takes_the_place_of_a_killed_one(backend, tmp_path):
    def body(me, world_size, path):
        if me == 3:  # begins as what process 2 was, when that is gone
            dist.FileStore(f"{path}-handles", -1).get("killed")
            meeting = _begin(2, backend, path)
        else:
            meeting = _begin(me, backend, path)
            handles = _exchange(meeting, "before", me, [0, 1, 2])
            dist._reconfigure(1, handles).wait()
            before = _use(me)
        if me == 2:
            meeting.set("killed", "1")
            os.kill(os.getpid(), signal.SIGKILL)
        if me != 3:
            with pytest.raises(RuntimeError):
                _reduce_for_long()
        handles = _exchange(meeting, "after", me, [0, 1, 3])
        dist._reconfigure(2, handles).wait()
        after = _use(me)
        dist.barrier()
        return after if me == 3 else (before, after)

    first, second, _, third = run_ranks(body, WORLD, str(tmp_path / "store"), init=False, lost={2})
    assert [r[0][0] for r in (first, second)] == [0, 1]
    assert [first[1][0], second[1][0], third[0]] == [0, 1, 2]
    assert {v[4][0] for v in (first[1], second[1], third)} == {1.0 + 2.0 + 4.0}


def test_what_makes_no_sense_is_refused_and_changes_nothing(tmp_path):
    def body(rank, world_size, backend, path):
        meeting = _begin(rank, backend, path)
        told = []

        def try_(what, *args, **kwargs):
            try:
                what(*args, **kwargs)
                told.append("ok")
            except RuntimeError as error:
                told.append(type(error).__mro__[-4:])

        try_(dist.all_reduce, torch.ones(1))  # nobody is known yet
        mine = dist._get_reconfigure_handle()
        handles = _exchange(meeting, 0, rank, [0, 1])
        try_(dist._reconfigure, 1, [])
        try_(dist._reconfigure, 1, [mine, mine])
        try_(dist._reconfigure, 1, ["nonsense"])
        try_(dist._reconfigure, 1, [handles[1 - rank]])
        dist._reconfigure(2, handles).wait()
        try_(dist._reconfigure, 3, handles)  # which were those of before
        total = torch.ones(1)
        dist.all_reduce(total)
        dist.barrier()
        return [t == "ok" for t in told], total.item(), dist._supports_reconfigure()

    for backend in ("gloo", "phalanx"):
        results = run_ranks(body, 2, backend, str(tmp_path / backend), init=False)
        assert results == [([False] * 6, 2.0, True)] * 2


def test_a_member_that_does_not_come_is_named_and_the_group_can_meet_others(tmp_path):
    def body(rank, world_size, path):
        meeting = _begin(rank, "phalanx", path)
        handles = _exchange(meeting, 0, rank, [0, 1, 2])
        messages = []
        if rank != 1:
            with pytest.raises(DeadlineError) as caught:
                dist._reconfigure(1, handles, timeout=timedelta(seconds=2))
            assert caught.value.missing == (1,)
            with pytest.raises(PhalanxError, match="_reconfigure on all members, with a new uuid"):
                dist.all_reduce(torch.ones(1))
            with pytest.raises(PhalanxError, match="uuid 1 is already used"):
                dist._reconfigure(1, _exchange(meeting, 1, rank, [0, 2]))
            dist._reconfigure(2, _exchange(meeting, 2, rank, [0, 2])).wait()
            messages.append(_use(rank)[4][0])
        return messages

    assert run_ranks(body, 3, str(tmp_path / "store"), init=False) == [[4.0], [], [4.0]]


def test_a_group_that_was_not_made_for_it_says_so():
    def body(rank, world_size):
        with pytest.raises(RuntimeError):
            dist._get_reconfigure_handle()
        return dist._supports_reconfigure()

    assert run_ranks(body, 2) == [False, False]
