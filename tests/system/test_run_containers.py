"""`phalanx run` whose ranks are in containers of their own, or under a seccomp filter."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.containers import why_no_containers
from tests.seccomp import why_no_seccomp
from tests.system.phalanx_command import run, write_script

needs_containers = pytest.mark.skipif(bool(why_no_containers()), reason=why_no_containers())
needs_seccomp = pytest.mark.skipif(bool(why_no_seccomp()), reason=why_no_seccomp())

# The scripts take from the tests what makes the container.
FIND_TESTS = f"import sys; sys.path.append({str(Path(__file__).parents[2])!r})"

SCRIPT = f"""
{FIND_TESTS}
import os
import torch, torch.distributed as dist
from tests.containers import contained
from tests.seccomp import forbid

def train():
    assert os.getpid() == 1
    dist.init_process_group("phalanx")
    total = torch.full((3,), dist.get_rank() + 1.0)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total[0].item()

print(contained(train, namespaces=NAMESPACES))
"""


@pytest.mark.slow
@needs_containers
def test_ranks_that_do_not_see_the_agent_get_the_store_from_its_hands(tmp_path: Path) -> None:
    finished = run("--nproc-per-node", "2", write_script(tmp_path, SCRIPT.replace("NAMESPACES", "('pid',)")))
    assert finished.code == 0, finished.err
    assert {line.partition("] ")[2] for line in finished.lines} == {"3.0"}


@pytest.mark.slow
@needs_containers
def test_ranks_that_cannot_reach_the_agent_at_all_say_so(tmp_path: Path) -> None:
    finished = run("--nproc-per-node", "2", write_script(tmp_path, SCRIPT.replace("NAMESPACES", "('pid', 'net')")))
    assert finished.code == 1
    assert "cannot be opened, and the agent does not send it." in finished.err
    assert "start `phalanx run` inside, or let the container use the host's network" in finished.err


WITHOUT_PROC = f"""
{FIND_TESTS}
import os
from tests.containers import hide_proc
hide_proc()
os.execv(sys.executable, [sys.executable, "-m", "phalanx.cli", "run", "--nproc-per-node", "2", sys.argv[1]])
"""


@needs_containers
def test_a_job_without_proc_ends_before_a_rank_starts(tmp_path: Path) -> None:
    """Its ranks looked for the job's store for ever, in silence."""
    command = [sys.executable, write_script(tmp_path, WITHOUT_PROC, "outer.py"), write_script(tmp_path, "", "inner.py")]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 2, finished.stderr
    assert "phalanx run: there is no /proc" in finished.stderr
    assert "Mount it" in finished.stderr


FORBIDDEN = f"""
{FIND_TESTS}
import os
from tests.seccomp import forbid
forbid("memfd_create", "pidfd_open")
os.execv(sys.executable, [sys.executable, "-m", "phalanx.cli", "run", "--nproc-per-node", "2", sys.argv[1]])
"""

PLAIN = """
import torch, torch.distributed as dist
dist.init_process_group("phalanx")
total = torch.full((3,), dist.get_rank() + 1.0)
dist.all_reduce(total)
print(total[0].item(), dist.group.WORLD.shares_memory)
dist.destroy_process_group()
"""


@pytest.mark.slow
@needs_seccomp
def test_the_whole_job_runs_under_a_filter_that_forbids_memfds_and_pidfds(tmp_path: Path) -> None:
    command = [sys.executable, write_script(tmp_path, FORBIDDEN, "outer.py"), write_script(tmp_path, PLAIN, "inner.py")]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    assert {line.partition("] ")[2] for line in finished.stdout.splitlines()} == {"3.0 True"}
