"""Check the facts: each topic has a pure function that returns a finding with advice."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from phalanx._base.host_addresses import is_public
from phalanx._base.torch_versions import OLDEST, TESTED, describe_untested, release_of
from phalanx._job.agent.limits import needed_open_files
from phalanx._tools.doctor.facts import DoctorFacts, Driver, Probe, Torch


class CheckStatus(enum.Enum):
    """`PROBLEM`: training would fail. `WARNING`: training would work, but slower or with less information."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class CheckResult:
    """A `CheckResult` is the result of a check. `advice` is the fix; empty only if nothing is wrong."""

    topic: str
    status: CheckStatus
    fact: str
    advice: str = ""


_oldest = ".".join(map(str, OLDEST))
_GIB = 1 << 30
# The memory of a rank that has imported torch and trains a small model; most of this memory is torch itself.
_BYTES_PER_RANK = 512 << 20
# DataLoader workers pass batches through /dev/shm; Docker's default of 64 MiB is too small for batches of images.
_SHM_BYTES = 256 << 20
_OPEN_FILES = 1024
_PROCESSES_PER_CORE = 16
_SLOW_CLOCKS = ("hpet", "acpi_pm", "jiffies", "refined-jiffies")


def check_cores(facts: DoctorFacts) -> CheckResult:
    """Check whether each rank can have a core of its own."""
    host = facts.host
    fact = f"{host.usable_cores} of {host.cores} usable"
    if host.cpu_quota is not None and host.cpu_quota < host.usable_cores:
        return CheckResult(
            "cores",
            CheckStatus.WARNING,
            f"{fact}, but the control group grants only {host.cpu_quota:.1f} cores' worth of time",
            f"Ranks beyond that are paused in the middle of a step: use --nproc-per-node {max(1, int(host.cpu_quota))},"
            " or raise the container's CPU limit.",
        )
    if host.usable_cores == 1:
        return CheckResult(
            "cores",
            CheckStatus.WARNING,
            fact,
            "Several ranks will take turns on one core: right results, no gain in speed. "
            + (
                "Lift the affinity (taskset, or the scheduler's cores per task)."
                if host.cores > 1
                else "Use a larger machine."
            ),
        )
    if host.usable_cores < host.cores:
        fact += " (CPU affinity)"
    return CheckResult("cores", CheckStatus.OK, fact)


def check_memory(facts: DoctorFacts) -> CheckResult:
    """Check whether the memory suffices for one rank per core."""
    host = facts.host
    if host.available_bytes is None:
        return CheckResult("memory", CheckStatus.OK, "not reported by this platform")
    fact = f"{host.available_bytes / _GIB:.1f} GiB available" + (
        " within the control group's limit" if host.memory_limited else ""
    )
    ranks = host.available_bytes // _BYTES_PER_RANK
    if ranks < host.usable_cores:
        return CheckResult(
            "memory",
            CheckStatus.WARNING,
            fact,
            f"A rank takes about {_BYTES_PER_RANK / _GIB:.1f} GiB before its data: use --nproc-per-node {max(1, ranks)}"
            " or fewer, or make room.",
        )
    if host.commit_headroom_bytes is not None and host.commit_headroom_bytes < host.usable_cores * _BYTES_PER_RANK:
        return CheckResult(
            "memory",
            CheckStatus.WARNING,
            f"{fact}, but only {host.commit_headroom_bytes / _GIB:.1f} GiB can be committed (vm.overcommit_memory=2)",
            "Starting ranks may be refused: set vm.overcommit_memory to 0, or raise vm.overcommit_ratio.",
        )
    return CheckResult("memory", CheckStatus.OK, fact)


def check_shm(facts: DoctorFacts) -> CheckResult:
    """Check whether DataLoader workers have room in /dev/shm; Phalanx itself needs none."""
    size = facts.host.shm_bytes
    if size is None:
        return CheckResult("/dev/shm", CheckStatus.OK, "none; Phalanx needs none")
    fact = f"{size / (1 << 20):.0f} MiB; Phalanx needs none, DataLoader workers do"
    if size < _SHM_BYTES:
        return CheckResult(
            "/dev/shm",
            CheckStatus.WARNING,
            fact,
            "DataLoader workers die with a bus error when it is full: start the container with --shm-size=1g, or call"
            " torch.multiprocessing.set_sharing_strategy('file_system') with a large TMPDIR.",
        )
    return CheckResult("/dev/shm", CheckStatus.OK, fact)


def check_core(facts: DoctorFacts) -> CheckResult:
    """Check whether the C core can be imported."""
    core = facts.kernel.core
    if core.works:
        return CheckResult("C core", CheckStatus.OK, core.detail)
    if facts.host.platform != "linux":
        return CheckResult(
            "C core",
            CheckStatus.WARNING,
            f"not built on {facts.host.platform}",
            "Collectives run over Gloo: slower, correct.",
        )
    return CheckResult(
        "C core",
        CheckStatus.WARNING,
        f"cannot be imported: {core.detail}",
        "Collectives run over Gloo, many times slower on one host. Install a C compiler and Python's headers"
        " (Debian, Ubuntu: apt install gcc python3-dev), then install phalanx again with `pip install -v`.",
    )


def check_kernel(facts: DoctorFacts) -> CheckResult:
    """Check whether the kernel has the features that the C core needs."""
    kernel = facts.kernel
    if kernel.proc is not None and not kernel.proc.works:
        return CheckResult(
            "kernel",
            CheckStatus.PROBLEM,
            f"/proc does not work ({kernel.proc.detail})",
            "Mount it (mount -t proc proc /proc). Without it `phalanx run` does not start, and ranks that are started "
            "with MASTER_ADDR and MASTER_PORT share no memory: collectives run over Gloo, many times slower.",
        )
    probes = {
        "futex": kernel.futex,
        "memfd": kernel.memfd,
        "pidfd": kernel.pidfd,
        "Unix socket": kernel.unix_sockets,
    }
    tried = {name: probe for name, probe in probes.items() if probe is not None}
    missing = {name: probe for name, probe in tried.items() if not probe.works}
    if not missing:
        return CheckResult(
            "kernel", CheckStatus.OK, f"{', '.join(tried)} work" if tried else "nothing to try on this platform"
        )
    return CheckResult(
        "kernel",
        CheckStatus.WARNING,
        "; ".join(f"{name} does not work ({probe.detail})" for name, probe in missing.items()),
        " ".join(_WITHOUT[name] for name in missing)
        + " A sandbox or a seccomp filter forbids it, or the kernel is older than 5.3: allow it in the container's"
        " profile (Docker: --security-opt seccomp=...).",
    )


_WITHOUT = {
    "futex": "Without futex use backend 'gloo'.",
    "memfd": "Without memfd the ranks' memory lies in unlinked files in /dev/shm, which must be large enough.",
    "pidfd": "Without pidfd ranks detect each other's end through pipes, up to 250 on a host.",
    "Unix socket": "Without Unix sockets collectives run over Gloo, many times slower on one host.",
}


def check_containers(facts: DoctorFacts) -> CheckResult:
    """Report whether this is a container, and what that means for ranks in several containers."""
    own = facts.kernel.namespaces
    if not own:
        return CheckResult("container", CheckStatus.OK, "none: the machine's own pids and users")
    meaning = {
        "pid": "ranks in other containers share memory with those here, and detect their end through pipes",
        "user": "ranks in other containers count as another host",
    }
    return CheckResult(
        "container", CheckStatus.OK, "; ".join(f"{kind} namespace of its own: {meaning[kind]}" for kind in own)
    )


def check_torch(facts: DoctorFacts) -> CheckResult:
    """Check whether PyTorch can be imported, is new enough, and has the backends `phalanx` and `gloo`."""
    torch = facts.torch
    if not isinstance(torch, Torch):
        return CheckResult(
            "torch",
            CheckStatus.PROBLEM,
            f"cannot be imported: {torch}",
            f"Install it into this Python: pip install 'torch>={_oldest}'. If it is there: python -c 'import torch'",
        )
    fact = f"{torch.version} with {', '.join(torch.backends) or 'no backend of its own'}"
    if release_of(torch.version) < OLDEST:
        return CheckResult(
            "torch",
            CheckStatus.PROBLEM,
            f"{fact}; {_oldest} or later is needed",
            f"pip install --upgrade 'torch>={_oldest}'",
        )
    if not torch.registered:
        return CheckResult(
            "torch",
            CheckStatus.PROBLEM,
            f"{fact}; it does not know the backend 'phalanx'",
            "Its entry point was not found: install phalanx with pip into this Python, and do not set"
            " TORCH_DEVICE_BACKEND_AUTOLOAD=0.",
        )
    if "gloo" not in torch.backends:
        return CheckResult(
            "torch",
            CheckStatus.WARNING if facts.kernel.core.works else CheckStatus.PROBLEM,
            f"{fact}; gloo is missing",
            "Jobs of several hosts need it, and so does one without the C core: use an official build of PyTorch.",
        )
    if untested := describe_untested(torch.version):
        return CheckResult(
            "torch",
            CheckStatus.WARNING,
            f"{fact}; {untested}",
            f"It may well work; the log names missing features. If it does not work: pip install 'torch=={TESTED[-1]}'",
        )
    return CheckResult("torch", CheckStatus.OK, fact)


def check_gpus(facts: DoctorFacts) -> CheckResult:
    """Check whether PyTorch sees the GPUs that the driver sees."""
    gpus, torch = facts.driver.gpus, facts.torch
    if not gpus:
        usable = isinstance(torch, Torch) and torch.cuda.works
        return CheckResult("GPUs", CheckStatus.OK, torch.cuda.detail if usable and isinstance(torch, Torch) else "none")
    fact = f"{len(gpus)} ({'; '.join(sorted({gpu.name for gpu in gpus}))})"
    if isinstance(torch, Torch) and not torch.cuda.works:
        if torch.cuda_version is None:
            return CheckResult(
                "GPUs",
                CheckStatus.WARNING,
                f"{fact}, but this PyTorch is built without CUDA",
                "Training runs on the CPU. For the GPUs, install the CUDA build of PyTorch.",
            )
        return CheckResult(
            "GPUs",
            CheckStatus.WARNING,
            f"{fact}, but PyTorch (CUDA {torch.cuda_version}) cannot use them: {torch.cuda.detail}",
            "Update the driver, or install a PyTorch for the CUDA version that nvidia-smi shows.",
        )
    return CheckResult("GPUs", CheckStatus.OK, fact)


def check_name(facts: DoctorFacts) -> CheckResult:
    """Check whether this machine's own name resolves: Gloo and many launchers rely on that."""
    host = facts.host
    if host.name_resolves.works:
        return CheckResult("host name", CheckStatus.OK, f"{host.name} is {host.name_resolves.detail}")
    return CheckResult(
        "host name",
        CheckStatus.WARNING,
        f"{host.name} does not resolve: {host.name_resolves.detail}",
        f"Jobs of one host are not affected. Gloo between hosts is: add the line '127.0.1.1 {host.name}' to /etc/hosts,"
        " or name the network interface in GLOO_SOCKET_IFNAME.",
    )


def check_network(facts: DoctorFacts) -> CheckResult:
    """Check whether strangers could read or send messages between ranks on several hosts."""
    if facts.host.addresses is None:
        return CheckResult(
            "network",
            CheckStatus.WARNING,
            "its interfaces cannot be listed: no file descriptor is free for that",
            "Raise the limit of open files (see limits), and run this again.",
        )
    addresses = [(name, address) for name, of_one in facts.host.addresses.items() for address in of_one]
    public = [f"{address} ({name})" for name, address in addresses if is_public(address)]
    others = [f"{address} ({name})" for name, address in addresses if name != "lo" and not is_public(address)]
    if public:
        return CheckResult(
            "network",
            CheckStatus.WARNING,
            f"{', '.join(public)} can be reached from the whole internet",
            "Tensors between hosts are neither encrypted nor authenticated, and a group that would send them to a "
            "public address is refused: let the hosts meet in a private network or a VPN (`phalanx docs security`).",
        )
    if not others:
        return CheckResult("network", CheckStatus.OK, "no address but the loopback's: nothing leaves this host")
    return CheckResult(
        "network",
        CheckStatus.OK,
        f"{', '.join(others)}: no public address; what ranks send to other hosts is not encrypted, and others in "
        "these networks can read it",
    )


def check_limits(facts: DoctorFacts) -> CheckResult:
    """Check whether enough files can be opened and enough processes started."""
    host = facts.host
    needed = _PROCESSES_PER_CORE * host.usable_cores
    if host.open_files is not None and host.open_files < _OPEN_FILES:
        return _check_open_files(host.open_files, host.open_files_hard, host.usable_cores)
    left = None if host.processes is None else host.processes - (host.processes_running or 0)
    if left is not None and left < needed:
        return CheckResult(
            "limits",
            CheckStatus.WARNING,
            f"{left} more processes and threads may be started",
            f"One rank per core with its threads and DataLoader workers may take {needed}: raise ulimit -u, or the"
            " container's limit (Docker: --pids-limit).",
        )
    files = "any number of" if host.open_files is None else host.open_files
    return CheckResult(
        "limits", CheckStatus.OK, f"{files} open files, {'any number of' if left is None else left} processes"
    )


def _check_open_files(soft: int, hard: int | None, cores: int) -> CheckResult:
    fact = f"{soft} open files per process"
    advice = "DataLoader workers and large jobs need more: "
    least = needed_open_files(cores)
    if hard is None or hard >= _OPEN_FILES:
        return CheckResult(
            "limits", CheckStatus.WARNING, fact, f"{advice}ulimit -n {min(4 * _OPEN_FILES, hard or 4 * _OPEN_FILES)}"
        )
    # Raising the soft limit with `ulimit -n` does not help here.
    fact += f", and no more than {hard} are allowed"
    elsewhere = (
        f"raise the hard limit to {4 * _OPEN_FILES} (Docker: --ulimit nofile=; systemd: LimitNOFILE=; else"
        " /etc/security/limits.conf and a new login)."
    )
    if hard < least:
        return CheckResult(
            "limits",
            CheckStatus.PROBLEM,
            fact,
            f"`phalanx run` needs {least} for {cores} {'rank' if cores == 1 else 'ranks'}: {elsewhere}",
        )
    meanwhile = f" Until then: ulimit -n {hard}" if hard > soft else ""
    return CheckResult("limits", CheckStatus.WARNING, fact, f"{advice}{elsewhere}{meanwhile}")


def check_folder(facts: DoctorFacts) -> CheckResult:
    """Check whether the working directory exists: PyTorch cannot be loaded in a removed directory."""
    folder = facts.host.folder
    if folder is not None:
        return CheckResult("folder", CheckStatus.OK, folder)
    return CheckResult("folder", CheckStatus.PROBLEM, "the current folder was removed", "cd to an existing folder.")


def check_clock(facts: DoctorFacts) -> CheckResult:
    """Check whether reading the clock is cheap."""
    source = facts.host.clock_source
    if source in _SLOW_CLOCKS:
        return CheckResult(
            "clock",
            CheckStatus.WARNING,
            f"the kernel reads {source}, which takes a microsecond or more each time",
            "Deadlines and profiles cost more than they should: boot with clocksource=tsc where the machine allows it.",
        )
    return CheckResult("clock", CheckStatus.OK, source or "not reported by this platform")


def check_variables(facts: DoctorFacts) -> CheckResult:
    """Check whether variables of this shell make scripts assume that they are ranks."""
    variables = facts.host.variables
    if left := {name: variables[name] for name in ("RANK", "WORLD_SIZE") if name in variables}:
        return CheckResult(
            "variables",
            CheckStatus.WARNING,
            f"{', '.join(f'{name}={value}' for name, value in left.items())} set in this shell",
            "A script started by hand will wait for a job that does not exist: unset "
            + " ".join(name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in variables),
        )
    listed = ", ".join(f"{name}={value}" for name, value in variables.items())
    return CheckResult("variables", CheckStatus.OK, listed or "none that affect a job")


def check_scheduler(facts: DoctorFacts) -> CheckResult:
    """Check whether a scheduler has started this command, as which node, and whether allocated hosts stay unused."""
    scheduler, unused = facts.host.scheduler, facts.host.unused_hosts
    if not scheduler.works:
        return CheckResult(
            "scheduler", CheckStatus.WARNING, scheduler.detail, "`phalanx run` refuses to guess: correct this first."
        )
    if unused:
        return CheckResult(
            "scheduler",
            CheckStatus.WARNING,
            f"Slurm gave this job {unused} hosts, and a command that is started once uses one",
            "Start it on each: srun --ntasks-per-node=1 phalanx run ...",
        )
    return CheckResult(
        "scheduler", CheckStatus.OK, scheduler.detail or "no scheduler has started this command as one of several"
    )


def check_training(facts: DoctorFacts) -> CheckResult:
    """Check whether two ranks could train for one step, the purpose of all other checks."""
    training: Probe = facts.training
    if training.works:
        return CheckResult("training", CheckStatus.OK, training.detail)
    return CheckResult(
        "training",
        CheckStatus.PROBLEM,
        training.detail,
        "Fix the problems above first; if there are none, please report the output of `phalanx doctor --json`.",
    )


# The checks of GPUs, with facts from the driver and PyTorch; used only if there are GPUs.


def check_driver(facts: DoctorFacts) -> CheckResult:
    """Check whether the driver answers; report its version."""
    driver = facts.driver
    if not driver.nvml.works:
        return CheckResult(
            "GPU driver",
            CheckStatus.WARNING,
            driver.nvml.detail,
            "The driver is not loaded, is stuck, or does not match the library: reload it (nvidia-smi must answer), or "
            "restart the machine. Ranks use the CPU until then.",
        )
    return CheckResult(
        "GPU driver", CheckStatus.OK, f"{driver.version} for CUDA {driver.cuda or 'of an unknown version'}"
    )


def check_nccl(facts: DoctorFacts) -> CheckResult:
    """Check whether PyTorch has NCCL, with which GPUs exchange tensors."""
    torch = facts.torch
    if isinstance(torch, Torch) and torch.cuda.works and not torch.nccl:
        return CheckResult(
            "NCCL",
            CheckStatus.WARNING,
            "this PyTorch has no NCCL",
            "CUDA tensors cannot be sent between GPUs: install an official build of PyTorch for CUDA.",
        )
    return CheckResult("NCCL", CheckStatus.OK, torch.nccl if isinstance(torch, Torch) and torch.nccl else "not asked")


def check_peers(facts: DoctorFacts) -> CheckResult:
    """Check whether each GPU can read the memory of every other GPU."""
    gpus, apart = facts.driver.gpus, facts.driver.apart
    if not apart:
        return CheckResult(
            "GPU peers", CheckStatus.OK, "one GPU" if len(gpus) == 1 else f"all of {len(gpus)} reach each other"
        )
    pairs = ", ".join(f"{one}-{other}" for one, other in apart[:8])
    return CheckResult(
        "GPU peers",
        CheckStatus.WARNING,
        f"no peer access between GPUs {pairs}",
        "NCCL copies through the host there: pick GPUs that reach each other (nvidia-smi topo -p2p r), or in a virtual "
        "machine turn off ACS and allow peer access.",
    )


def check_mig(facts: DoctorFacts) -> CheckResult:
    """Check whether GPUs are partitioned, or accept only one process each."""
    cut = [str(i) for i, gpu in enumerate(facts.driver.gpus) if gpu.mig]
    closed = [str(i) for i, gpu in enumerate(facts.driver.gpus) if gpu.exclusive]
    if cut:
        return CheckResult(
            "GPU sharing",
            CheckStatus.WARNING,
            f"MIG is on for GPU {', '.join(cut)}",
            "A process sees one part, and NCCL does not connect parts: give each rank its own in CUDA_VISIBLE_DEVICES "
            "(nvidia-smi -L lists them), or have MIG turned off.",
        )
    if closed:
        return CheckResult(
            "GPU sharing",
            CheckStatus.WARNING,
            f"GPU {', '.join(closed)} accepts one process at a time",
            "--ranks-per-gpu above 1 fails there: have the compute mode set to DEFAULT (nvidia-smi -c 0).",
        )
    return CheckResult("GPU sharing", CheckStatus.OK, "whole GPUs, for several processes")


def check_host_copies(facts: DoctorFacts) -> CheckResult:
    """Check whether host memory can be page-locked, which fast copies to and from a GPU need."""
    return _check_probe(
        "page-locked",
        facts.torch.pinned if isinstance(facts.torch, Torch) else None,
        "Copies to and from the GPU are slow: raise the limit on locked memory (ulimit -l unlimited).",
    )


def _check_probe(name: str, probe: Probe | None, advice: str) -> CheckResult:
    """Return the finding for a probe; `advice` is what to do about a failure."""
    if probe is None:
        return CheckResult(name, CheckStatus.OK, "not tried: PyTorch uses no GPU here")
    if probe.works:
        return CheckResult(name, CheckStatus.OK, probe.detail)
    return CheckResult(name, CheckStatus.WARNING, probe.detail, advice)


def check_gpu_clocks(facts: DoctorFacts) -> CheckResult:
    """Check whether the GPUs run at full speed."""
    gpus = facts.driver.gpus
    slowed = [f"GPU {i} is slowed down by {' and '.join(gpu.slowed_by)}" for i, gpu in enumerate(gpus) if gpu.slowed_by]
    if slowed:
        return CheckResult(
            "GPU clocks",
            CheckStatus.WARNING,
            "; ".join(slowed),
            "All ranks wait for the slowest GPU: see nvidia-smi -q -d PERFORMANCE, the cooling, and the power limit.",
        )
    clocks = {f"{gpu.clock_mhz} MHz now, up to {gpu.max_clock_mhz}" for gpu in gpus if gpu.clock_mhz is not None}
    return CheckResult("GPU clocks", CheckStatus.OK, "; ".join(sorted(clocks)) or "this driver reports no clocks")


GPU_CHECKS: tuple[Callable[[DoctorFacts], CheckResult], ...] = (
    check_driver,
    check_nccl,
    check_peers,
    check_mig,
    check_host_copies,
    check_gpu_clocks,
)


def run_gpu_checks(facts: DoctorFacts) -> list[CheckResult]:
    """Return all findings on GPUs; only that on the driver if it does not answer; none without a driver."""
    driver = facts.driver
    if driver.gpus:
        return [check(facts) for check in GPU_CHECKS]
    return [check_driver(facts)] if not driver.nvml.works and driver != Driver() else []


CHECKS: tuple[Callable[[DoctorFacts], CheckResult], ...] = (
    check_folder,
    check_cores,
    check_memory,
    check_shm,
    check_core,
    check_kernel,
    check_containers,
    check_torch,
    check_gpus,
    check_name,
    check_network,
    check_limits,
    check_clock,
    check_variables,
    check_scheduler,
    check_training,
)


def run_checks(facts: DoctorFacts) -> list[CheckResult]:
    """Return the findings of all checks, in the order of CHECKS, with those on GPUs before the last one (training)."""
    findings = [check(facts) for check in CHECKS]
    return [*findings[:-1], *run_gpu_checks(facts), findings[-1]]


def would_train(findings: list[CheckResult]) -> bool:
    """Return whether training would work: no finding is a problem."""
    return all(finding.status is not CheckStatus.PROBLEM for finding in findings)
