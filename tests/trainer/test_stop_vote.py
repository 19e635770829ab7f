"""A Trainer whose ranks are asked to stop in different steps, or only some of them: all stop after the same one."""

import os
import random
import signal
import threading

import pytest
import torch
from tests.small_models import make_data
from tests.trainer.trainers import make, weights
from torch.utils.data import DataLoader

from phalanx import strategies
from phalanx.testing import run_ranks
from phalanx.trainer import Callback, LambdaCallback
from phalanx.trainer.stop_vote import plan_interval

HOWS = ("sigterm", "handler", "callback", "thread", "validation")


class Ask(Callback):
    """Asks for a stop, after an update of this rank's own or in its first validation."""

    def __init__(self, how, at):
        self.how, self.at = how, at

    def on_epoch_begin(self, trainer):
        if self.how == "handler":
            signal.signal(signal.SIGTERM, lambda *_: trainer.stop("SIGTERM"))

    def ask(self, trainer):
        if self.how in ("sigterm", "handler"):
            os.kill(os.getpid(), signal.SIGTERM)
        elif self.how == "thread":
            thread = threading.Thread(target=trainer.stop, args=("told to",))
            thread.start()
            thread.join()
        else:
            trainer.stop("told to")

    def on_validation_end(self, trainer, metrics):
        if self.how == "validation" and self.at is not None:
            self.ask(trainer)


def train(rank, world_size, folder, save_every, how="", at=(), name="mirrored"):
    """Five updates in each of four epochs; rank r asks in its batch number at[r], if that is not None."""
    mine = at[rank] if at else None
    asking, batches = Ask(how, mine), [0]
    strategy = strategies.get(name, launch=False)
    trainer = make(strategy=strategy, checkpoint=folder, max_epochs=4, callbacks=[asking], save_every=save_every)
    loss_of = strategy._loss_of

    def asking_loss(model, batch):
        batches[0] += 1
        if batches[0] == mine and how not in ("callback", "validation"):
            asking.ask(trainer)
        return loss_of(model, batch)

    strategy._loss_of = asking_loss
    if how == "callback":
        trainer.callbacks.append(
            LambdaCallback(on_step_end=lambda trainer, loss: asking.ask(trainer) if trainer.step == mine else None)
        )
    code = None
    try:
        trainer.fit(DataLoader(make_data(), 18, shuffle=True), DataLoader(make_data(), 90))
    except SystemExit as end:
        code = end.code
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    why = trainer._state.why_stopped  # what the ranks have agreed on
    return trainer.step, why, code, weights(trainer), max(map(os.path.basename, trainer._manager.checkpoints()))


@pytest.mark.slow(but=("2-callback",))
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_stop_after_the_same_step_whichever_are_asked_and_when(tmp_path, seed, how):
    """A stop that ranks were asked for in different steps was lost: they formed their group again, and went on."""
    rng = random.Random(f"{seed} {how}")
    world_size = rng.choice([1, 2, 3])
    at = [rng.choice([None, rng.randint(1, 14)]) for _ in range(world_size)]
    if not any(at):
        at[rng.randrange(world_size)] = 3
    save_every = rng.choice(["epoch", 5])
    ends = run_ranks(train, world_size, tmp_path / "a", save_every, how, at)
    assert len({(step, why, code, saved) for step, why, code, _, saved in ends}) == 1, ends
    step, why, code, _, saved = ends[0]
    first = min(number for number in at if number)
    assert why == ("SIGTERM" if how in ("sigterm", "handler") else "told to")
    assert code == (os.EX_TEMPFAIL if how == "sigterm" else None)
    assert saved.endswith(f"-step-{step}")
    assert (step == 5) if how == "validation" else (first <= step <= first + 16)
    if how == "callback":
        assert step == first  # the ranks vote behind each call of on_step_end
    resumed = run_ranks(train, world_size, tmp_path / "a", save_every)
    undisturbed = run_ranks(train, world_size, tmp_path / "b", save_every)
    assert [end[0] for end in resumed] == [end[0] for end in undisturbed] == [20] * world_size
    for mine, theirs in zip(resumed, undisturbed, strict=True):
        assert torch.equal(mine[3], theirs[3])


@pytest.mark.parametrize(("save_every", "asked", "last"), [(3, 2, 3), ("epoch", 4, 5)])
def test_ranks_that_train_apart_stop_together_at_the_next_checkpoint_or_validation(tmp_path, save_every, asked, last):
    """A rank that was asked saved at once, and met the others' rounds: MismatchError, and a new group, endlessly."""
    ends = run_ranks(train, 2, tmp_path, save_every, "callback", [None, asked], "local_sgd")
    assert [(step, why) for step, why, *_ in ends] == [(last, "told to")] * 2


def test_ranks_vote_each_tenth_of_a_second_and_at_least_each_sixteenth_step():
    assert plan_interval(0, 0.0) == plan_interval(1, 1.0) == plan_interval(1, 0.1) == plan_interval(3, 0.25) == 1
    assert plan_interval(1, 0.05) == 2
    assert plan_interval(4, 0.04) == 10
    assert plan_interval(16, 0.001) == plan_interval(1, 0.00625) == 16


def test_a_script_that_handles_sigterm_itself_keeps_its_handler(tmp_path):
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append("it"))
    try:
        trainer = make(
            checkpoint=tmp_path, callbacks=[LambdaCallback(on_step_end=lambda *_: os.kill(os.getpid(), signal.SIGTERM))]
        )
        trainer.fit(DataLoader(make_data(), 90))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert (received, trainer.why_stopped) == (["it"], "")


def test_the_default_action_of_sigterm_is_back_behind_a_fit(tmp_path):
    trainer = make(checkpoint=tmp_path)
    trainer.fit(DataLoader(make_data(), 90))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
