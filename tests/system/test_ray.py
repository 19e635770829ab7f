"""A job on a real Ray cluster: two Ray nodes on this machine, an agent on each."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import phalanx
from phalanx.errors import LaunchError
from phalanx.launch.on_ray import _without_places, plan_bundles

ROOT = Path(__file__).parents[2]

# Plans need no Ray.

CPUS = [{"CPU": 4.0}, {"CPU": 2.0}, {"CPU": 0.0, "memory": 1e9}]  # the last one is a head that runs no tasks
GPUS = [{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}, {"CPU": 64.0}]


@pytest.mark.parametrize(
    ("nodes", "asked", "plan"),
    [
        (CPUS, ("auto", 0), (2, 2, {"CPU": 2.0})),
        (CPUS, ("auto", 1), (1, 4, {"CPU": 4.0})),
        (CPUS, ("1", 0), (2, 1, {"CPU": 1.0})),
        (CPUS, ("8", 2), (2, 8, {"CPU": 2.0})),
        (GPUS, ("auto", 0), (2, 2, {"GPU": 2.0, "CPU": 2.0})),
        (GPUS, ("gpu", 1), (1, 4, {"GPU": 4.0, "CPU": 4.0})),
        (GPUS, ("cpu", 0), (3, 8, {"CPU": 8.0})),
        (GPUS, ("3", 3), (3, 3, {"CPU": 3.0})),
    ],
)
def test_a_node_starts_as_many_ranks_as_the_smallest_can(nodes, asked, plan):
    assert plan_bundles(nodes, *asked) == plan


def test_more_nodes_than_there_are_is_refused():
    with pytest.raises(LaunchError, match="3 nodes with CPUs asked for, and the cluster has 2"):
        plan_bundles(CPUS, "auto", 3)
    with pytest.raises(LaunchError, match="1 nodes with GPUs asked for, and the cluster has 0"):
        plan_bundles(CPUS, "gpu", 0)


def test_the_agents_get_the_words_that_are_theirs():
    words = [
        "--on",
        "ray",
        "--nnodes=2",
        "--shutdown-timeout",
        "3",
        "--nproc_per_node",
        "4",
        "-m",
        "train",
        "--on",
        "mine",
    ]
    assert _without_places(words) == ["--shutdown-timeout", "3", "-m", "train", "--on", "mine"]


# What follows needs it.

SCRIPT = """
import os, torch, torch.distributed as dist, phalanx
with phalanx.init() as job:
    total = torch.tensor([float(job.rank)])
    dist.all_reduce(total)
    print("rank", job.rank, "of", job.world_size, "on node", os.environ["GROUP_RANK"], "sum", total.item())
    if "FAIL" in os.environ and job.rank == 1:
        raise ValueError("as asked for")
"""
HOLD = "import threading; print('holding', flush=True); threading.Event().wait()"


@pytest.fixture(scope="module")
def address():
    """A cluster of two Ray nodes with two CPUs each; in a process of its own, which takes along whatever Ray leaves."""
    pytest.importorskip("ray", reason="needs Ray: pip install ray")
    code = (
        "import sys\nfrom ray.cluster_utils import Cluster\n"
        "cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 2})\ncluster.add_node(num_cpus=2)\n"
        "print('at', cluster.address, flush=True)\nsys.stdin.read()\ncluster.shutdown()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("at "):
                break
        yield line.split()[1]
        process.stdin.close()
        process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def on_ray(address, folder, *words, **variables):
    command = [sys.executable, "-m", "phalanx", "run", "--on", "ray", *words]
    environment = {**os.environ, "RAY_ADDRESS": address, **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)


def test_the_command_starts_an_agent_on_each_node(address, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = on_ray(address, tmp_path, "--nproc-per-node=2", "train.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = re.findall(r"rank (\d) of 4 on node (\d) sum 6.0", ended.stdout)
    assert sorted(told) == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "1")]


def test_what_cannot_be_is_said_and_is_the_exit_code(address, tmp_path):
    ended = on_ray(address, tmp_path, "missing.py")
    assert (ended.returncode, "script 'missing.py': no such file" in ended.stderr) == (2, True)
    ended = on_ray(address, tmp_path, "--nnodes=3", "train.py")
    assert (ended.returncode, "3 nodes with CPUs asked for" in ended.stderr) == (2, True)
    ended = on_ray("127.0.0.1:1", tmp_path, "train.py")
    assert (ended.returncode, "no Ray cluster answers" in ended.stderr) == (2, True), ended.stderr


DRIVER = """
import os, sys, ray, phalanx
import torch.distributed as dist, torch
ray.init(address=sys.argv[1], log_to_driver=False)

class Wrong(Exception):
    pass

class Point:
    def __init__(self, x):
        self.x = x

def train(start, fail=-1):
    with phalanx.init() as job:
        total = torch.tensor([float(job.rank)])
        dist.all_reduce(total)
        print("trained")
        if job.rank == fail:
            raise Wrong("as asked for")
        return Point(start + total.item()), os.environ["GROUP_RANK"]

results = phalanx.launch.ray(train, (3,), nnodes=2, nproc_per_node=2)
assert [(type(point), point.x, node) for point, node in results] == [(Point, 9.0, node) for node in "0011"]
try:
    phalanx.launch.ray(train, (3,), {"fail": 3}, nnodes=2, nproc_per_node=2)
except Wrong as error:
    print("raised", error, "from rank 3 of 4" if "rank 3 of 4" in str(error.__cause__) else error.__cause__)
"""


def test_a_driver_calls_a_function_on_the_ranks(address, tmp_path):
    (tmp_path / "driver.py").write_text(DRIVER)
    ended = subprocess.run(
        [sys.executable, "driver.py", address], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "raised as asked for from rank 3 of 4" in ended.stdout
    assert "trained" in ended.stdout


def test_the_ranks_end_with_a_driver_that_is_killed(address, tmp_path):
    (tmp_path / "hold.py").write_text(HOLD + f"  # {tmp_path}")
    command = [sys.executable, "-m", "phalanx", "run", "--on", "ray", "--nproc-per-node=1", "hold.py", str(tmp_path)]
    environment = {**os.environ, "RAY_ADDRESS": address}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as driver:
        said = driver.stdout.readline()
        while said.count("holding") < 2 and "[0-1]" not in said:
            said += driver.stdout.readline()
        assert living(str(tmp_path))
        driver.kill()
    while pids := living(str(tmp_path)):  # the test's own timeout ends the wait
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                select.select([handle], [], [])
                os.close(handle)


def living(word):
    """The processes that have this word on their command line."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit() and word.encode() in Path(f"/proc/{entry}/cmdline").read_bytes():
                found.append(int(entry))
    return found


def test_the_examples_of_the_documentation_run_as_they_stand(address, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    text = (ROOT / "docs" / "how-to" / "schedulers.md").read_text()
    (block,) = re.findall(r"```bash\n(phalanx run --on ray.*?)```", text, re.DOTALL)
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "RAY_ADDRESS": address, "PATH": search}
    code = block.replace("phalanx run", f"{sys.executable} -m phalanx run")
    ended = subprocess.run(["bash", "-ec", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"rank 3 of 4 on node 1", ended.stdout)
    assert re.search(r"rank 7 of 8 on node 1", ended.stdout)


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"Ray is not installed in this Python. pip install ray"):
        phalanx.launch.ray(print)
