"""The report of a job on several hosts is on the first, with the ranks of all."""

import base64
import zlib

import pytest
from tests.report.left_records import leave_record
from tests.report.pages import Page
from tests.system.host_commands import commands, finish, numbered
from tests.system.phalanx_command import write_script

from phalanx._comm.diagnostics.step_file import FILE_BYTES
from phalanx._job.report.measurements import Measurements
from phalanx._job.report.transfer import pack_files, unpack_file
from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import hosts

TRAIN = """
import torch, phalanx
from torch import nn

job = phalanx.init()
model = phalanx.DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(30):
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")
def test_the_first_host_gets_the_records_of_the_others_and_of_no_other_run(tmp_path):
    """What another host had left in a shared folder, of a run before with the same --rdzv-id, was this run's."""
    (tmp_path / "host0").mkdir()
    leave_record(tmp_path / "host0", "old.steps", run="again", host="elsewhere")
    script = write_script(tmp_path, TRAIN)
    with hosts(2) as machines:
        lines = numbered(machines, "--rdzv-id", "again", script=(script,), nproc="1")
        lines = [(line[0], "--report", str(tmp_path / f"host{n}"), *line[1:]) for n, line in enumerate(lines)]
        with commands(machines, *lines) as jobs:
            first, second = finish(jobs)
    assert (first.code, second.code) == (0, 0), first.out + second.out
    run = Measurements.from_json((tmp_path / "host0" / "report.json").read_text())
    assert (run.end, run.world_size, run.steps) == ("well", 2, 30)
    assert [(rank.rank, rank.node) for rank in run.ranks] == [(0, 0), (1, 1)]
    assert len({rank.host for rank in run.ranks}) == 2
    assert run.num_matched >= 20
    page = Page((tmp_path / "host0" / "report.html").read_text())
    assert page.problems == []
    assert "2 ranks on 2 hosts" in page.text
    assert "report is in" in first.out
    assert "report is in" not in second.out
    assert not (tmp_path / "host1" / "ranks").exists()  # what it has sent it does not keep for the next run


def test_what_is_no_ranks_file_is_refused(tmp_path):
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    (ranks / "a.steps").write_bytes(bytes(FILE_BYTES))
    name, text = "a.steps", base64.b64encode(zlib.compress(bytes(FILE_BYTES))).decode()
    assert list(pack_files(str(tmp_path), "", 0.0)) == []
    for wrong_name, wrong_text in ((name, text), ("../a.steps", text), (name, "xyz"), (name, text[:100] + "AAAA")):
        with pytest.raises(ValueError, match=r"rank|padding|base64|character|Error|distance|header|code|stream|block"):
            unpack_file(str(tmp_path), wrong_name, wrong_text)
