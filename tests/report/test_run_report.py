"""`phalanx run --report DIR`: what a real job leaves, opened as its readers open it."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from tests.report.chromium import chromium, find_chromium
from tests.report.pages import Page

from phalanx._job.report.measurements import Measurements

PHALANX = str(Path(sysconfig.get_path("scripts")) / "phalanx")

TRAIN = """
import torch, phalanx
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

job = phalanx.init()
torch.manual_seed(0)
data = TensorDataset(torch.randn(480, 16), torch.randn(480, 1))
loader = DataLoader(data, 8, sampler=phalanx.DistributedSampler(data))
model = phalanx.DistributedDataParallel(nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(2):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        for x, y in DataLoader(data, 48):
            model.module(x)
    torch.distributed.all_reduce(torch.ones(1000))
"""


def run(folder, script, *options, code=0):
    (folder / "train.py").write_text(script)
    words = [PHALANX, "run", "--nproc-per-node", "2", "--report", "out", *options, "train.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stdout + done.stderr
    return folder / "out"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return run(tmp_path_factory.mktemp("run"), TRAIN)


@pytest.mark.slow
def test_the_report_has_the_steps_of_all_ranks(report):
    run = Measurements.from_json((report / "report.json").read_text())
    assert (run.end, run.exit_code, run.world_size, run.name) == ("well", 0, 2, "train.py")
    assert [(rank.rank, rank.steps, rank.ended, rank.num_workers) for rank in run.ranks] == [(0, 60, True, 0)] + [
        (1, 60, True, 0)
    ]
    for rank in run.ranks:
        assert rank.samples_per_step == 8
        assert sum(rank.parts.values()) == pytest.approx(rank.step_s, rel=0.01)
        assert all(seconds >= 0 for seconds in rank.parts.values())
        assert rank.facts["torch"]
        assert rank.facts["backend"] == "phalanx"
    assert len(run.loss) == 60
    assert {row.name for row in run.collectives} >= {"gradients", "all_reduce"}
    (reduced,) = (row for row in run.collectives if row.name == "all_reduce" and row.num_bytes == 4000)
    assert reduced.num_ranks == 2
    assert sum(late.times for late in run.lateness) == run.num_matched >= 50
    assert not (report / "ranks").exists()


def test_the_page_is_whole_and_on_its_own(report):
    page = Page((report / "report.html").read_text())
    assert page.problems == []
    assert page.sections == [
        "What to do", "Training", "Where the time of a step goes", "Collectives", "Memory", "What happened",
        "What ran where",
    ]  # fmt: skip
    assert "ended well" in page.text
    assert "phalanx run --nproc-per-node 2 train.py" in page.text


@pytest.mark.slow
@pytest.mark.skipif(find_chromium() is None, reason="no Chromium is installed")
def test_chromium_shows_the_page_without_a_complaint_on_every_screen(report):
    with chromium() as browser:
        for how in ({}, {"scheme": "dark"}, {"width": 360}, {"media": "print", "width": 794}):
            browser.open(report / "report.html", **how)
            width, room = browser.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert width <= room, how
            assert browser.evaluate("document.querySelectorAll('svg').length") >= 4
            assert browser.screenshot().startswith(b"\x89PNG")
        assert browser.problems == []
