"""Check the facts on GPUs from the driver and PyTorch: pure functions, called only if there are GPUs."""

from __future__ import annotations

from collections.abc import Callable

from phalanx._tools.doctor.facts import DoctorFacts, Driver, Probe, Torch
from phalanx._tools.doctor.finding import CheckResult, CheckStatus


def check_driver(facts: DoctorFacts) -> CheckResult:
    """Return the driver's version, and whether it answers."""
    driver = facts.driver
    if not driver.nvml.works:
        return CheckResult(
            "GPU driver",
            CheckStatus.WARNING,
            driver.nvml.detail,
            "The driver is not loaded, stuck, or does not fit the library: reload it (nvidia-smi must answer), or "
            "restart the machine. Ranks use the CPU until then.",
        )
    return CheckResult(
        "GPU driver", CheckStatus.OK, f"{driver.version} for CUDA {driver.cuda or 'of an unknown version'}"
    )


def check_nccl(facts: DoctorFacts) -> CheckResult:
    """Return whether GPUs exchange tensors without a copy through host memory."""
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
    """Return whether each GPU reads the others' memory."""
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
    """Return whether GPUs are partitioned, or accept one process only."""
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
    """Return whether the host's memory can be page-locked, which ranks need to exchange data through a shared GPU."""
    return _check_probe(
        "page-locked",
        facts.torch.pinned if isinstance(facts.torch, Torch) else None,
        "Copies to and from the GPU are slow: raise the limit on locked memory (ulimit -l unlimited).",
    )


def _check_probe(name: str, probe: Probe | None, advice: str) -> CheckResult:
    """Return the finding on a probe; `advice` is for a failure."""
    if probe is None:
        return CheckResult(name, CheckStatus.OK, "not tried: PyTorch uses no GPU here")
    if probe.works:
        return CheckResult(name, CheckStatus.OK, probe.detail)
    return CheckResult(name, CheckStatus.WARNING, probe.detail, advice)


def check_gpu_clocks(facts: DoctorFacts) -> CheckResult:
    """Return whether the GPUs run as fast as they can."""
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
    """Return every finding on GPUs; only the driver's if it does not answer; none without a driver."""
    driver = facts.driver
    if driver.gpus:
        return [check(facts) for check in GPU_CHECKS]
    return [check_driver(facts)] if not driver.nvml.works and driver != Driver() else []
