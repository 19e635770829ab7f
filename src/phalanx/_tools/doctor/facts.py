"""These classes hold what a host is found to be: plain data, gathered once."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Probe:
    """A probe is something that was tried. `detail` says what came of it, or why it failed."""

    works: bool
    detail: str = ""


@dataclass(frozen=True)
class MachineFacts:
    """It is the machine as this process sees it. Sizes are in bytes; None where the platform does not say."""

    platform: str
    python: str
    cores: int
    usable_cores: int
    cpu_quota: float | None = None
    available_bytes: int | None = None
    memory_limited: bool = False
    commit_headroom_bytes: int | None = None
    shm_bytes: int | None = None
    name: str = ""
    name_resolves: Probe = field(default_factory=lambda: Probe(True))
    open_files: int | None = None
    open_files_hard: int | None = None
    processes: int | None = None
    processes_running: int | None = None
    clock_source: str | None = None
    gpus: tuple[str, ...] = ()
    gpu_tool: Probe = field(default_factory=lambda: Probe(False, "nvidia-smi is not installed"))
    variables: dict[str, str] = field(default_factory=dict)
    scheduler: Probe = field(default_factory=lambda: Probe(True))  # what started this command; "" if nothing says so
    addresses: dict[str, tuple[str, ...]] | None = field(default_factory=dict)  # by interface; None: could not ask
    unused_hosts: int = 0  # that the scheduler has given the job, of which one started command uses one
    folder: str | None = "."


@dataclass(frozen=True)
class Kernel:
    """It says what the memory between ranks is made of, each part tried for real. None where the platform has no such.

    `namespaces` are the kinds ("pid", "user") that this process has of its own: it is in a container.
    """

    core: Probe
    proc: Probe | None = None
    futex: Probe | None = None
    memfd: Probe | None = None
    pidfd: Probe | None = None
    unix_sockets: Probe | None = None
    namespaces: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """It is a GPU as the driver tells of it; None where it does not."""

    name: str
    uuid: str = ""
    mig: bool | None = None
    exclusive: bool | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    slowed_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Driver:
    """It is NVIDIA's driver, asked through NVML. `apart`: pairs of GPUs of which neither reads the other's memory."""

    nvml: Probe = field(default_factory=lambda: Probe(False, "there is no libnvidia-ml.so.1"))
    version: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Torch:
    """It is PyTorch as it imports here. `cuda` says whether it can use a GPU now, or why not."""

    version: str
    backends: tuple[str, ...]
    registered: bool
    cuda_version: str | None = None
    cuda: Probe = field(default_factory=lambda: Probe(False, "built without CUDA"))
    nccl: str = ""
    pinned: Probe | None = None  # memory of the host that is page-locked, tried; None without a GPU


@dataclass(frozen=True)
class DoctorFacts:
    """It has everything that the checks look at, and the version of Phalanx.

    `torch` is the reason in words where PyTorch could not be imported.
    """

    phalanx: str  # the version of Phalanx
    host: MachineFacts
    kernel: Kernel
    torch: Torch | str
    training: Probe
    driver: Driver = field(default_factory=Driver)
