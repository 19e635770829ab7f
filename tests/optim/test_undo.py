"""Ranks that die inside an update: the others hold the old step or the new one, whole."""

import os
import random
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.comparisons import all_equal
from tests.on_ranks import on_ranks
from tests.optim.models import backward, wrapped
from tests.training import copy_parameters
from torch import optim

from phalanx import DeadlineError, PeerLostError, ZeroRedundancyOptimizer, _core
from phalanx.optim import undo
from phalanx.testing import run_ranks

VICTIM = 1


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


def _die_after_saying(phase):
    """Die when the phase has just been written."""
    say = undo.Undo._publish

    def said(self, spoken):
        say(self, spoken)
        if spoken == phase and self._number == 2:
            _die()

    undo.Undo._publish = said


def _die_before_saying(phase):
    say = undo.Undo._publish

    def silent(self, spoken):
        if spoken == phase and self._number == 2:
            _die()
        say(self, spoken)

    undo.Undo._publish = silent


def _die_while_saving():
    def save(self, rank):
        start, stop = self.ranges[rank][0]
        half = (start + stop) // 2
        self.backup[start:half].copy_(self.memory[start:half])
        _die()

    undo._Region.save = save


class HalfWay(optim.SGD):
    """Updates its first piece, writes nonsense into a half of its second, and dies."""

    def step(self, closure=None):
        pieces = self.param_groups[0]["params"]
        if torch.distributed.get_rank() == VICTIM and len(self.state) and pieces[0].grad is not None:
            with torch.no_grad():
                pieces[0].add_(1.0)
                pieces[-1].view(-1)[: pieces[-1].numel() // 2] = float("nan")
            _die()
        super().step()


WINDOWS = {
    "before it arrives": (lambda: _die_before_saying(undo._ARRIVED), "old"),
    "before the first sync": (lambda: _die_after_saying(undo._ARRIVED), "old"),
    "while it saves": (_die_while_saving, "old"),
    "before it says that it has saved": (lambda: _die_before_saying(undo._SAVED), "old"),
    "after it has saved": (lambda: _die_after_saying(undo._SAVED), "old"),
    "half way": (lambda: None, "old"),
    "after the update": (lambda: _die_before_saying(undo._DONE), "old"),
    "before the second sync": (lambda: _die_after_saying(undo._DONE), "new"),
}


@pytest.mark.slow(but=("half way-False", "before the second sync-True"))
@pytest.mark.parametrize(
    ("window", "offload"),
    [*((window, False) for window in WINDOWS), ("half way", True), ("before the second sync", True)],
)
def test_a_rank_killed_in_the_update_leaves_one_whole_step(window, offload):
    arm, outcome = WINDOWS[window]

    def updated(rank, world_size):
        torch.manual_seed(0)
        ddp, plain = wrapped(), wrapped()
        optimizer_class = HalfWay if window == "half way" else optim.SGD
        options = {"lr": 0.1, "momentum": 0.9, "fused": False}
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class, offload=offload, **options)
        reference = optim.SGD(plain.parameters(), **options)
        for step in range(2):
            if step == 1 and rank == VICTIM:
                arm()
            backward(ddp, rank, step)
            old = copy_parameters(plain)
            for mine, shared in zip(plain.parameters(), ddp.parameters(), strict=True):
                mine.grad = None if shared.grad is None else shared.grad.clone()
            reference.step()
            if step == 0:
                optimizer.step()
                assert all_equal(copy_parameters(ddp), copy_parameters(plain))
        with pytest.raises(PeerLostError) as lost:
            optimizer.step()
        assert "rank 1" in str(lost.value)
        got = copy_parameters(ddp)
        return "old" if all_equal(got, old) else "new" if all_equal(got, copy_parameters(plain)) else "torn"

    assert run_ranks(updated, 3, lost=(VICTIM,)) == [outcome, None, outcome]


class Stuck(optim.SGD):
    """Stops half way on one rank, until the others have given up."""

    def step(self, closure=None):
        super().step()
        pieces = self.param_groups[0]["params"]
        if dist.get_rank() == VICTIM and any(piece.grad is not None for piece in pieces):
            with torch.no_grad():
                pieces[0].add_(1.0)
            dist.group.WORLD.get_group_store().wait(["0", "2"], timedelta(seconds=100))


def test_a_rank_that_is_stuck_in_the_update_is_waited_for_as_long_as_the_timeout_says(monkeypatch):
    """After the group's timeout it was waited for another 30 s, and then the error said "within 6.0 s"."""
    monkeypatch.setattr(undo, "_TIMEOUT_S", 3600.0)

    def updated(rank, world_size):
        ddp = wrapped()
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), Stuck, lr=0.1)
        backward(ddp, rank, 0)
        old = copy_parameters(ddp)
        dist.barrier()
        if rank != VICTIM:
            dist.group.WORLD.set_timeout(timedelta(seconds=1))
        with pytest.raises(DeadlineError) as late:
            optimizer.step()
        survived = all_equal(copy_parameters(ddp), old)
        dist.group.WORLD.get_group_store().set(str(rank), "over")
        assert "no answer from rank 1" in str(late.value) or rank == VICTIM
        return survived

    assert run_ranks(updated, 3)[::2] == [True, True]


def _sleep_until_woken():
    dist.group.WORLD.get_group_store().set("pid", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep_before_saying(phase):
    say = undo.Undo._publish

    def late(self, spoken):
        if spoken == phase:
            _sleep_until_woken()
        say(self, spoken)

    undo.Undo._publish = late


class Dozing(optim.SGD):
    """Is stopped half way through its second piece, and then goes on as if nothing had happened."""

    def step(self, closure=None):
        if dist.get_rank() == VICTIM:
            piece = self.param_groups[0]["params"][-1].view(-1)
            with torch.no_grad():
                piece[: len(piece) // 2] += 1.0
            _sleep_until_woken()
        super().step()


STOPS = {
    "before it says that it has saved": lambda: _sleep_before_saying(undo._SAVED),
    "half way": lambda: None,
    "before it says that it is done": lambda: _sleep_before_saying(undo._DONE),
}


@pytest.mark.slow(but=("half way",))
@pytest.mark.parametrize("stop", STOPS)
@on_ranks(3)
def test_a_rank_that_was_stopped_in_the_update_comes_back_to_the_step_that_the_others_hold(rank, world_size, stop):
    """It woke when they had timed out and undone theirs, saw that all had written, and took the new step for whole.

    Its own slices were then of the new step, and all others of the old one, on every rank.
    """
    ddp = wrapped()
    optimizer_class = Dozing if stop == "half way" else optim.SGD
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class, lr=0.1)
    store = dist.group.WORLD.get_group_store()
    backward(ddp, rank, 0)
    old = copy_parameters(ddp)
    dist.barrier()
    if rank == VICTIM:
        STOPS[stop]()
    else:
        dist.group.WORLD.set_timeout(timedelta(seconds=1))
    with pytest.raises((DeadlineError, PeerLostError)):
        optimizer.step()
    alone = all_equal(copy_parameters(ddp), old)
    store.set(f"settled {rank}", "")
    store.wait([f"settled {other}" for other in range(world_size) if other != VICTIM])
    if rank == 0:
        os.kill(int(store.get("pid")), signal.SIGCONT)
    store.wait([f"settled {VICTIM}"])
    assert (alone, all_equal(copy_parameters(ddp), old)) == (True, True)


def test_what_one_rank_has_decided_holds_for_those_who_pass_the_sync_as_well():
    """Ranks looked at the words at different times, and each decided for itself."""

    class Impatient(optim.SGD):
        def step(self, closure=None):
            super().step()
            if dist.get_rank() == 0 and undone:
                while min(undone[0]._word(rank) for rank in (1, 2)) < 8 + undo._DONE:
                    os.sched_yield()
                undone[0]._decide(undo._OLD)

    undone = []

    def updated(rank, world_size):
        ddp = wrapped()
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), Impatient, lr=0.1)
        backward(ddp, rank, 0)
        optimizer.step()
        undone.append(optimizer._undo)
        old = copy_parameters(ddp)
        with pytest.raises(PeerLostError, match="rank 0 undid this step after a failure"):
            optimizer.step()
        store = dist.group.WORLD.get_group_store()
        store.set(f"settled {rank}", "")
        store.wait([f"settled {other}" for other in range(world_size)])
        return all_equal(copy_parameters(ddp), old)

    assert run_ranks(updated, 3) == [True] * 3


def test_a_rank_killed_at_any_moment_leaves_one_whole_step(kill):
    delay = random.Random(kill).uniform(0.001, 0.05)
    found = run_ranks(train_until_killed, 3, delay, lost=(VICTIM,))
    assert found[0] == found[2] != "torn"


def train_until_killed(rank, world_size, delay):
    ddp, plain = wrapped(), wrapped()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), optim.AdamW, fused=True)
    reference = optim.AdamW(plain.parameters(), fused=True)
    step, old, new = 0, None, copy_parameters(plain)
    try:
        while True:
            optimizer.zero_grad()
            backward(ddp, rank, step)
            for mine, shared in zip(plain.parameters(), ddp.parameters(), strict=True):
                mine.grad = None if shared.grad is None else shared.grad.clone()
            old = new
            reference.step()
            new = copy_parameters(plain)
            optimizer.step()
            step += 1
            if step == 1 and rank == VICTIM:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
                signal.setitimer(signal.ITIMER_REAL, delay)
    except PeerLostError:
        got = copy_parameters(ddp)
        return step if all_equal(got, old) else step + 1 if all_equal(got, new) else "torn"


def test_a_word_is_a_whole_one():
    word = torch.zeros(2, dtype=torch.int64)
    _core.store_word(word.data_ptr(), 2**63 - 1)
    assert _core.load_word(word.data_ptr()) == word[0].item() == 2**63 - 1
    assert _core.compare_exchange_word(word.data_ptr(), 1, 2) == 2**63 - 1 == word[0].item()
    assert _core.compare_exchange_word(word.data_ptr(), 2**63 - 1, 2) == 2**63 - 1
    assert word.tolist() == [2, 0]
    for address in (0, word.data_ptr() + 4):
        with pytest.raises(ValueError, match="a word lies at a multiple of 8"):
            _core.compare_exchange_word(address, 0, 1)
        with pytest.raises(ValueError, match="a word lies at a multiple of 8"):
            _core.load_word(address)
        with pytest.raises(ValueError, match="a word lies at a multiple of 8"):
            _core.store_word(address, 1)
