"""Strategies start a plain script on several ranks; a Trainer under `phalanx run` loses a rank and no bit."""

import contextlib
import functools
import io
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch._dynamo  # every optimizer imports it at its first step: once here, not once in each rank
from tests.system.trainer_runs import PHALANX, run
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import phalanx
from phalanx.strategies import ParameterServerStrategy, SingleDeviceStrategy
from phalanx.testing import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "strategies.py"


def _mirrored(rank, world_size):
    """What the example says on ranks that are there already, forked from here: none imports torch again."""
    sys.argv = [str(EXAMPLE), "mirrored", "--epochs", "1"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return said.getvalue()


def _loss(output):
    return float(*re.findall(r"epoch 1: loss ([\d.]+)", output))


@pytest.mark.slow
@pytest.mark.parametrize("word", ["mirrored", "parameter_server"])
def test_a_plain_script_trains_alike_with_each_word(tmp_path, word):
    output = run(tmp_path, sys.executable, EXAMPLE, word, "--epochs", 1)
    ((name, number),) = re.findall(r"(\w+)Strategy, (\d+) replicas", output)  # one rank has printed it
    assert name.lower() == word.replace("_", "")
    assert int(number) == len(os.sched_getaffinity(0))
    expected = run_ranks(_mirrored, int(number))[0]
    assert _loss(output) == pytest.approx(_loss(expected), rel=1e-4)
    assert os.listdir(tmp_path) == []


def _set_launched(rank, world_size, store):
    os.environ.update(
        RANK=f"{rank}",
        WORLD_SIZE=f"{world_size}",
        LOCAL_RANK=f"{rank}",
        LOCAL_WORLD_SIZE=f"{world_size}",
        MASTER_ADDR="localhost",
        MASTER_PORT="1",
        PHALANX_STORE=store,
        PHALANX_STORE_OF=f"{rank}/{world_size}/1/",
    )


def _serve_and_train(rank, world_size, store, folder, epochs):
    """Return what a trainer has at the end; a server leaves its strategy by SystemExit."""
    _set_launched(rank, world_size, store)
    torch.manual_seed(0)
    inputs = torch.randn(96, 8)
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    try:
        strategy = ParameterServerStrategy(num_servers=1, timeout=90) if world_size > 1 else SingleDeviceStrategy("cpu")
    except SystemExit as end:
        return end.code
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    weights = [parameter for name, parameter in model.named_parameters() if name.endswith("weight")]
    trainer = phalanx.Trainer(
        model,
        torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": 2e-2, "weight_decay": 0.0}], lr=1e-2),
        F.mse_loss,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5),
        scheduler_interval="step",
        max_norm=5.0,
        strategy=strategy,
        max_epochs=epochs,
        checkpoint=folder,
        save_every=4,
        show_progress=False,
    )
    trainer.fit(DataLoader(data, 16, shuffle=True), DataLoader(data, 16))
    strategy.close()
    return trainer.epoch, trainer.step, trainer.metrics["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_training_on_servers_resumes_as_if_it_had_not_ended(tmp_path, num_ranks):
    """The second start refused the checkpoint; and one trainer alone waited for the servers to load it.

    Groups, a scheduler and clipping were refused. They make what they make on one device.
    """
    ends = []
    for folder, epochs in (("whole", 2), ("cut", 1), ("cut", 2)):
        store = os.memfd_create("store", os.MFD_CLOEXEC)
        try:
            path = f"/proc/{os.getpid()}/fd/{store}"
            ends.append(run_ranks(_serve_and_train, num_ranks, path, tmp_path / folder, epochs, init=False))
        finally:
            os.close(store)
    whole, cut, resumed = ends
    with tempfile.TemporaryFile() as store:
        path = f"/proc/{os.getpid()}/fd/{store.fileno()}"
        alone = run_ranks(_serve_and_train, 1, path, tmp_path / "alone", 2, init=False)
    assert whole[0] == pytest.approx(alone[0], rel=1e-4)
    assert whole[0][:2] == (2, 12)
    assert cut[0][:2] == (1, 6)
    assert resumed == whole
    assert whole[-1] == 0  # the server's end


class Scaled(torch.optim.SGD):
    """An SGD with a setting that is in no group."""

    def __init__(self, params, lr=0.1, scale=1.0):
        super().__init__(params, lr=lr)
        self.scale = scale

    def step(self, closure=None):
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.grad.mul_(self.scale)
        return super().step(closure)


def _serve_a_setting(rank, world_size, store):
    """The weight that a trainer has after three steps of an optimizer with a setting of its own."""
    if world_size > 1:
        _set_launched(rank, world_size, store)
    try:
        strategy = ParameterServerStrategy(num_servers=1, timeout=60) if world_size > 1 else SingleDeviceStrategy("cpu")
    except SystemExit as end:
        return end.code
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    if world_size > 1:
        with pytest.raises(ValueError, match=r"cannot be sent .*local object.* not a lambda"):
            strategy.setup(model, lambda parameters: Scaled(parameters, scale=0.5), F.mse_loss)
        with pytest.raises(ValueError, match=r"would lose its 'scale'"):
            strategy.setup(model, Scaled(model.parameters(), scale=0.5), F.mse_loss)
        strategy._num_setups = 0
    strategy.setup(model, functools.partial(Scaled, scale=0.5), F.mse_loss)
    for _ in range(3):
        strategy.step(torch.ones(4, 2), torch.ones(4, 1))
    weight = model.weight.detach().clone()
    strategy.close()
    return weight


def test_servers_have_an_optimizers_own_settings_or_refuse_it():
    """The servers made the optimizer of its class and its `defaults`: the scale became 1 there."""
    with tempfile.TemporaryFile() as store:
        path = f"/proc/{os.getpid()}/fd/{store.fileno()}"
        served = run_ranks(_serve_a_setting, 2, path, init=False)
    alone = _serve_a_setting(0, 1, "")
    torch.testing.assert_close(served[0], alone)


FAILS = """
import torch, phalanx
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from phalanx.strategies import ParameterServerStrategy
from phalanx.trainer import LambdaCallback

strategy = ParameterServerStrategy(num_servers=1, timeout=90)


def fail(trainer, loss):
    if strategy.replica_id_in_sync_group == 0:
        raise RuntimeError("the first trainer fails")


trainer = phalanx.Trainer(
    nn.Linear(8, 1), lambda p: torch.optim.AdamW(p), F.mse_loss, strategy=strategy, max_epochs=1,
    show_progress=False, callbacks=[LambdaCallback(on_step_end=fail)],
)
trainer.fit(DataLoader(TensorDataset(torch.randn(96, 8), torch.randn(96, 1)), 16))
"""


@pytest.mark.slow
def test_a_trainer_that_fails_ends_a_job_with_servers(tmp_path):
    """At its exit it waited for all others, who waited for it."""
    (tmp_path / "train.py").write_text(FAILS)
    words = [PHALANX, "run", "--nproc-per-node", "3", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "the first trainer fails" in done.stdout + done.stderr


PREEMPTED = """
import os, signal, sys, time
import torch, phalanx
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from phalanx.strategies import ParameterServerStrategy
from phalanx.trainer import LambdaCallback

if os.environ["RANK"] == "2":
    print(os.getpid(), file=open("draft", "w"))
    os.rename("draft", "server")
strategy = ParameterServerStrategy(num_servers=1, timeout=90)


def preempt(trainer, loss):
    if trainer.step == 2 and strategy.replica_id_in_sync_group == 0:
        os.kill(int(open("server").read()), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)


trainer = phalanx.Trainer(
    nn.Linear(8, 1), lambda p: torch.optim.AdamW(p), F.mse_loss, strategy=strategy, max_epochs=1, checkpoint="runs",
    show_progress=False, callbacks=[LambdaCallback(on_step_end=preempt)],
)
trainer.fit(DataLoader(TensorDataset(torch.randn(960, 8), torch.randn(960, 1)), 16))
"""


@pytest.mark.slow
def test_a_server_that_receives_sigterm_serves_until_its_trainers_have_saved(tmp_path):
    """It ended at once, and with it the parameters that the trainers were to save."""
    (tmp_path / "train.py").write_text(PREEMPTED)
    words = [PHALANX, "run", "--nproc-per-node", "3", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == os.EX_TEMPFAIL, done.stdout + done.stderr
    assert list((tmp_path / "runs").iterdir())
