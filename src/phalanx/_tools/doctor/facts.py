"""Define the facts of a host, which are gathered once, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Probe:
    """A `Probe` is the result of trying a feature. `detail` is the output, or the reason for the failure."""

    works: bool
    detail: str = ""


@dataclass(frozen=True)
class MachineFacts:
    """`MachineFacts` describes the machine as this process sees it.

    Sizes are in bytes; None if the platform does not report the value.
    """

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
    variables: dict[str, str] = field(default_factory=dict)
    scheduler: Probe = field(default_factory=lambda: Probe(True))  # what started this command; "" if unknown
    addresses: dict[str, tuple[str, ...]] | None = field(default_factory=dict)  # by interface; None: query failed
    unused_hosts: int = 0  # hosts of the scheduler's allocation that the job leaves unused
    folder: str | None = "."


@dataclass(frozen=True)
class Kernel:
    """`Kernel` has a probe of each feature that shared memory needs; None if the platform lacks the feature.

    `namespaces` are the kinds ("pid", "user") in which this process has its own namespace, as in a container.
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
    """A `Gpu` is a GPU as reported by the driver; None for unknown values."""

    name: str
    uuid: str = ""
    mig: bool | None = None
    exclusive: bool | None = None
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    slowed_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Driver:
    """`Driver` is NVIDIA's driver, queried through NVML. `apart` lists the pairs of GPUs without peer access."""

    nvml: Probe = field(default_factory=lambda: Probe(False, "there is no libnvidia-ml.so.1"))
    version: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()
    apart: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Torch:
    """`Torch` describes the installed PyTorch. `cuda` is whether PyTorch can use a GPU now, or why not."""

    version: str
    backends: tuple[str, ...]
    registered: bool
    cuda_version: str | None = None
    cuda: Probe = field(default_factory=lambda: Probe(False, "built without CUDA"))
    nccl: str = ""
    pinned: Probe | None = None  # a copy from page-locked host memory; None without a GPU


@dataclass(frozen=True)
class DoctorFacts:
    """`DoctorFacts` are the facts for all checks, and the version of Phalanx.

    If PyTorch could not be imported, `torch` is the reason as text.
    """

    phalanx: str
    host: MachineFacts
    kernel: Kernel
    torch: Torch | str
    training: Probe
    driver: Driver = field(default_factory=Driver)
