"""A job that fails, is interrupted, is killed or loses a rank leaves a report that says so."""

import os
import signal
import subprocess
import sys

import pytest
from tests.report.pages import Page
from tests.system.phalanx_command import run, start, write_script

from phalanx._job.report.findings import find
from phalanx._job.report.measurements import Measurements

LOOP = """
import os, signal, sys, torch, phalanx
from torch import nn

job = phalanx.init()
model = phalanx.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
number = 0
while number < int(sys.argv[1]):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    number += 1
    if number == 21:  # a step counts when the next one begins
        print("twenty", flush=True)
"""

FAILS = (
    LOOP
    + """
if job.rank == 1:
    raise ValueError("the data is wrong")
torch.distributed.barrier()
"""
)

ELASTIC = """
import os, signal, sys, torch, phalanx
from torch import nn

job = phalanx.init()
model = phalanx.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
state = phalanx.elastic.State(model=model, optimizer=optimizer)


@phalanx.elastic.run(state)
def train(state):
    while state.step < 60:
        if state.step == 20 and torch.distributed.get_rank() == 1 and not os.path.exists(sys.argv[1]):
            open(sys.argv[1], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.commit()


train(state)
"""

RESTARTED = """
import os, torch, phalanx
from torch import nn

job = phalanx.init()
model = phalanx.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for number in range(20):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if number == 11 and job.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("<b>bad</b> data")
torch.distributed.barrier()
"""

TRAINER = """
import torch, phalanx
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(320, 8), torch.randn(320, 1))
trainer = phalanx.Trainer(
    nn.Linear(8, 1), lambda p: torch.optim.SGD(p, 0.01), nn.functional.mse_loss, strategy="mirrored",
    max_epochs=2, show_progress=False, report="out", seed=1,
)
trainer.fit(DataLoader(data, 16), DataLoader(data, 32))
"""

OWN = """
import phalanx

phalanx.report.begin("out")
for number in range(30):
    with phalanx.report.phase("data"):
        sum(range(1000))
    with phalanx.report.phase("forward"):
        sum(range(20000))
    phalanx.report.step(samples=3, loss=1 / (number + 1))
raise RuntimeError("enough")
"""

SCALED = """
import sys, torch, phalanx
from collections import UserDict
from torch.utils.data import DataLoader

phalanx.report.begin("out")
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.0)
scaler = torch.amp.GradScaler("cpu", growth_interval=5)
loader = DataLoader(list(range(320)), 8, collate_fn=lambda samples: UserDict(ids=torch.tensor(samples)))
for number, batch in enumerate(loader, start=1):
    loss = (weight * 0 + 1 / number).sum()
    scaled = scaler.scale(loss)
    (scaled if number <= 20 else scaled / 2).backward()
    scaler.step(optimizer)
    scaler.update()
sys.exit("out of data")
"""


def read(folder):
    measured = Measurements.from_json((folder / "report.json").read_text())
    page = Page((folder / "report.html").read_text())
    assert page.problems == []
    return measured, " ".join(finding.text for finding in find(measured)), page.text


def options(folder, *more):
    return "--nproc-per-node", "2", "--report", str(folder / "out"), *more


@pytest.mark.slow
def test_a_rank_that_fails_is_named_with_its_line_and_traceback(tmp_path):
    done = run(*options(tmp_path), write_script(tmp_path, FAILS), "25")
    assert done.code == 1
    measured, sentences, page = read(tmp_path / "out")
    assert (measured.end, measured.exit_code) == ("failed", 1)
    assert measured.steps >= 24  # 25, unless a rank had to be killed in the barrier
    assert "Rank 1 failed first: ValueError: the data is wrong at script.py:" in sentences
    assert 'raise ValueError("the data is wrong")' in page


@pytest.mark.slow
def test_an_interrupted_job_says_by_what_and_after_which_step(tmp_path):
    with start("run", *options(tmp_path), write_script(tmp_path, LOOP), "1000000") as running:
        running.read_until_all("twenty", 2)
        running.process.send_signal(signal.SIGINT)
        done = running.finish()
    assert done.code == 130
    measured, sentences, page = read(tmp_path / "out")
    assert measured.end == "stopped"
    assert measured.steps >= 20
    assert f"The run was stopped by SIGINT (interrupted), after step {measured.steps:,}." in sentences
    assert "stopped" in page


@pytest.mark.slow
def test_a_launcher_that_is_killed_leaves_what_the_ranks_have_written(tmp_path):
    with start("run", *options(tmp_path), write_script(tmp_path, LOOP), "1000000") as running:
        running.read_until_all("twenty", 2)
        running.process.kill()
        running.process.wait()
        running.wait_gone()
    assert not (tmp_path / "out" / "report.html").exists()
    told = subprocess.run(
        [sys.executable, "-m", "phalanx.cli", "report", str(tmp_path / "out")], capture_output=True, text=True
    )
    assert told.returncode == 0, told.stderr
    measured, sentences, _ = read(tmp_path / "out")
    assert measured.end == "killed"
    assert [rank.steps >= 20 for rank in measured.ranks] == [True, True]
    assert not any(rank.ended for rank in measured.ranks)
    assert "was killed" in sentences
    assert "was killed" in told.stdout


@pytest.mark.slow
def test_the_loss_of_an_elastic_rank_is_on_the_time_line(tmp_path):
    done = run(*options(tmp_path), write_script(tmp_path, ELASTIC), str(tmp_path / "flag"))
    assert done.code == 0, done.err
    measured, sentences, _ = read(tmp_path / "out")
    assert measured.end == "well"
    (loss,) = measured.events
    assert (loss.kind, loss.rank) == ("loss", 1)
    assert "SIGKILL" in loss.text
    assert "replaced" in loss.text
    assert sorted(rank.rank for rank in measured.ranks) == [0, 1, 1]
    stayed, newcomer = (rank for rank in measured.ranks if rank.ended)
    (first, began), (second, went_on) = stayed.generations
    assert (first, second) == (0, 1)
    assert began < loss.at < went_on
    assert [generation for generation, _ in newcomer.generations] == [1]
    assert (stayed.reached, newcomer.reached) == (60, 60)
    assert "Rank 1 was lost, and the others continued" in sentences


@pytest.mark.slow
def test_a_restart_of_all_is_on_the_time_line_between_its_attempts(tmp_path):
    done = run(*options(tmp_path, "--max-restarts", "1"), write_script(tmp_path, RESTARTED))
    assert done.code == 0, done.err
    measured, sentences, page = read(tmp_path / "out")
    kinds = [event.kind for event in measured.events]
    assert (measured.end, kinds[0], kinds[-1]) == ("well", "failure", "restart")
    assert (measured.events[0].rank, measured.events[-1].rank) == (1, None)
    assert "ValueError: <b>bad</b> data" in page
    assert sorted((rank.attempt, rank.rank) for rank in measured.ranks) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rank.steps for rank in measured.ranks if rank.attempt] == [20, 20]
    restarted = measured.events[-1].at
    assert all((rank.begin >= restarted) == bool(rank.attempt) for rank in measured.ranks)
    assert "The job was restarted once" in sentences


@pytest.mark.slow
def test_a_trainer_asks_the_launcher_for_its_report(tmp_path):
    script = write_script(tmp_path, TRAINER.replace('"out"', repr(str(tmp_path / "out"))))
    done = run("--nproc-per-node", "2", script)
    assert done.code == 0, done.err
    measured, _, _ = read(tmp_path / "out")
    assert (measured.end, measured.world_size, measured.steps) == ("well", 2, 40)
    assert [rank.samples_per_step for rank in measured.ranks] == [8, 8]
    assert len(measured.loss) == 40
    assert measured.loss[-1][1] < measured.loss[0][1]


@pytest.mark.slow
def test_a_loop_of_ones_own_without_a_launcher_marks_its_steps(tmp_path):
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX")}
    done = subprocess.run([sys.executable, "-c", OWN], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    measured, _, page = read(tmp_path / "out")
    assert (measured.end, measured.steps, measured.world_size) == ("failed", 30, 1)
    assert measured.end_text == "rank 0: RuntimeError: enough"
    (rank,) = measured.ranks
    assert rank.samples_per_step == 3
    assert min(rank.parts["forward"], rank.parts["data"]) > 0
    assert measured.loss[-1] == (30, pytest.approx(1 / 30))
    assert "RuntimeError: enough" in page


@pytest.mark.slow
def test_a_scaled_loss_is_told_as_it_was_and_an_exit_without_an_exception_is_no_success(tmp_path):
    """A loop with a GradScaler showed the loss times its factor, which doubles every so often: "The loss rises". Its
    batches, of HuggingFace's kind, counted as one sample. And what `sys.exit("...")` ended was told as "ended well".
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PHALANX")}
    done = subprocess.run([sys.executable, "-c", SCALED], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, "out of data" in done.stderr) == (1, True), done.stderr
    measured, sentences, _ = read(tmp_path / "out")
    assert (measured.end, measured.steps) == ("ended", 40)
    assert measured.ranks[0].samples_per_step == 8
    assert measured.loss == tuple((step, pytest.approx(1 / step, rel=1e-5)) for step in range(1, 21))
    assert "The loss rises" not in sentences
