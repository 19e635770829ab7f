from dataclasses import replace

import pytest

from phalanx._job.agent.environment import (
    RANK_VARIABLES,
    Place,
    find_disagreements,
    plan_environment,
    plan_rank_environment,
    plan_zygote_environment,
)
from phalanx._job.agent.plan import JobPlan, Pinning
from phalanx._job.agent.settings import Settings
from phalanx._job.agent.target import JobTarget
from phalanx._job.hosts.job_spec import own_address_variables

SETTINGS = Settings(JobTarget("script", "train.py"), max_restarts=2)
PLAN = JobPlan(SETTINGS, 3, Pinning(1, ((),) * 3), 0, {}, {}, run_id="none")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_sees_what_torchrun_sets(rank: int) -> None:
    variables = plan_rank_environment(PLAN, Place.alone(3), rank, master_port=1234, restart_count=1)
    expected = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "LOCAL_WORLD_SIZE": 3, "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1, "ROLE_NAME": "default", "ROLE_RANK": rank, "ROLE_WORLD_SIZE": 3,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1234, "TORCHELASTIC_RESTART_COUNT": 1,
        "TORCHELASTIC_MAX_RESTARTS": 2, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": False,
    }  # fmt: skip
    assert {name: variables[name] for name in expected} == {name: str(value) for name, value in expected.items()}
    assert "PHALANX_TTY" not in variables
    assert "PHALANX_STORE" not in variables
    assert "PHALANX_AGENT" not in variables


def test_store_and_terminal_are_told_when_there_are_some() -> None:
    plan = replace(PLAN, columns=75)
    variables = plan_rank_environment(plan, Place.alone(1), 0, master_port=1, store="/proc/1/fd/5", agent="a:b")
    assert variables["PHALANX_STORE"] == "/proc/1/fd/5"
    assert variables["PHALANX_AGENT"] == "a:b"
    assert variables["PHALANX_TTY"] == "1"
    assert variables["COLUMNS"] == "70"


def test_every_variable_of_a_rank_is_the_launchers_or_a_default_that_the_user_replaces() -> None:
    """COLUMNS, and the interfaces of Gloo and NCCL, were overwritten whatever the user had set."""
    addresses = own_address_variables("10.0.0.2", "eth1")
    variables = {**addresses, "PHALANX_REPORT": "d", "PHALANX_RANKS_PER_GPU": "2"}
    plan = replace(PLAN, columns=70, launcher_variables=variables, run="r")

    def plan_environment(plan: JobPlan) -> dict[str, str]:
        store, agent = "/proc/1/fd/5", "a:b"
        return plan_rank_environment(plan, Place.alone(1), 0, master_port=1, generation=1, store=store, agent=agent)

    everything = plan_environment(plan)
    defaults = everything.keys() - set(RANK_VARIABLES)
    assert defaults == {"PYTHONUNBUFFERED", "COLUMNS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    users = replace(plan, environment=dict.fromkeys(everything, "the user's"))
    assert plan_environment(users) == {k: v for k, v in everything.items() if k not in defaults}


@pytest.mark.parametrize(
    ("own", "env", "first_env", "first_passed", "value"),
    [
        ("own", "mine", "first", "passed", "mine"),
        ("own", None, "first", "passed", "own"),  # `--env NAME`: the value here
        ("own", "", "first", "passed", "first"),
        ("", None, "first", "passed", "first"),  # `--env NAME`, which has no value here
        ("own", "", "", "passed", "own"),
        ("", "", "", "passed", "passed"),
    ],
)
def test_env_here_replaces_env_there_which_replaces_this_hosts_own_which_replaces_what_is_passed_on(
    own: str, env: str | None, first_env: str, first_passed: str, value: str
) -> None:
    """A host that had the variable itself ignored the first host's --env. An empty value here means: not set."""
    mine: dict[str, str | None] = {} if env == "" else {"X": env}
    given = [{"X": text} if text else {} for text in (own, first_env, first_passed)]
    assert plan_environment(given[0], mine, *given[1:]) == {"X": value}


def test_ranks_of_several_hosts_are_numbered_over_all_and_within_their_role() -> None:
    place = Place(node=1, num_nodes=3, first_rank=4, num_ranks=2, world_size=9, first_role_rank=1, role_world_size=3)
    plan = replace(PLAN, settings=replace(SETTINGS, role="evaluator"), master_addr="10.0.0.1")
    variables = plan_rank_environment(plan, place, 5, master_port=5)
    expected = {
        "RANK": 5, "LOCAL_RANK": 1, "WORLD_SIZE": 9, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 1, "GROUP_WORLD_SIZE": 3,
        "ROLE_NAME": "evaluator", "ROLE_RANK": 2, "ROLE_WORLD_SIZE": 3, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": 5,
    }  # fmt: skip
    assert {name: variables[name] for name in expected} == {name: str(value) for name, value in expected.items()}


def test_the_zygote_inherits_nothing_from_another_launcher() -> None:
    outer = dict.fromkeys(RANK_VARIABLES, "wrong")
    planned = plan_zygote_environment({**outer, "HOME": "/h"}, 2)
    assert planned.keys() == {"HOME", "OMP_NUM_THREADS", "GLIBC_TUNABLES", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    assert (planned["HOME"], planned["OMP_NUM_THREADS"]) == ("/h", "2")


def test_the_jobs_key_is_not_in_the_environment_of_ranks() -> None:
    """PHALANX_KEY was handed on to every rank, and to every program that a rank starts."""
    assert "PHALANX_KEY" not in plan_zygote_environment({"PHALANX_KEY": "plx-secret", "PHALANX_KEY_FILE": "f"}, 1)


def test_the_users_own_omp_num_threads_stays() -> None:
    assert plan_zygote_environment({"OMP_NUM_THREADS": "7"}, 2)["OMP_NUM_THREADS"] == "7"


def test_freed_memory_is_kept_for_the_next_step_unless_the_user_tuned_glibc() -> None:
    assert "mmap_threshold=1073741824" in plan_zygote_environment({}, 1)["GLIBC_TUNABLES"]
    assert plan_zygote_environment({"GLIBC_TUNABLES": "x=1"}, 1)["GLIBC_TUNABLES"] == "x=1"


@pytest.mark.parametrize("environ", [{}, {"WORLD_SIZE": "2"}, {"OMPI_COMM_WORLD_SIZE": "1"}, {"RANK": ""}])
def test_an_environment_that_agrees_is_accepted(environ: dict[str, str]) -> None:
    assert find_disagreements(environ, 2) == []


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "2 ranks", "--nproc-per-node 8"]),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ["RANK=1", "already a rank", "env -u RANK"]),
        ({"LOCAL_RANK": "0"}, ["LOCAL_RANK=0", "already a rank"]),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
            ["Open MPI started this command 4 times (this is number 1)", "mpiexec -n <ranks>", "--standalone"],
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["MPICH started this command 2 times", "mpiexec"]),
        (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"},
            [
                "Slurm started this command 2 times (this is number 1)",
                "srun -n1 -c<cores> phalanx run",
                "srun -n <ranks>",
            ],
        ),
    ],
)
def test_an_outer_launcher_is_named(environ: dict[str, str], words: list[str]) -> None:
    (problem,) = find_disagreements(environ, 2)
    for word in words:
        assert word in problem


def test_whoever_wants_a_job_for_each_task_says_so() -> None:
    tasks = {"PMI_RANK": "0", "PMI_SIZE": "2"}
    assert find_disagreements(tasks, 2, standalone=True) == []
    assert len(find_disagreements({**tasks, "RANK": "0"}, 2, standalone=True)) == 1
