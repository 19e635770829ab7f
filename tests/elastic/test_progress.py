"""What `State` commits is counted where `phalanx top` and the agent see it."""

import dataclasses

import pytest
import torch
from tests.elastic.jobs import Job, train_job
from tests.elastic.small_agent import SmallAgent

from phalanx._comm.diagnostics import progress_page
from phalanx._comm.diagnostics.progress_page import PAGE_BYTES, ProgressPage, parse_page
from phalanx.elastic import State


def test_commits_are_counted_on_the_page_of_the_rank(monkeypatch):
    memory = bytearray(PAGE_BYTES)
    monkeypatch.setattr(progress_page, "_own", ProgressPage(memory))
    model = torch.nn.Linear(2, 2)
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(3):
        state.commit()
    for _ in state.epochs(1):
        state.commit()
    said = parse_page(bytes(memory))
    assert (said.state.steps, said.loop) == (state.step, None)
    assert said.state.steps == 4


@pytest.mark.parametrize(
    "job", [Job("", samples=60), Job("", accumulate=2), Job("", batch_of="global"), Job("", workers=1)], ids=str
)
def test_each_sample_of_a_rank_is_counted_once(job, tmp_path):
    job = dataclasses.replace(job, folder=str(tmp_path))
    ended = SmallAgent(train_job, 2, job, folder=tmp_path).run()
    assert [result["samples_on_page"] for result in ended.results] == [job.epochs * job.samples // 2] * 2
