"""Plan the environment of a rank: the variables that torchrun sets, and Phalanx's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx._comm.rendezvous.launchers import describe_rank, find_launch
from phalanx._job.agent.plan import JobPlan

# Only the agent needs the job's key: it must not leak through a rank's environment or core dump.
KEY_VARIABLE = "PHALANX_KEY"

# The launcher sets these for each rank, overriding the user's values. Values of an outer launcher must not reach ranks.
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCHELASTIC_ERROR_FILE",
    "PHALANX_STORE", "PHALANX_STORE_OF", "PHALANX_ADDRESS", "PHALANX_AGENT", "PHALANX_TTY", "PHALANX_GENERATION",
    "PHALANX_REPORT", "PHALANX_RUN", "PHALANX_RANKS_PER_GPU",
)  # fmt: skip
_LEAST_COLUMNS = 20  # minimum of COLUMNS, for a very narrow terminal


@dataclass(frozen=True)
class Place:
    """A `Place` gives the ranks of a host: `num_ranks` ranks from `first_rank` on, on host number `node`.

    Ranks are also numbered within their role across all hosts; this host's role ranks begin with `first_role_rank`.
    """

    node: int
    num_nodes: int
    first_rank: int
    num_ranks: int
    world_size: int
    first_role_rank: int
    role_world_size: int

    @classmethod
    def alone(cls, num_ranks: int) -> Place:
        """Return the place of a job whose ranks are all on one host."""
        return cls(0, 1, 0, num_ranks, num_ranks, 0, num_ranks)

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)


def describe_ranks(place: Place) -> str:
    """Return this host's ranks as text: `rank 2` or `ranks 2-5`."""
    first, last = place.ranks[0], place.ranks[-1]
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def plan_rank_environment(
    plan: JobPlan,
    place: Place,
    rank: int,
    *,
    master_port: int,
    restart_count: int = 0,
    generation: int = 0,
    store: str = "",
    agent: str = "",
) -> dict[str, str]:
    """Return the variables that the launcher sets for `rank`, which runs on this host.

    RANK_VARIABLES override inherited values; all other variables are defaults, which the user's values override.

    Arguments:
        place: this host's ranks in the current attempt, or in the current generation of an elastic job.
        generation: the number of that generation; 0 for the first.
        store: PHALANX_STORE, the address of the store for the ranks' rendezvous; empty outside Linux.
        agent: PHALANX_AGENT, the address of this host's agent; empty outside Linux.
    """
    settings, local_rank = plan.settings, rank - place.first_rank
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.num_ranks),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.num_nodes),
        "ROLE_NAME": settings.role,
        "ROLE_RANK": str(place.first_role_rank + local_rank),
        "ROLE_WORLD_SIZE": str(place.role_world_size),
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts or 0),
        "TORCHELASTIC_RUN_ID": plan.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # no TCPStore listens on MASTER_PORT before rank 0 opens one
        "TORCHELASTIC_SIGNALS_TO_HANDLE": settings.signals_to_handle,
        "PYTHONUNBUFFERED": "1",
        **plan.launcher_variables,
    }
    if store:
        variables["PHALANX_STORE"] = store
        variables["PHALANX_STORE_OF"] = describe_rank(variables)
    if plan.run:
        variables["PHALANX_RUN"] = plan.run
    if generation:
        variables["PHALANX_GENERATION"] = str(generation)
    if agent:
        variables["PHALANX_AGENT"] = agent
    if plan.columns:
        variables["PHALANX_TTY"] = "1"
        prefix = f"[{place.world_size - 1}] "
        variables["COLUMNS"] = str(max(_LEAST_COLUMNS, plan.columns - len(prefix) - 1))
    return {name: value for name, value in variables.items() if name in RANK_VARIABLES or name not in plan.environment}


def plan_environment(
    own: Mapping[str, str],
    env: Mapping[str, str | None],
    first_env: Mapping[str, str] | None = None,
    first_passed: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment that the ranks of a host inherit. Earlier sources override later ones:

    1. `env`: --env on this host; None stands for the value in `own`
    2. `first_env`: --env on the first host
    3. `own`: the environment of this command
    4. `first_passed`: the variables that the first host sends by default

    `plan_rank_environment` adds the launcher's variables.
    """
    given = {name: own.get(name) if value is None else value for name, value in env.items()}
    return {
        **(first_passed or {}),
        **own,
        **(first_env or {}),
        **{name: value for name, value in given.items() if value is not None},
    }


# Each backward pass allocates every gradient, and frees it later. By default glibc returns large blocks to the system
# immediately, and each step pays for fresh, zeroed pages: on two cores, forward and backward of a perceptron with 25
# million parameters took 105 ms, and 62 ms with these limits. glibc still returns blocks of 1 GiB and more.
_MALLOC = "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=1073741824"


def plan_zygote_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """Return the zygote's environment, which the ranks inherit, without launchers' variables and the job's key.

    OMP_NUM_THREADS is `threads`, and glibc's allocator keeps freed memory, unless the user sets these variables.
    """
    variables = {name: value for name, value in environment.items() if name not in (*RANK_VARIABLES, KEY_VARIABLE)}
    variables.setdefault("OMP_NUM_THREADS", str(threads))
    variables.setdefault("GLIBC_TUNABLES", _MALLOC)
    variables.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # as torchrun does: NCCL errors end the process
    return variables


def find_disagreements(environ: Mapping[str, str], world_size: int, *, standalone: bool = False) -> list[str]:
    """Return why a job of `world_size` ranks must not be started from this environment; empty if it may be.

    `standalone`: the user declares this a separate job, even if another launcher starts the command several times.
    """
    problems = []
    ranks = [f"{name}={environ[name]}" for name in ("RANK", "LOCAL_RANK") if environ.get(name)]
    if ranks:
        problems.append(
            f"{' and '.join(ranks)} in the environment: this process is already a rank of another launcher, "
            "and each rank would start the whole job again. "
            "Use one launcher; to nest them on purpose: env -u RANK -u LOCAL_RANK -u WORLD_SIZE phalanx run …"
        )
    size = environ.get("WORLD_SIZE")
    if size and not ranks and size != str(world_size):
        problems.append(
            f"WORLD_SIZE={size} in the environment, but this command would start {world_size} ranks. "
            f"Unset WORLD_SIZE, or pass --nproc-per-node {size}."
        )
    launch = find_launch(environ)
    if launch is not None and launch.world_size > 1 and not standalone:
        starter, fewer = "mpiexec", "phalanx run without mpiexec"
        if launch.launcher == "Slurm":
            starter, fewer = "srun", "srun -n1 -c<cores> phalanx run"
        problems.append(
            f"{launch.launcher} started this command {launch.world_size} times (this is number {launch.rank}), and "
            f"each copy would start its own job. On one host: {fewer}. On one or more hosts, without phalanx run: "
            f"{starter} -n <ranks> python train.py, where phalanx.init joins the ranks. To start separate jobs: "
            "phalanx run --standalone."
        )
    return problems
