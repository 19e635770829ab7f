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
from phalanx._job.launch import command
from phalanx._job.launch.adopt import adopt, complete_rendezvous, find_node, has_own_endpoint, plan_node, share_gpus
from phalanx._job.launch.command_line import parse, read_settings
from phalanx._job.schedulers.allocation import Allocation
from phalanx._job.schedulers.rendezvous import find_rendezvous
from phalanx.errors import LaunchError
from phalanx.testing import run_ranks

NO_MPI = {"PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}  # nobody started a child of it
TWO_HOSTS = Allocation("Slurm", 0, 2, "slurm-1.0", ("SLURM_PROCID",), first_host="127.0.0.1")
SECOND = replace(TWO_HOSTS, node=1)


def asked(found, *words):
    """Return the rendezvous of node `found`, as the options complete it."""
    settings = read_settings([*words, "train.py"], {}, problems := [], found=found)
    refuse(problems)
    return settings.rendezvous


@pytest.fixture
def home(tmp_path):
    """The environment of a user whose configuration folder is empty."""
    return {"HOME": str(tmp_path)}


def test_node_0_hands_its_path_to_the_others_on_its_host():
    def node(rank, world_size):
        found = Allocation("MPICH", rank, 3, f"job-{os.getppid()}", (), local_node=rank, num_local_nodes=3)
        rendezvous, _ = find_rendezvous(found, None, {}, asked(found))
        assert (rendezvous.is_local, rendezvous.leads, rendezvous.key) == (True, rank == 0, None)
        if rendezvous.announce is not None:
            rendezvous.announce("/a/path")
            for thread in threading.enumerate():
                if thread.name == "phalanx-announce":
                    thread.join()
        return rendezvous.endpoint

    assert run_ranks(node, 3, init=False) == ["", "/a/path", "/a/path"]


def test_all_nodes_have_the_users_key_and_the_ports_of_the_first(home):
    assert find_rendezvous(TWO_HOSTS, None, home, asked(TWO_HOSTS))[0].key is None
    key, _ = make_key(default_path(home))
    first, job = find_rendezvous(TWO_HOSTS, None, home, asked(TWO_HOSTS))
    assert job == "slurm-1.0"
    other, _ = find_rendezvous(SECOND, None, home, asked(SECOND))
    places = tuple(f"127.0.0.1:{port}" for port in TWO_HOSTS.ports)
    for node, rendezvous in enumerate((first, other)):
        assert (rendezvous.endpoint, *rendezvous.more_endpoints) == places
        assert (rendezvous.leads, rendezvous.node_rank, rendezvous.key) == (node == 0, node, str(key))
        assert (rendezvous.min_nodes, rendezvous.max_nodes) == (2, 2)


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("--host-timeout 60 --local-addr 10.1.2.3", {"host_timeout_s": 60.0, "local_addr": "10.1.2.3"}),
        ("--rdzv-conf join_timeout=5", {"join_timeout_s": 5.0}),
        ("--witness h:1", {"witness": "h:1"}),
        ("--master-port 7", {"endpoint": ":7"}),
        ("--rdzv-endpoint n1:7", {"endpoint": "n1:7"}),
        ("--master-addr n1", {"endpoint": "n1:29500"}),
        ("--nnodes 2 --master-addr n1 --master-port 7", {"endpoint": "n1:7"}),
        ("--master-addr n1 --node-rank 0", {"endpoint": "n1:29500", "leads": True, "node_rank": 0}),
        ("--nnodes 3 --master-addr n1", {"endpoint": "n1:29500", "min_nodes": 3, "max_nodes": 3}),
        ("--rdzv-backend c10d", {}),
        ("--rdzv-backend c10d --rdzv-endpoint n1", {"endpoint": "n1:29400", "leads": None, "node_rank": None}),
        ("--nnodes 1:4", {"node_rank": None, "min_nodes": 1, "max_nodes": 4}),
        ("--nnodes 1:2 --rdzv-backend c10d", {"node_rank": None, "min_nodes": 1}),
    ],
)
def test_each_option_of_the_rendezvous_completes_what_the_scheduler_gives(words, where):
    """Without --nnodes they were all dropped. With --master-addr, every node led as node 0; MIN:MAX became a number."""
    for found in (TWO_HOSTS, SECOND):
        given = {"leads": found.node == 0, "node_rank": found.node, "min_nodes": 2, "max_nodes": 2, **where}
        assert asked(found, *words.split()) == Rendezvous(**given)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--nnodes 1", r"--nnodes 1, and Slurm: node 1 of 2 .* has 2. Leave out --nnodes, .*--standalone"),
        ("--nnodes 3:4", r"--nnodes 3:4, and Slurm: node 1 of 2 .* has 2. Leave out --nnodes"),
        ("--node-rank 0", "--node-rank 0: needs the address of node 0"),
        ("--nnodes 1:2 --master-addr n1", "--nnodes 1:2 with --node-rank or --master-addr"),
    ],
)
def test_an_option_that_contradicts_the_scheduler_is_refused(words, message):
    with pytest.raises(LaunchError, match=message):
        asked(SECOND, *words.split())


@pytest.mark.slow
def test_what_keeps_nodes_apart_is_told(home):
    with pytest.raises(
        LaunchError, match=r"(?s)MPI could not be asked: .*set MASTER_ADDR for all processes to an address"
    ):
        find_rendezvous(
            replace(TWO_HOSTS, scheduler="MPICH", first_host="", needs_mpi_broadcast=True),
            None,
            {**home, **NO_MPI},
            Rendezvous(),
        )
    with pytest.raises(LaunchError, match="pods share no folder, and there is no key in PHALANX_KEY"):
        find_rendezvous(replace(TWO_HOSTS, scheduler="Kubernetes"), None, {"HOME": "/nowhere"}, Rendezvous())
    with pytest.raises(LaunchError, match="the key in PHALANX_KEY: "):
        find_rendezvous(TWO_HOSTS, None, {**home, "PHALANX_KEY": "short"}, Rendezvous())


MPI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4711", "MPI_LOCALNRANKS": "1"}
JOB = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NNODES": "3"}


def adopted(words, environ):
    """Return this node's settings, and the environment that its ranks inherit."""
    settings = read_settings([*words, "train.py"], environ, [])
    found = find_node(settings, environ)
    if found is None:
        return settings, environ
    settings = read_settings([*words, "train.py"], environ, problems := [], found=found)
    refuse(problems)
    own, remaining = adopt(settings, environ, found)
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
    assert adopted(["--master-port=7"], {**MPI, **home})[0].rendezvous.endpoint == "10.0.0.9:7"
    on_one_host = {**MPI, **home, "MASTER_ADDR": "", "MASTER_PORT": "", "MPI_LOCALNRANKS": "2"}
    assert adopted(["--master-port=7"], on_one_host)[0].rendezvous.endpoint == "localhost:7"
    addressed, _ = adopted(["--rdzv-endpoint=n1:7"], {**MPI, **home, "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
    assert (addressed.rendezvous.endpoint, addressed.share, addressed.run_id) == ("n1:7", (1, 2), "")
    assert adopted(["--standalone"], {**MPI, **home})[0].rendezvous is None
    with pytest.raises(LaunchError, match=r"--nnodes 3, and MPICH: node 1 of 2 .* has 2. Leave out --nnodes"):
        adopted(["--nnodes=3"], {**MPI, **home})


def test_the_command_keeps_options_that_only_several_hosts_have(home, monkeypatch):
    """`srun -N2 phalanx run --witness H:P` was refused as a job of one host, and --rdzv-conf was ignored."""
    make_key(default_path(home))
    plans = []
    monkeypatch.setattr(command, "run_job", plans.append)
    command._run(["--witness=h:1", "--rdzv-conf=join_timeout=5", __file__], {**MPI, **home}, old_launcher=False)
    rendezvous = plans[0].settings.rendezvous
    assert (rendezvous.witness, rendezvous.join_timeout_s, rendezvous.endpoint) == ("h:1", 5.0, "10.0.0.9:4711")


@pytest.mark.parametrize(
    ("environ", "num_gpus", "visible"),
    [
        ({}, 4, ["0,1", "2,3"]),
        ({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, 4, ["4,5", "6,7"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, 3, ["GPU-a", "GPU-b,GPU-c"]),
        ({"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}, 2, ["0", "1"]),  # CUDA reads the list up to -1
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}, 4, ["0,1", "2,3"]),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "4"}, 2, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, 2, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=2"}, 2, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_TRES_PER_TASK": "cpu=4"}, 2, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "3,4,5", "JSM_NAMESPACE_RANK": "1"}, 3, None),
        ({"CUDA_VISIBLE_DEVICES": "3"}, 1, None),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, None),
    ],
)
def test_nodes_on_one_host_share_the_gpus_that_all_of_them_see(environ, num_gpus, visible):
    """Slurm gives every task all GPUs of the job: two tasks started eight ranks on four GPUs."""
    shares = [share_gpus(environ, replace(TWO_HOSTS, local_node=i, num_local_nodes=2), num_gpus) for i in (0, 1)]
    assert shares == ([{}, {}] if visible is None else [{"CUDA_VISIBLE_DEVICES": each} for each in visible])


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
    plan = plan_node(settings, environ, problems, find_node(settings, environ))
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
