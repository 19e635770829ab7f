"""Hosts come late, and leave, in a job whose steps keep the samples that they had at the start."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.elastic.jobs import Job
from tests.elastic.test_global_batch import PLAIN, samples_of_steps
from tests.system.test_run_elastic_hosts import Cluster
from tests.system.test_run_elastic_hosts_programs import ROOT, SCRIPT

from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())


def run_job(machines: list[Host], folder: Path, job: Job, *, late: int) -> list[dict[str, Any]]:
    """Return what each rank holds at the end, of a job on one host, to which `late` hosts come with two ranks each."""
    folder.mkdir()
    job = dataclasses.replace(job, folder=str(folder))
    (folder / "program").write_bytes(pickle.dumps((job, None)))
    made = Cluster(
        machines, folder, "1:3", {"PYTHONPATH": str(ROOT)}, ("--no-preload", "--rdzv-conf", "last_call_timeout=0")
    )
    try:
        made.start(0, 1, SCRIPT)
        made.wait_for(0, "phalanx run: 1 hosts: ")
        for number in range(1, 1 + late):
            made.start(number, 2, SCRIPT)
        ends = made.ended(*range(1 + late))
        assert [end.code for end in ends] == [0] * (1 + late), ends[0].out
        if late:
            assert "taken in; 3 ranks on 2 hosts go on" in ends[0].out
    finally:
        made.close()
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("end-*"))]


@pytest.mark.slow
def test_hosts_that_come_late_share_the_steps_of_a_job_with_a_global_batch(tmp_path: Path) -> None:
    """They ended the healthy job: there were more ranks than a step had batches."""
    job = dataclasses.replace(PLAIN, samples=102, batch=6)
    with hosts(2) as machines:
        (alone,) = run_job(machines, tmp_path / "alone", job, late=0)
        grown = run_job(machines, tmp_path / "grown", dataclasses.replace(job, grow_at=4), late=1)
    assert len(grown) == 3
    assert samples_of_steps(tmp_path / "grown") == samples_of_steps(tmp_path / "alone")
    for held in grown:
        assert held["step"] == alone["step"]
        torch.testing.assert_close(held["weights"], alone["weights"], rtol=1e-3, atol=1e-5)
