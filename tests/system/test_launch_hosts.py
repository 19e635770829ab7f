"""`phalanx.launch(fn, nnodes=2)`: a function of a script on this host, called on another one, too."""

import os
import re
import subprocess
import sys

import pytest

from phalanx._comm.control.key import Key
from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import hosts

pytestmark = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

DRIVER = """
import os, sys, torch, torch.distributed as dist, phalanx

class Wrong(Exception):
    pass

class Point:
    def __init__(self, x):
        self.x = x

def train(start, fail=False):
    with phalanx.init() as job:
        total = torch.tensor([float(job.rank)])
        dist.all_reduce(total)
        print("trained")
        if fail and job.rank == 3:
            raise Wrong("on the other host")
        return Point(start + total.item()), os.environ["GROUP_RANK"], torch.zeros(3 << 18)

fail = sys.argv[1] == "fail"
try:
    results = phalanx.launch(train, (3,), {"fail": fail}, nproc_per_node=2, nnodes=2, master_port=29600)
except Wrong as error:
    assert fail and "rank 3 of 4" in str(error.__cause__)
else:
    assert [(type(point), point.x, node) for point, node, _ in results] == [(Point, 9.0, node) for node in "0011"]
    assert [big.numel() for *_, big in results] == [3 << 18] * 4
print("as it should be")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["well", "fail"])
def test_ranks_of_another_host_have_the_function_and_hand_back_what_came_of_it(tmp_path, how):
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    (tmp_path / "first" / "driver.py").write_text(DRIVER)
    environment = {**os.environ, "PHALANX_KEY": str(Key.generate()), "OMP_NUM_THREADS": "1"}
    with hosts(2) as machines:
        inside = [["ip", "netns", "exec", machine.name, sys.executable] for machine in machines]
        driver = subprocess.Popen(
            [*inside[0], "driver.py", how],
            cwd=tmp_path / "first",
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with driver:
            said = ""
            for line in driver.stdout:  # the line to copy is shown where the call was made
                said += line
                if found := re.search(r"phalanx join (\S+)", line):
                    break
            else:
                pytest.fail(said)
            join = [*inside[1], "-m", "phalanx", "join", found[1]]
            (scratch := tmp_path / "scratch").mkdir()
            environ = {**environment, "TMPDIR": str(scratch)}
            joined = subprocess.run(join, cwd=tmp_path / "second", env=environ, capture_output=True, timeout=600)
            said += driver.stdout.read()
    assert "as it should be" in said, said
    assert said.count("trained") >= 1
    assert (joined.returncode == 0) == (how == "well"), joined
    # each rank there had a folder in TMPDIR, which stayed after every failure: whoever is told to end removes nothing
    assert not list(scratch.iterdir())
