"""Where the nodes of a scheduler's job meet; the rendezvous itself is in tests/system/test_run_schedulers.py."""

import os
import socket
import threading
from dataclasses import replace

import pytest

from phalanx._comm.control.key import Key
from phalanx._comm.control.key_file import default_path, make_key
from phalanx._job.agent.plan import JobPlan, Pinning
from phalanx._job.agent.settings import refuse
from phalanx._job.coordinator.rendezvous import Rendezvous
from phalanx._job.launch.adopt import adopt, complete_rendezvous, find_node, has_own_endpoint, place_node, plan_node
from phalanx._job.launch.command_line import parse, read_settings
from phalanx._job.schedulers.allocation import Allocation
from phalanx._job.schedulers.rendezvous import find_rendezvous
from phalanx.errors import LaunchError
from phalanx.testing import run_ranks

NO_MPI = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # nobody started a child of it
ASKED = Rendezvous(join_timeout_s=30.0, host_timeout_s=7.0)
TWO_HOSTS = Allocation("Slurm", 0, 2, "slurm-1.0", ("SLURM_PROCID",), first_host="127.0.0.1")


@pytest.fixture
def home(tmp_path):
    """The environment of a user whose configuration folder is empty."""
    return {"HOME": str(tmp_path)}


def test_node_0_hands_its_path_to_the_others_on_its_host():
    def node(rank, world_size):
        found = Allocation("MPICH", rank, 3, f"job-{os.getppid()}", (), local_node=rank, num_local_nodes=3)
        rendezvous, _ = find_rendezvous(found, None, {}, place_node(ASKED, found))
        assert (rendezvous.is_local, rendezvous.leads, rendezvous.key) == (True, rank == 0, None)
        if rendezvous.announce is not None:
            rendezvous.announce("/a/path")
            for thread in threading.enumerate():
                if thread.name == "phalanx-announce":
                    thread.join()
        return rendezvous.endpoint

    assert run_ranks(node, 3, init=False) == ["", "/a/path", "/a/path"]


def test_all_nodes_have_the_users_key_and_the_ports_of_the_first(home):
    assert find_rendezvous(TWO_HOSTS, None, home, place_node(ASKED, TWO_HOSTS))[0].key is None
    key, _ = make_key(default_path(home))
    first, job = find_rendezvous(TWO_HOSTS, None, home, place_node(ASKED, TWO_HOSTS))
    assert job == "slurm-1.0"
    second = replace(TWO_HOSTS, node=1)
    other, _ = find_rendezvous(second, None, home, place_node(ASKED, second))
    places = tuple(f"127.0.0.1:{port}" for port in TWO_HOSTS.ports)
    for node, rendezvous in enumerate((first, other)):
        assert (rendezvous.endpoint, *rendezvous.more_endpoints) == places
        assert (rendezvous.leads, rendezvous.node_rank, rendezvous.key) == (node == 0, node, str(key))
        assert (rendezvous.min_nodes, rendezvous.max_nodes, rendezvous.host_timeout_s) == (2, 2, 7.0)


@pytest.mark.slow
def test_what_keeps_nodes_apart_is_told(home):
    with pytest.raises(LaunchError, match=r"(?s)MPI could not be asked: .*set MASTER_ADDR for all to an address"):
        find_rendezvous(
            replace(TWO_HOSTS, scheduler="MPICH", first_host="", asks_mpi=True), None, {**home, **NO_MPI}, ASKED
        )
    with pytest.raises(LaunchError, match="pods share no folder, and there is no key in PHALANX_KEY"):
        find_rendezvous(replace(TWO_HOSTS, scheduler="Kubernetes"), None, {"HOME": "/nowhere"}, ASKED)
    with pytest.raises(LaunchError, match="the key in PHALANX_KEY: "):
        find_rendezvous(TWO_HOSTS, None, {**home, "PHALANX_KEY": "short"}, ASKED)


MPI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4711", "MPI_LOCALNRANKS": "1"}
JOB = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NNODES": "3"}


def adopted(words, environ):
    """Return this node's settings, and the environment that its ranks inherit."""
    settings = parse([*words, "train.py"], environ)
    found = find_node(settings, environ)
    if found is None:
        return settings, environ
    problems = []
    own, remaining = adopt(settings, environ, found, problems)
    refuse(problems)
    if not has_own_endpoint(settings, found):
        plan = JobPlan(own, 1, Pinning(1, ((),)), 0, remaining, remaining, own.run_id)
        own = complete_rendezvous(plan, environ, found).settings
    return own, remaining


def test_options_override_the_scheduler(home, capfd):
    make_key(default_path(home))
    settings, environ = adopted([], {**MPI, **home})
    assert (settings.rendezvous.endpoint, settings.rendezvous.node_rank) == ("10.0.0.9:4711", 1)
    assert (settings.run_id, capfd.readouterr().err, "PMI_RANK" in environ) == ("mpiexec-10.0.0.9:4711", "", False)
    assert adopted(["--rdzv-id", "mine"], {**MPI, **home})[0].run_id == "mine"
    elsewhere = ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=other:1"]
    assert adopted(elsewhere, {**MPI, **home})[0].rendezvous.endpoint == "other:1"
    assert adopted(["--standalone"], {**MPI, **home})[0].rendezvous is None
    with pytest.raises(LaunchError, match=r"--nnodes 3, and MPICH: node 1 of 2 .* has 2. Leave out --nnodes"):
        adopted(["--nnodes=3"], {**MPI, **home})


TRAINER = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2", "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "train-0.train", "PET_MASTER_PORT": "29500",
}  # fmt: skip


def test_the_variables_of_kubeflows_trainer_are_the_schedulers_and_not_the_users(home):
    """A pod without a key waited for another one's file instead of asking for a Secret; options lost to variables."""
    key = {"PHALANX_KEY": str(Key(bytes(32)))}
    own, environ = adopted([], {**TRAINER, **key, "RANK": "1", "RANK_TABLE_FILE": "/etc/ranks"})
    assert (own.rendezvous.endpoint, own.rendezvous.node_rank, own.nproc_per_node) == ("train-0.train:29500", 1, "4")
    assert environ["RANK_TABLE_FILE"] == "/etc/ranks"
    assert "RANK" not in environ
    assert adopted(["--nproc-per-node=auto"], {**TRAINER, **key})[0].nproc_per_node == "auto"
    assert adopted(["--master-port=7"], {**TRAINER, **key})[0].rendezvous.endpoint == "train-0.train:7"
    with pytest.raises(LaunchError, match="pods share no folder, and there is no key in PHALANX_KEY"):
        adopted([], {**TRAINER, **home})
    assert parse(["--standalone", "train.py"], TRAINER).rendezvous is None


@pytest.mark.parametrize("words", [[], ["--standalone"]])
def test_the_rank_of_a_single_pod_is_not_taken_for_that_of_another_launcher(words):
    """PyTorchJob sets RANK=0 in a master without workers: "this process is already a rank of another launcher"."""
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_ADDR": "localhost", "MASTER_PORT": "23456", "RANK": "0"}
    num_nodes = "2" if words else "1"
    problems = []
    settings = read_settings([*words, __file__], environ := {**pod, "WORLD_SIZE": num_nodes}, problems)
    plan = plan_node(settings, environ, problems)
    assert plan.num_ranks >= 1
    assert "RANK" not in plan.environment


def test_the_key_goes_to_the_agent_and_not_on_to_what_ranks_start(home):
    key, _ = make_key(default_path(home))
    settings, environ = adopted([], {**MPI, "PHALANX_KEY": str(key), "OTHER": "kept"})
    assert (settings.rendezvous.key, environ.get("PHALANX_KEY"), environ["OTHER"]) == (str(key), None, "kept")


def test_where_nobody_says_that_it_was_started_on_every_host_the_line_says_how(home, capfd):
    make_key(default_path(home))
    lsf = {"LSB_JOBID": "5", "LSB_HOSTS": f"{socket.gethostname()} other other"}
    adopted([], {**lsf, **home})
    (line,) = capfd.readouterr().err.splitlines()
    assert ", if that port is free. Start it" in line
    assert line.endswith(f'on every host: blaunch -z "{socket.gethostname()} other" phalanx run …')


def test_a_command_that_is_started_once_says_if_hosts_are_left_over(capfd):
    settings, _ = adopted([], JOB)
    assert settings.rendezvous is None
    assert capfd.readouterr().err == (
        "phalanx run: Slurm gave this job 3 hosts, but this command, started once, uses only one. To use all: "
        "srun --ntasks-per-node=1 phalanx run …\n"
    )
