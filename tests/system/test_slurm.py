"""A real Slurm of two nodes on this machine: what `srun` and `sbatch` start finds itself, without an option.

Both nodes are this machine, so ranks of both share memory; what is tested is who meets whom, and where.
"""

import json
import re
import shlex
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.system.slurm import Cluster, cluster, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is here")]
PHALANX = (sys.executable, "-m", "phalanx")
SCRIPT = """
import os, sys, json, torch, torch.distributed as dist, phalanx
with phalanx.init() as job:
    total = torch.tensor([float(job.rank)])
    dist.all_reduce(total)
    names = ("SLURMD_NODENAME", "GROUP_RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
    print(json.dumps([job.rank, job.world_size, total.item(), *(os.environ.get(name) for name in names)]))
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as started:
        (started.folder / "train.py").write_text(textwrap.dedent(SCRIPT))
        yield started


def said(output):
    """What the ranks printed, by rank."""
    lines = [json.loads(line[line.index("[", line.index("]") if line[1:2].isdigit() and "] [" in line else 0) :])
             for line in output.splitlines() if line.endswith("]")]  # fmt: skip
    return {line[0]: line for line in lines}


@pytest.mark.parametrize("words", [("-N2", "-n3"), ("-N1", "-n2")], ids=" ".join)
def test_tasks_of_srun_are_ranks_without_phalanx_run(slurm: Cluster, words):
    """`srun python train.py`. The name of the first node, n1, leads nowhere here: MASTER_ADDR was needed."""
    ended = slurm.run("srun", *words, sys.executable, "train.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    size = int(words[1][2:])
    ranks = said(ended.stdout)
    assert sorted(ranks) == list(range(size))
    assert {tuple(line[1:3]) for line in ranks.values()} == {(size, sum(range(size)))}
    assert {line[3] for line in ranks.values()} == ({"n1", "n2"} if words[0] == "-N2" else {"n1"})


@pytest.fixture
def home(tmp_path):
    """A home that the nodes share, and in which nobody has made a key."""
    return {"HOME": str(tmp_path)}


def check(ended, nodes, ranks, where):
    """All ranks of all nodes were one job; the one line says what was found."""
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = said(ended.stdout)
    size = nodes * ranks
    assert sorted(told) == list(range(size))
    assert {tuple(line[1:3]) for line in told.values()} == {(size, sum(range(size)))}
    assert [line[4:6] for _, line in sorted(told.items())] == [[str(r // ranks), str(r % ranks)] for r in range(size)]
    (line,) = re.findall(r"^phalanx run: Slurm: node 0 of .*$", ended.stderr + ended.stdout, re.MULTILINE)
    assert f"node 0 of {nodes} of job slurm-" in line
    assert f"(SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST); rendezvous {where}" in line


@pytest.mark.parametrize(
    ("words", "nodes"), [(("-N2", "--ntasks-per-node=1"), 2), (("-N1", "-n2"), 2), (("-N2", "-n3"), 3)], ids=str
)
def test_srun_starts_the_command_and_the_nodes_find_each_other(slurm: Cluster, home, words, nodes):
    where = "at 10.77.0.1:" if words[0] == "-N2" else "on this host, without a port"
    check(slurm.run("srun", *words, *PHALANX, "run", "--nproc-per-node=2", "train.py", **home), nodes, 2, where)
    made = Path(home["HOME"], ".config", "phalanx", "key")
    assert made.exists() == (words[0] == "-N2"), "on one host nobody needs a key of the user's"


def test_a_failure_on_one_node_is_told_once_and_ends_the_step(slurm: Cluster, home):
    code = "import os, threading\nif os.environ['RANK'] == '1':\n    raise ValueError('as asked for')\n"
    (slurm.folder / "fail.py").write_text(code + "threading.Event().wait()\n")
    ended = slurm.run("srun", "-N2", "--ntasks-per-node=1", *PHALANX, "run", "--nproc-per-node=1", "fail.py", **home)
    assert ended.returncode != 0
    assert "First failure: rank 1 of 2" in ended.stdout + ended.stderr
    assert (ended.stdout + ended.stderr).count("ValueError: as asked for") <= 3


def test_the_batch_script_of_manifest_runs_as_it_stands(slurm: Cluster, home):
    written = slurm.run(*PHALANX, "manifest", "slurm", "--nodes=2", "--cpus=2", "--log=job.log", "train.py")
    (slurm.folder / "job.sh").write_text(written.stdout)
    submitted = slurm.run("sbatch", "job.sh", **home)
    assert submitted.returncode == 0, submitted.stderr
    slurm.wait_end(submitted.stdout.split()[-1])
    log = (slurm.folder / "job.log").read_text()
    assert sorted(said(log)) == [0, 1, 2, 3], log


def test_in_the_body_of_a_batch_script_it_says_that_hosts_are_left_unused(slurm: Cluster, home):
    command = shlex.join([*PHALANX, "run", "--nproc-per-node=1", "train.py"])
    (slurm.folder / "body.sh").write_text(f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --output=body.log\n{command}\n")
    submitted = slurm.run("sbatch", "body.sh", **home)
    slurm.wait_end(submitted.stdout.split()[-1])
    log = (slurm.folder / "body.log").read_text()
    assert "Slurm gave this job 2 hosts, but this command, started once, uses only one" in log
    assert said(log)[0][1] == 1


def test_doctor_tells_what_started_it(slurm: Cluster):
    ended = slurm.run("srun", "-N2", "-n2", "-l", *PHALANX, "doctor")
    for node in (0, 1):
        assert re.search(rf"{node}: ok +scheduler +Slurm: node {node} of 2 of job slurm-\d+\.0 \(", ended.stdout)


def test_scancel_ends_every_rank(slurm: Cluster, home):
    (slurm.folder / "hold.py").write_text("import threading\nprint('holding', flush=True)\nthreading.Event().wait()\n")
    command = shlex.join(["srun", "--ntasks-per-node=1", *PHALANX, "run", "--nproc-per-node=1", "hold.py"])
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --output=hold.log"
    (slurm.folder / "hold.sh").write_text(f"{head}\nexec {command}\n")
    job = slurm.run("sbatch", "hold.sh", **home).stdout.split()[-1]
    log = slurm.folder / "hold.log"
    while not log.exists() or not re.search(r"\[0-1\S* ?\S*\] holding|(?s:holding.*holding)", log.read_text()):
        assert slurm.run("squeue", "-h", "-j", job).stdout.strip(), log.read_text()
    slurm.run("scancel", job)
    slurm.wait_end(job)
    while any("hold.py" in line for line in slurm.run("ps", "-eo", "args").stdout.splitlines()):
        pass  # the test's own timeout ends the wait


class Hosts:
    """Three hosts of an elastic job, each of which is a Slurm job of its own that may be preempted and requeued."""

    def __init__(self, slurm: Cluster, folder: Path, home: dict[str, str]) -> None:
        self.slurm = slurm
        self.folder = folder
        where = ("--nnodes", "1:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{slurm.host.address}:29479")
        rank = Path(__file__).with_name("elastic_rank.py")
        words = [*PHALANX, "run", *where, "--no-preload", "--nproc-per-node=1", str(rank), str(folder)]
        self.jobs = []
        for number in range(3):
            script = folder / f"host{number}.sh"
            script.write_text(
                "#!/bin/bash\n#SBATCH --ntasks=1 --requeue --open-mode=append --signal=B:TERM@60\n"
                f"#SBATCH --output={folder}/host{number}.log\nexec {shlex.join(words)}\n"
            )
            submitted = slurm.run("sbatch", str(script), WAIT_S="600", **home)
            assert submitted.returncode == 0, submitted.stderr
            self.jobs.append(submitted.stdout.split()[-1])
            if not number:
                self.wait(0, "waiting for 2 more hosts|waiting for more hosts")

    def said(self, number: int) -> str:
        log = self.folder / f"host{number}.log"
        return log.read_text() if log.exists() else ""

    def wait(self, number: int, pattern: str) -> None:
        """Until a host has said so; the test's own timeout ends the wait."""
        while not re.search(pattern, self.said(number)):
            time.sleep(0.05)

    def preempt(self, number: int) -> None:
        """As Slurm does with `--signal=B:TERM@60`, a minute before it takes the host away; the job ends in time."""
        told = self.slurm.run("scancel", "--batch", "--signal=TERM", self.jobs[number])
        assert told.returncode == 0, told.stderr
        while "RUNNING" in self.state(number) or "COMPLETING" in self.state(number):
            time.sleep(0.05)
        assert "ExitCode=143:0" in self.state(number), self.said(number)

    def state(self, number: int) -> str:
        return self.slurm.run("scontrol", "show", "job", self.jobs[number]).stdout

    def requeue(self, number: int) -> None:
        told = self.slurm.run("scontrol", "requeue", self.jobs[number])
        assert told.returncode == 0, told.stderr


def test_hosts_of_an_elastic_job_that_are_preempted_leave_and_requeued_they_come_back_into_it(
    slurm: Cluster, home, tmp_path
):
    """The first one, too: it began a job of its own."""
    tmp_path.chmod(0o755)
    made = Hosts(slurm, tmp_path, home)
    made.wait(0, "without this host, ")
    made.preempt(2)
    made.wait(0, r"leaves after this step \(SIGTERM\); 2 ranks on 2 hosts continue")
    made.requeue(2)
    made.wait(0, "accepted; 3 ranks on 3 hosts continue")
    made.wait(0, r"without this host, (?s:.*)without this host, ")
    made.preempt(0)
    made.wait(0, "this host has left the job, which continues on the others")
    made.requeue(0)
    made.wait(0, "this job is already running, led by the host at .*: this host joins it there")
    leader = next(number for number in (1, 2) if "this host leads the job now" in made.said(number))
    made.wait(leader, "accepted; 3 ranks on 3 hosts continue")
    (tmp_path / "finish").touch()
    for number, job in enumerate(made.jobs):
        slurm.wait_end(job)
        assert "ExitCode=0:0" in made.state(number), made.said(number)
    assert not any(" is lost: " in made.said(number) for number in range(3))


def test_the_examples_of_the_documentation_run_as_they_stand(slurm: Cluster, home):
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "slurm.md").read_text()
    (block,) = re.findall(r"```bash\n((?:# [^\n]*\n)*srun -N 2.*?)```", text, re.DOTALL)
    search = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
    ended = slurm.run("bash", "-ec", block, PATH=search, **home)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    ranks = said(ended.stdout.partition("Submitted")[0])
    assert sorted(ranks) == list(range(ranks[0][1]))
    job = re.search(r"Submitted batch job (\d+)", ended.stdout)[1]
    slurm.wait_end(job)
    log = (slurm.folder / f"train-{job}.log").read_text()
    assert sorted(said(log)) == list(range(ranks[0][1])), log
