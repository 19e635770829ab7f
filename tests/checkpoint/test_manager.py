"""The checkpoints of a run, in one process: what is saved comes back, and whatever goes wrong changes nothing."""

import functools
import multiprocessing
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.comparisons import assert_equal
from tests.on_ranks import on_ranks
from tests.training import copy_parameters, copy_state
from torch import nn

from phalanx.checkpoint import CheckpointManager, RandomState, background, load_checkpoint
from phalanx.errors import CheckpointError
from phalanx.testing import run_ranks

KINDS = pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])


def in_its_own_process(test):
    """torch's optimizers and torch.compile bring in its compiler, which sets environment variables."""

    @functools.wraps(test)
    def wrapper(**arguments):
        run_ranks(lambda rank, world_size: test(**arguments), 1, backend=None)

    return wrapper


def names(folder):
    return sorted(os.listdir(folder))


@KINDS
def test_what_was_saved_comes_back(tmp_path, sharded):
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "epoch": 3, "best": [0.5, None], "shape": (2, 3), "none": {}}
    manager = CheckpointManager(tmp_path / "run", sharded=sharded)
    assert manager.load() is None
    path = manager.save(7, state)
    restored = manager.load()
    assert (restored.step, restored.path) == (7, path)
    assert torch.equal(restored.state["model"].pop("w"), state["model"]["w"])
    assert restored.state == {**state, "model": {}}


@KINDS
def test_training_goes_on_while_it_is_written_and_the_checkpoint_is_of_the_call(tmp_path, sharded):
    weight = torch.zeros(1000)
    with CheckpointManager(tmp_path, sharded=sharded) as manager:
        for step in range(5):
            weight.fill_(step)
            manager.async_save(step, {"weight": weight})
            weight.fill_(-1)  # at once
        assert manager.wait() == manager.latest()
        assert manager.wait() is None
    assert torch.equal(CheckpointManager(tmp_path).load().state["weight"], torch.full((1000,), 4.0))
    assert not manager.is_saving


@KINDS
def test_the_newest_are_kept_and_latest_is_the_one_that_was_saved_last(tmp_path, sharded):
    """By step alone, who goes back to step 10 would have its new checkpoints removed before the old ones."""
    manager = CheckpointManager(tmp_path, keep=3, sharded=sharded)
    for step in (10, 20, 30, 5):
        manager.save(step, {"step": step})
    assert names(tmp_path) == ["00000002-step-20", "00000003-step-30", "00000004-step-5", "latest"]
    assert manager.latest() == tmp_path / "00000004-step-5"
    assert os.readlink(tmp_path / "latest") == "00000004-step-5"
    assert manager.load().step == 5
    assert manager.load(step=20).state == {"step": 20}
    manager.save(20, {"step": -20})
    assert manager.load(step=20).state == {"step": -20}, "of one step, the later one"
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 11 in .*; available steps: 5, 20, 30"):
        manager.load(step=11)


def test_all_are_kept_if_asked_for(tmp_path):
    manager = CheckpointManager(tmp_path, keep=None)
    for step in range(6):
        manager.save(step, {})
    assert len(manager.checkpoints()) == 6


def test_wrong_arguments_are_refused_at_the_door(tmp_path):
    for keep in (0, -1, 1.5):
        with pytest.raises(ValueError, match="keep must be 1 or more"):
            CheckpointManager(tmp_path, keep=keep)
    manager = CheckpointManager(tmp_path)
    with pytest.raises(ValueError, match="step must be an integer of 0 or more, got -1"):
        manager.save(-1, {})
    with pytest.raises(TypeError, match="parts must be a dict"):
        manager.async_save(1, [1])
    with pytest.raises(TypeError, match="the names of parts must be strings, got 1"):
        manager.save(1, {1: 2})
    assert names(tmp_path) == []
    assert manager.save(np.int64(3), {}).name == "00000001-step-3"


# --- parts -----------------------------------------------------------------------------------------------------------


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "random": RandomState()}


def train(parts, steps):
    for _ in range(steps):
        loss = parts["model"](torch.rand(6, 4) + random.random()).square().sum()
        parts["optimizer"].zero_grad()
        loss.backward()
        parts["optimizer"].step()
        parts["scheduler"].step()
    return copy_state(parts["model"])


@KINDS
@in_its_own_process
def test_a_run_that_goes_on_from_its_checkpoint_has_the_bits_of_one_that_never_stopped(tmp_path, sharded):
    manager = CheckpointManager(tmp_path, sharded=sharded)
    parts = build(0)
    train(parts, 3)
    manager.save(3, parts)
    expected = train(parts, 4)
    parts = build(1)
    assert manager.load(parts).step == 3
    assert_equal(train(parts, 4), expected)


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = nn.DataParallel(inner)
        self.module = nn.Linear(1, 1)  # the user's own name


@pytest.mark.slow(but=("whole",))
@KINDS
@in_its_own_process
def test_keys_have_no_trace_of_wrappers(tmp_path, sharded):
    model = nn.DataParallel(Wrapped(torch.compile(nn.Linear(2, 3), backend="eager")))
    keys = ["inner.weight", "inner.bias", "module.weight", "module.bias"]
    manager = CheckpointManager(tmp_path, sharded=sharded)
    manager.save(1, {"model": model})
    state = manager.load().state["model"]
    assert list(state) == keys
    plain = Wrapped(nn.Linear(2, 3))
    manager.load({"model": plain})
    other = nn.DataParallel(Wrapped(torch.compile(nn.Linear(2, 3), backend="eager")))
    manager.load({"model": other})
    for loaded in (plain, other):
        assert_equal(list(loaded.state_dict().values()), list(model.state_dict().values()))


def test_a_file_whose_keys_have_module_before_them_is_loaded_too(tmp_path):
    model = nn.DataParallel(nn.Linear(2, 3))
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"model": dict(model.state_dict())})  # a plain dict: left as it is
    assert list(manager.load().state["model"]) == ["module.weight", "module.bias"]
    other = nn.DataParallel(nn.Linear(2, 3))
    manager.load({"model": other})
    assert torch.equal(other.module.weight, model.module.weight)


@KINDS
@in_its_own_process
def test_what_does_not_fit_is_told_by_name_and_nothing_is_loaded(tmp_path, sharded):
    manager = CheckpointManager(tmp_path, sharded=sharded)
    manager.save(1, {"model": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False)), "epoch": 4})
    other = nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 1), nn.Linear(1, 1))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(other.parameters()), 1)
    with pytest.raises(CheckpointError) as caught:
        manager.load({"model": other, "scheduler": scheduler, "epoch": 0})
    text = str(caught.value)
    assert "4 missing from the checkpoint: model.1.bias, model.2.weight, model.2.bias, scheduler" in text
    assert "2 that do not fit: model.0.weight: (3, 2) in the checkpoint, (4, 2) here, model.0.bias: (3,)" in text
    assert "Nothing was loaded." in text
    assert all(parameter.eq(0).all() for parameter in other.parameters())

    restored = manager.load({"model": other, "scheduler": scheduler}, strict=False)
    assert restored.report.missing == ["model.1.bias", "model.2.weight", "model.2.bias", "scheduler"]
    assert len(restored.report.misshapen) == 2
    assert other[0].weight.eq(0).all()
    assert torch.equal(other[1].weight, restored.state["model"]["1.weight"])

    restored = manager.load({"model": nn.Linear(3, 1)}, strict=False)
    assert restored.report.unexpected == ["model.0.weight", "model.0.bias", "model.1.weight"]


@KINDS
@in_its_own_process
def test_an_optimizer_of_other_parameters_is_refused_before_the_model_is_loaded(tmp_path, sharded):
    parts = build(0)
    train(parts, 1)
    manager = CheckpointManager(tmp_path, sharded=sharded)
    manager.save(1, parts)
    model = build(1)["model"]
    before = copy_parameters(model)
    optimizer = torch.optim.AdamW([model[0].weight])
    with pytest.raises(
        CheckpointError, match=r"optimizer: parameter groups of \[6\] parameters in the checkpoint, \[1\] here"
    ):
        manager.load({"model": model, "optimizer": optimizer})
    assert_equal(copy_parameters(model), before)


class LowRank(torch.optim.SGD):
    """Keeps a moment that is smaller than its parameter, as GaLore does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] = parameter.detach().view(-1)[:2].clone()


def test_an_optimizer_of_another_library_may_have_states_of_any_shape(tmp_path):
    model = torch.nn.Linear(3, 4)
    optimizer = LowRank(model.parameters())
    optimizer.step()
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"optimizer": optimizer})
    other = LowRank(model.parameters())
    manager.load({"optimizer": other})
    assert_equal(other.state[model.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    plain = type("Mine", (torch.optim.SGD,), {})(model.parameters())  # with torch's step: its states have one shape
    with pytest.raises(CheckpointError, match=r"exp_avg: \(2,\) in the checkpoint, \(4, 3\) here"):
        manager.load({"optimizer": plain})


def test_a_device_that_is_not_here_is_refused(tmp_path):
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": torch.ones(2)})
    with pytest.raises(ValueError, match="map_location='cuda:99' cannot be used"):
        manager.load(map_location="cuda:99")
    assert manager.load(map_location="meta").state["w"].is_meta


# --- what goes wrong -------------------------------------------------------------------------------------------------


@KINDS
def test_without_failures_allowed_an_error_of_the_background_is_raised_by_the_next_call_and_once(tmp_path, sharded):
    manager = CheckpointManager(tmp_path, sharded=sharded, max_failures=0)
    manager.save(1, {"w": torch.ones(3)})
    (tmp_path / "00000002-step-2").write_text("in the way")  # no folder can have this name, and none was there before
    for entry in ("async", "wait"):
        manager.async_save(2, {"w": torch.zeros(3)})
        os.chmod(tmp_path, 0o700)
        if entry == "wait":
            with pytest.raises(CheckpointError, match=r"wait: step 2 to .* on rank 0: Not a directory.*unchanged"):
                manager.wait()
        else:
            with pytest.raises(CheckpointError, match=r"async_save: step 2 to .*Not a directory"):
                manager.async_save(3, {"w": torch.zeros(3)})
    assert manager.wait() is None
    os.unlink(tmp_path / "00000002-step-2")
    assert manager.load().step == 1
    manager.save(3, {"w": torch.zeros(3)})
    assert names(tmp_path) == ["00000001-step-1", "00000002-step-3", "latest"]


@on_ranks(2)
def test_an_optimizer_that_one_rank_alone_passes_is_refused_by_name(rank, tmp_path):
    """The message reported that the optimizer "updates other parameters on rank 1", which had passed none."""
    model = nn.Linear(2, 2)
    parts = {"model": model, "opt": torch.optim.SGD(model.parameters(), 0.1)}
    if rank:
        del parts["opt"]
    with pytest.raises(CheckpointError, match=r"rank 1 has no optimizer 'opt' in its parts, but rank 0 has"):
        CheckpointManager(tmp_path).save(1, parts)
    assert names(tmp_path) == []


def test_a_bit_generator_that_random_state_does_not_save_is_named():
    """The save ended in "ValueError: too many values to unpack"."""
    was = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64())
    try:
        with pytest.raises(CheckpointError, match="selected PCG64"):
            RandomState().state_dict()
    finally:
        np.random.set_bit_generator(was)


@KINDS
def test_what_could_not_be_loaded_again_is_refused_by_name(tmp_path, sharded):
    """A whole checkpoint was written first, and then refused by class, without the place of the value."""
    manager = CheckpointManager(tmp_path, sharded=sharded)
    manager.save(1, {"w": torch.ones(3)})
    for save in (manager.save, manager.async_save):
        with pytest.raises(CheckpointError) as caught:
            save(2, {"w": torch.ones(3), "args": {"out": [1, {"a": tmp_path}]}})
        assert str(caught.value) == (
            f"CheckpointManager.{save.__name__} on rank 0: state['args']['out'][1]['a'] is a pathlib.PosixPath, which "
            "could not be loaded again. Nothing was written. Save str(state['args']['out'][1]['a']) instead."
        )
    assert names(tmp_path) == ["00000001-step-1", "latest"]


@KINDS
def test_a_damaged_file_is_named_and_the_one_before_is_taken_if_the_user_allows_it(tmp_path, sharded):
    manager = CheckpointManager(tmp_path, sharded=sharded)
    for step in (1, 2):
        manager.save(step, {"w": torch.full((100,), float(step)), "step": step})
    model = nn.Linear(1, 1)
    for file in sorted(manager.latest().iterdir()):
        whole = file.read_bytes()
        for damaged in (whole[:-1], whole[: len(whole) // 2] + b"?" + whole[len(whole) // 2 + 1 :], b""):
            file.write_bytes(damaged)
            with pytest.raises(
                CheckpointError, match=rf"{re.escape(str(file))} .*fallback=True loads the previous one"
            ):
                manager.load({"model": model})
            with pytest.warns(
                UserWarning, match=rf"{re.escape(str(file))} .*Loading the previous one, 00000001-step-1"
            ):
                assert manager.load(fallback=True).state["step"] == 1
        file.unlink()
        with pytest.raises(CheckpointError, match=rf"{re.escape(str(file))} could not be read"):
            manager.load()
        file.write_bytes(whole)
    assert manager.load().step == 2


@KINDS
def test_one_bit_that_flipped_anywhere_is_found(tmp_path, sharded):
    manager = CheckpointManager(tmp_path, sharded=sharded)
    manager.save(1, {"model": {"w": torch.arange(50.0), "b": torch.ones(3, dtype=torch.bfloat16)}, "epoch": 1})
    dice = random.Random(5)
    files = sorted(manager.latest().iterdir())
    for _ in range(60):
        file = dice.choice(files)
        whole = file.read_bytes()
        at, bit = dice.randrange(len(whole)), dice.randrange(8)
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        with pytest.raises(CheckpointError, match=re.escape(file.name)):
            manager.load()
        file.write_bytes(whole)
    assert manager.load().step == 1


def test_plain_torch_opens_a_whole_one(tmp_path):
    manager = CheckpointManager(tmp_path, sharded=False)
    manager.save(3, {"model": nn.Linear(2, 2), "epoch": 3})
    state = torch.load(tmp_path / "latest" / "state.pt", weights_only=True)
    nn.Linear(2, 2).load_state_dict(state["model"])
    assert state["epoch"] == 3
    assert load_checkpoint(tmp_path / "latest" / "state.pt").keys() == state.keys()


def _save_in_child(manager, path):
    assert not manager.is_saving
    CheckpointManager(path).save(1, {"w": torch.ones(2)})


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("way", ["return", "exit"])
def test_a_process_that_is_forked_during_a_save_ends_and_leaves_the_save_alone(tmp_path, monkeypatch, way):
    """It waited at its end for a thread that only its parent has: workers of a DataLoader never ended."""
    gate, write, me = threading.Event(), background.Saving._run, os.getpid()

    def write_late(saving, report):
        assert os.getpid() != me or gate.wait(40)
        write(saving, report)

    monkeypatch.setattr(background.Saving, "_run", write_late)
    manager = CheckpointManager(tmp_path / "mine")
    manager.async_save(1, {"w": torch.ones(3)})
    if way == "return":
        child = multiprocessing.get_context("fork").Process(target=_save_in_child, args=(manager, tmp_path / "its"))
        child.start()
        child.join(30)
        code = child.exitcode
        child.kill()
        child.join()
        assert CheckpointManager(tmp_path / "its").load().state["w"].sum() == 2
    else:
        pid = os.fork()
        if pid == 0:
            threading._shutdown()  # what a process does that ends by itself
            os._exit(7)
        pidfd = os.pidfd_open(pid)
        if not select.select([pidfd], [], [], 30)[0]:
            os.kill(pid, signal.SIGKILL)
        os.close(pidfd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) - 7
    assert code == 0
    assert manager.is_saving
    gate.set()
    manager.wait()
    assert names(tmp_path / "mine") == ["00000001-step-1", "latest"]
    assert manager.load().state["w"].sum() == 3


@pytest.mark.slow
def test_a_script_that_ends_at_once_finishes_its_last_save(tmp_path):
    """The thread that writes would have died with the interpreter."""
    script = (
        "import sys, torch\n"
        "from phalanx.checkpoint import CheckpointManager\n"
        "manager = CheckpointManager(sys.argv[1])\n"
        "manager.async_save(1, {'w': torch.ones(3_000_000)})\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=600)
    assert names(tmp_path) == ["00000001-step-1", "latest"]
    assert CheckpointManager(tmp_path).load().state["w"].sum() == 3_000_000


@KINDS
def test_everything_is_synchronised_before_it_has_its_name_and_the_name_after(tmp_path, monkeypatch, sharded):
    """What a power cut leaves is what was synchronised: files, their folder, then the folder that holds the name."""
    fsync, rename, events = os.fsync, os.rename, []

    def recorded_fsync(fd):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{fd}"), ""))
        fsync(fd)

    def recorded_rename(source, destination):
        events.append(("rename", str(source), str(destination)))
        rename(source, destination)

    manager = CheckpointManager(tmp_path / "run", sharded=sharded)
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    monkeypatch.setattr(Path, "rename", os.rename)  # Python 3.10 keeps the function that `os` had
    path = manager.save(1, {"w": torch.ones(10), "step": 1})
    monkeypatch.undo()
    named = next(number for number, event in enumerate(events) if event[2] == str(path))
    draft, durable = events[named][1], []
    for kind, name, other in events[:named]:
        durable.append(name if kind == "fsync" else other if name in durable else "")
    files = {f"{draft}/{file.name}" for file in path.iterdir()}
    assert files <= set(durable)
    assert durable[-1] == draft, "the folder comes last"
    assert str(tmp_path) in durable, "the run's own folder is new, too"
    assert ("fsync", str(tmp_path / "run"), "") in events[named:]


class FailsOnOne:
    """A part whose state only the first rank can give."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        if self.rank:
            raise OSError("the stream is gone")
        return {"a": 1}

    def load_state_dict(self, state): ...


@on_ranks(2)
def test_a_part_that_fails_on_one_rank_beside_a_collective_part_is_an_error_on_all(rank, tmp_path):
    """The one rank's error and the others' random states were taken for each other."""
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match="on rank 1: OSError: the stream is gone"):
        manager.save(1, {"data": FailsOnOne(rank), "random": RandomState()})
    manager.save(2, {"random": RandomState()})
    assert manager.load().step == 2


@on_ranks(2)
def test_tensors_in_attributes_of_tensors_are_saved_meanwhile_too(rank, tmp_path):
    """async_save ended with a KeyError."""
    tensor = torch.ones(3)
    tensor.scale = torch.full((2,), 4.0)
    manager = CheckpointManager(tmp_path)
    manager.async_save(1, {"t": tensor})
    manager.wait()
    assert torch.equal(manager.load().state["t"], tensor)
