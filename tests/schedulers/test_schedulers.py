"""Which scheduler started `phalanx run`, and as which node, read from what it sets.

Slurm's variables are those of real steps (tests/system/test_slurm.py has one); those of Kubernetes, Kubeflow, LSF and
PBS are what their documentation says: none of them can run here.
"""

import pytest

from phalanx._job.schedulers import find, kubernetes
from phalanx._job.schedulers.allocation import Allocation
from phalanx._job.schedulers.find import find_allocation
from phalanx._job.schedulers.slurm import find_unused_hosts
from phalanx.errors import LaunchError

STEP = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "2",
    "SLURM_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2"}
FQDN = "train-1.train.default.svc.cluster.local"
KUBEFLOW = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
}


def test_a_task_of_slurm_is_a_node():
    found = find_allocation(STEP)
    assert found == Allocation(
        "Slurm", 1, 2, "slurm-17.0", ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"), first_host="n1"
    )
    assert found.describe() == (
        "Slurm: node 1 of 2 of job slurm-17.0 (SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST)"
    )
    assert not found.is_on_one_host
    assert find_allocation({**STEP, "SLURM_STEP_RESV_PORTS": "12003-12005"}).ports == (12003,)
    chosen = find_allocation({**STEP, "MASTER_ADDR": "n1-ib", "MASTER_PORT": "4711"})
    assert (chosen.first_host, chosen.ports) == ("n1-ib", (4711,))


def test_several_tasks_on_a_host_know_which_of_them_they_are():
    both = {**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    found = find_allocation({**both, "SLURM_LOCALID": "1", "SLURM_NODEID": "0"})
    assert (found.local_node, found.num_local_nodes, found.is_on_one_host) == (1, 2, True)


@pytest.mark.parametrize("environ", [{}, {**STEP, "SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_JOB_ID": "17"}])
def test_a_command_that_was_started_once_is_a_job_of_its_own(environ):
    assert find_allocation(environ) is None


def test_the_body_of_a_batch_script_leaves_hosts_unused():
    body = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
    assert find_unused_hosts(body) == 2
    assert find_unused_hosts({**body, "SLURM_NNODES": "1"}) == 0
    assert find_unused_hosts({**body, "SLURM_STEP_ID": "0"}) == 0  # srun -n1, as the user wanted it
    assert find_unused_hosts(STEP) == 0


def test_ports_follow_from_the_job_and_several_are_tried():
    ports = find_allocation(STEP).ports
    assert ports == find_allocation({**STEP, "SLURM_PROCID": "0"}).ports
    assert len(set(ports)) == len(ports) > 4
    assert all(20000 <= port < 30000 for port in ports)
    assert not set(ports) & set(find_allocation({**STEP, "SLURM_STEP_ID": "1"}).ports)


def test_an_mpi_process_is_a_node_also_inside_of_slurm():
    mpi = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    found = find_allocation({**STEP, **mpi})
    assert (found.scheduler, found.node, found.num_nodes) == ("MPICH", 2, 4)
    assert (found.local_node, found.num_local_nodes) == (0, 2)
    assert found.variables == ("PMI_RANK", "PMI_SIZE")
    assert find_allocation({**mpi, "PMI_SIZE": "1", "PMI_RANK": "0"}) is None


def test_a_pod_of_an_indexed_job_finds_the_first_by_the_headless_service():
    found = kubernetes.find_indexed_job(POD, FQDN)
    assert (found.node, found.num_nodes, found.ports) == (1, 2, (29400,))
    assert found.first_host == "train-0.train.default.svc.cluster.local"
    assert found.job == "kubernetes-train"
    assert found.variables == ("JOB_COMPLETION_INDEX", "PET_NNODES")
    hosts = [kubernetes.find_indexed_job({**POD, "MASTER_ADDR": "gpu-a.eu"}, name) for name in ("gpu-a.eu", "gpu-b.eu")]
    assert [one.job for one in hosts] == ["kubernetes-gpu-a"] * 2  # on the host's network a pod has the node's name
    assert kubernetes.find_indexed_job({"JOB_COMPLETION_INDEX": "1"}, FQDN, nnodes=2) == Allocation(
        **{**vars(found), "variables": ("JOB_COMPLETION_INDEX",)}
    )
    told = kubernetes.find_indexed_job({**POD, "MASTER_ADDR": "first.example"}, "some-name")
    assert (told.first_host, told.variables[-1]) == ("first.example", "MASTER_ADDR")
    assert find_allocation({"PET_NNODES": "1", "JOB_COMPLETION_INDEX": "0"}) is None
    # `phalanx doctor` reported 1 of 2, and `phalanx run` used 1 of 4.
    assert kubernetes.find_indexed_job({**POD, "PET_NNODES": "2:4"}, FQDN).num_nodes == 4


def test_a_pod_that_cannot_know_the_others_says_what_is_missing():
    with pytest.raises(LaunchError, match=r"JOB_COMPLETION_INDEX=1: .* the number of pods is unknown. Set PET_NNODES"):
        kubernetes.find_indexed_job({"JOB_COMPLETION_INDEX": "1"}, FQDN)
    with pytest.raises(LaunchError, match="Set `subdomain` in the Job's pod template"):
        kubernetes.find_indexed_job(POD, "train-1")


def test_what_kubeflow_calls_a_rank_is_a_node():
    found = find_allocation(KUBEFLOW)
    assert (found.scheduler, found.node, found.num_nodes) == ("Kubeflow", 2, 3)
    assert (found.first_host, found.ports) == ("train-master-0", (23456,))
    pet = {
        "PET_NNODES": "3",
        "PET_NODE_RANK": "2",
        "PET_NPROC_PER_NODE": "4",
        "PET_MASTER_ADDR": "train-master-0",
        "PET_MASTER_PORT": "23456",
    }
    both = find_allocation({**KUBEFLOW, **pet, "WORLD_SIZE": "12"})  # with PET_NPROC_PER_NODE it counts processes
    trainer = find_allocation({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2", **pet})
    for one in (both, trainer):
        assert (one.node, one.num_nodes, one.first_host) == (2, 3, "train-master-0")
    assert find_allocation({**KUBEFLOW, "LOCAL_RANK": "0"}) is None, "a launcher has started this process"


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**KUBEFLOW, "PET_NODE_RANK": "1"}, "RANK=2 and PET_NODE_RANK=1"),
        ({**KUBEFLOW, "PET_MASTER_ADDR": "other"}, "MASTER_ADDR=train-master-0 and PET_MASTER_ADDR=other"),
        ({**KUBEFLOW, "JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX=1 and RANK=2"),
        ({**KUBEFLOW, "RANK": "3"}, "RANK=3, WORLD_SIZE=3, .*: Kubeflow says that this is number 3 of 3"),
        ({**STEP, "SLURM_PROCID": "2"}, "SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=2, .* is number 2 of 2"),
        ({"PMI_RANK": "7", "PMI_SIZE": "4"}, "PMI_RANK=7, PMI_SIZE=4 in the environment: MPICH says"),
        ({**STEP, "MASTER_PORT": "99999"}, "MASTER_PORT=99999 in the environment: must be a port, 1 to 65535"),
        ({**KUBEFLOW, "PET_NNODES": "many"}, "PET_NNODES=many in the environment: must be a number of nodes"),
    ],
)
def test_variables_that_contradict_each_other_are_refused_by_name(environ, words):
    with pytest.raises(LaunchError, match=words):
        find_allocation(environ)


def test_lsf_lists_hosts_and_the_own_name_says_which_one_this_is(tmp_path):
    lsf = {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "a.site 4 b.site 4", "LSB_HOSTS": "a.site a.site b.site b.site"}
    found = find.find_lsf(lsf, "b")
    assert (found.node, found.num_nodes, found.first_host, found.job) == (1, 2, "a.site", "lsf-5")
    assert found.variables == ("LSB_JOBID", "LSB_MCPU_HOSTS")
    assert 'blaunch -z "a.site b.site" phalanx run' in found.hint
    assert find.find_lsf({**lsf, "LSB_JOBINDEX": "3"}, "a.site").job == "lsf-5.3"
    assert find.find_lsf({**lsf, "LSB_MCPU_HOSTS": "a.site 8"}, "a.site") is None
    (tmp_path / "hosts").write_text("c\nc\nd\n")
    assert find.find_lsf({**lsf, "LSB_DJOB_HOSTFILE": str(tmp_path / "hosts")}, "d").first_host == "c"
    batch = {**lsf, "LSB_MCPU_HOSTS": "batch01 4 gpu01 4"}
    assert find.find_lsf(batch, "batch01").num_nodes == 2, "only jsrun's launch host runs nothing"
    with pytest.raises(LaunchError, match=r"runs on a.site, b.site \(LSB_MCPU_HOSTS\), and this host is c"):
        find.find_lsf(lsf, "c")


def test_jsrun_numbers_what_it_starts():
    jsrun = {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": "0"}
    found = find.find_lsf({"LSB_JOBID": "5", "LSB_HOSTS": "batch2 a a b b", **jsrun}, "whatever")
    assert (found.node, found.num_nodes, found.first_host) == (1, 2, "a")


def test_pbs_lists_hosts_in_a_file(tmp_path):
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    pbs = {"PBS_JOBID": "9.server", "PBS_NODEFILE": str(tmp_path / "nodes")}
    found = find.find_pbs(pbs, "b.site")
    assert (found.node, found.num_nodes, found.first_host, found.job) == (1, 2, "a", "pbs-9.server")
    assert "pbsdsh" in found.hint
    with pytest.raises(LaunchError, match="PBS_NODEFILE=/nowhere, the list of its hosts, cannot be read here"):
        find.find_pbs({**pbs, "PBS_NODEFILE": "/nowhere"}, "b")
    assert find.find_pbs({}, "a") is None
