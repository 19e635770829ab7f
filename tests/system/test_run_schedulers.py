"""`phalanx run` as schedulers start it: mpiexec for real, pods and lists of hosts by their variables in namespaces.

Each namespace is a host with an address and a network of its own, as a pod has them; no cluster of Kubernetes, LSF or
PBS is here. Slurm has tests of its own, with the real thing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile

import pytest
from tests.mpi_jobs import MPICH, OPEN_MPI, ROOT, _launcher

from phalanx._comm.control.key import Key
from phalanx.testing import why_no_hosts
from phalanx.testing.namespaces import Host, hosts

needs_hosts = pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "there are hosts")

SCRIPT = """
import os, json, torch, torch.distributed as dist, phalanx
with phalanx.init() as job:
    total = torch.tensor([float(job.rank)])
    dist.all_reduce(total)
    foreign = [name for name in os.environ if name.startswith(("PMI", "OMPI_COMM_WORLD"))]
    print(json.dumps([job.rank, job.world_size, total.item(), os.environ["GROUP_RANK"], foreign]))
"""
RUN = (sys.executable, "-m", "phalanx", "run")
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PHALANX_STORE", "PHALANX_AGENT")


@pytest.fixture
def work(tmp_path):
    """A folder with the script, and the environment of a user who has no key."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
    search = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return tmp_path, {**environment, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "PYTHONPATH": search}


def told(output):
    """What the ranks said, by rank: (world size, sum, node); and no variable of the launcher's reached them."""
    lines = [json.loads(line[line.index("] [") + 2 :]) for line in output.splitlines() if "] [" in line]
    assert all(line[4] == [] for line in lines), output
    return {line[0]: tuple(line[1:4]) for line in lines}


def everybody(nodes, ranks):
    size = nodes * ranks
    return {rank: (size, sum(range(size)), str(rank // ranks)) for rank in range(size)}


def mpiexec(mpi, machines, folder, environment, *words):
    """How the command ended; one that hangs is ended, with all its processes."""
    process = subprocess.Popen(
        [*_launcher(mpi, machines, str(folder), environment), *words],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            out, err = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # mpiexec takes its processes along
            out, err = process.communicate(timeout=20)
    return process.returncode, out, err


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_the_processes_of_mpiexec_on_one_host_are_one_job(work, mpi):
    """Each was refused: it would have been a job of its own. No key of the user's is needed, and none is made."""
    if not (MPICH if mpi == "mpich" else OPEN_MPI).joinpath("bin", "mpiexec").exists():
        pytest.skip(f"{mpi} is not installed; `make setup` does it")
    folder, environment = work
    code, out, err = mpiexec(mpi, (), folder, environment, "-n", "4", *RUN, "--nproc-per-node=1", "train.py")
    assert code == 0, out + err
    assert told(out) == everybody(4, 1)
    (line,) = re.findall(r"^phalanx run: .*: node 0 of 4 of job .*$", err, re.MULTILINE)
    variables = "PMI_RANK, PMI_SIZE" if mpi == "mpich" else "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE"
    assert f"({variables}); rendezvous on this host, without a port" in line
    assert "()" not in err, "the agents have no address, and need none"
    assert "phalanx join" not in err, "nobody can join at port 0"
    assert not (folder / ".config").exists()


@pytest.mark.slow
def test_a_job_of_its_own_in_each_process_is_still_to_be_had(work):
    folder, environment = work
    words = (*RUN, "--standalone", "--nproc-per-node=1", "train.py")
    code, out, err = mpiexec("mpich", (), folder, environment, "-n", "2", *words)
    assert code == 0, out + err
    assert out.count('[0, 1, 0.0, "0"') == 2


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize("address", [False, True], ids=["through MPI", "MASTER_ADDR"])
def test_mpiexec_over_two_hosts_needs_no_address(work, address):
    """It does not say where its first process is: MPI itself is asked, by a child of the agent."""
    folder, environment = work
    with hosts(2) as machines:
        if address:
            environment |= {"MASTER_ADDR": machines[0].address, "MASTER_PORT": "29777"}
        words = ("-n", "4", *RUN, "--nproc-per-node=1", "train.py")
        code, out, err = mpiexec("mpich", machines, folder, environment, *words)
    assert code == 0, out + err
    assert told(out) == everybody(4, 1)
    assert (folder / ".config" / "phalanx" / "key").exists() == address


def inside(machine: Host, *words: str) -> list[str]:
    """The command on that host, whose name is its address."""
    named = f'hostname {machine.address} && exec "$@"'
    return ["ip", "netns", "exec", machine.name, "unshare", "--uts", "sh", "-c", named, "sh", *words]


def on_hosts(machines, folder, environment, variables, *words):
    """The command on each host at once; its exit code and what it said, by host."""
    with contextlib.ExitStack() as stack:
        jobs = []
        for machine, own in zip(machines, variables, strict=True):
            out = stack.enter_context(tempfile.TemporaryFile("w+"))
            job = subprocess.Popen(
                inside(machine, *words), cwd=folder, env={**environment, **own}, stdout=out, stderr=subprocess.STDOUT
            )
            jobs.append((stack.enter_context(job), out))
        ended = []
        for job, out in jobs:
            with contextlib.suppress(subprocess.TimeoutExpired):  # what it has said shows where it hangs
                job.wait(100)
            job.kill()
            job.wait()
            out.seek(0)
            ended.append((job.returncode, out.read()))
        return ended


def pods(own, **common):
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PHALANX_KEY": str(Key(bytes(32))), **common}
    return [{**pod, **variables} for variables in own]


def indexed(machines, folder):
    own = [{"JOB_COMPLETION_INDEX": str(index)} for index in range(len(machines))]
    return pods(own, PET_NNODES="2", MASTER_ADDR=machines[0].address, MASTER_PORT="29400")


def pytorch_job(machines, folder):
    own = [{"RANK": str(index)} for index in range(len(machines))]
    return pods(own, WORLD_SIZE="2", MASTER_ADDR=machines[0].address, MASTER_PORT="23456")


def trainer(machines, folder):
    own = [{"JOB_COMPLETION_INDEX": str(index), "PET_NODE_RANK": str(index)} for index in range(len(machines))]
    where = {"PET_MASTER_ADDR": machines[0].address, "PET_MASTER_PORT": "29500"}
    return pods(own, PET_NNODES="2", PET_NPROC_PER_NODE="2", **where)


def lsf(machines, folder):
    return [{"LSB_JOBID": "7", "LSB_MCPU_HOSTS": " ".join(f"{machine.address} 2" for machine in machines)}] * 2


def pbs(machines, folder):
    (folder / "nodes").write_text("".join(f"{machine.address}\n" * 2 for machine in machines))
    return [{"PBS_JOBID": "7.server", "PBS_NODEFILE": str(folder / "nodes")}] * 2


@pytest.mark.slow
@needs_hosts
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (indexed, "Kubernetes: node 0 of 2 of job kubernetes-"),
        (pytorch_job, "Kubeflow: node 0 of 2 of job kubeflow-"),
        (trainer, "Kubeflow: node 0 of 2 of job kubeflow-"),
        (lsf, "LSF: node 0 of 2 of job lsf-7 (LSB_JOBID, LSB_MCPU_HOSTS)"),
        (pbs, "PBS: node 0 of 2 of job pbs-7.server (PBS_JOBID, PBS_NODEFILE)"),
    ],
)
def test_what_a_scheduler_sets_on_each_host_makes_one_job(work, variables, said):
    folder, environment = work
    ranks = () if variables is trainer else ("--nproc-per-node=2",)
    with hosts(2) as machines:
        ended = on_hosts(machines, folder, environment, variables(machines, folder), *RUN, *ranks, "train.py")
    assert [code for code, _ in ended] == [0, 0], ended
    assert told(ended[0][1]) == everybody(2, 2)
    assert said in ended[0][1]


@pytest.mark.slow
@needs_hosts
def test_two_jobs_of_one_user_on_the_same_hosts_do_not_mix(work, monkeypatch):
    """Both come to the same ports, which follow from the first part of their names here, and know the same key."""
    folder, environment = work
    one_name = "import phalanx._job.schedulers.allocation as a; a.zlib = type('', (), {'crc32': lambda data: 1})"
    (folder / "sitecustomize.py").write_text(one_name)
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), environment["PYTHONPATH"]])
    with hosts(2) as machines:
        both = [{**one, "LSB_JOBID": number} for number in ("7", "8") for one in lsf(machines, folder)]
        words = (*RUN, "--nproc-per-node=1", "train.py")
        ended = on_hosts([*machines, *machines], folder, environment, both, *words)
    assert [code for code, _ in ended] == [0, 0, 0, 0], ended
    assert [told(ended[first][1]) for first in (0, 2)] == [everybody(2, 1)] * 2
