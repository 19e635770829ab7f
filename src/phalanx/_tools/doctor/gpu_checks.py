"""Judge what the driver and PyTorch say of the GPUs: pure functions, asked only where there are some."""

from __future__ import annotations

from collections.abc import Callable

from phalanx._tools.doctor.facts import Driver, Facts, Probe, Torch
from phalanx._tools.doctor.finding import Finding, Status


def check_driver(facts: Facts) -> Finding:
    """Find which driver it is, and whether it answers."""
    driver = facts.driver
    if not driver.nvml.works:
        return Finding(
            "GPU driver",
            Status.WARNING,
            driver.nvml.detail,
            "The driver is not loaded, stuck, or does not fit the library: reload it (nvidia-smi must answer), or "
            "restart the machine. Ranks use the CPU until then.",
        )
    return Finding("GPU driver", Status.OK, f"{driver.version} for CUDA {driver.cuda or 'of an unknown version'}")


def check_nccl(facts: Facts) -> Finding:
    """Return whether GPUs exchange tensors without the host's memory in between."""
    torch = facts.torch
    if isinstance(torch, Torch) and torch.cuda.works and not torch.nccl:
        return Finding(
            "NCCL",
            Status.WARNING,
            "this PyTorch has none",
            "CUDA tensors are not carried between GPUs: install an official build of PyTorch for CUDA.",
        )
    return Finding("NCCL", Status.OK, torch.nccl if isinstance(torch, Torch) and torch.nccl else "not asked")


def check_peers(facts: Facts) -> Finding:
    """Return whether each GPU reads the others' memory."""
    gpus, apart = facts.driver.gpus, facts.driver.apart
    if not apart:
        return Finding("GPU peers", Status.OK, "one GPU" if len(gpus) == 1 else f"all of {len(gpus)} reach each other")
    pairs = ", ".join(f"{one}-{other}" for one, other in apart[:8])
    return Finding(
        "GPU peers",
        Status.WARNING,
        f"no direct way between GPUs {pairs}",
        "NCCL copies through the host there: pick GPUs that reach each other (nvidia-smi topo -p2p r), or in a virtual "
        "machine turn off ACS and allow peer access.",
    )


def check_mig(facts: Facts) -> Finding:
    """Return whether GPUs are cut in parts, or closed to a second process."""
    cut = [str(i) for i, gpu in enumerate(facts.driver.gpus) if gpu.mig]
    closed = [str(i) for i, gpu in enumerate(facts.driver.gpus) if gpu.exclusive]
    if cut:
        return Finding(
            "GPU sharing",
            Status.WARNING,
            f"MIG is on for GPU {', '.join(cut)}",
            "A process sees one part, and NCCL does not connect parts: give each rank its own in CUDA_VISIBLE_DEVICES "
            "(nvidia-smi -L lists them), or have MIG turned off.",
        )
    if closed:
        return Finding(
            "GPU sharing",
            Status.WARNING,
            f"GPU {', '.join(closed)} takes one process at a time",
            "--ranks-per-gpu above 1 fails there: have the compute mode set to DEFAULT (nvidia-smi -c 0).",
        )
    return Finding("GPU sharing", Status.OK, "whole GPUs, for several processes")


def check_host_copies(facts: Facts) -> Finding:
    """Return whether the host's memory can be page-locked, through which ranks that share a GPU exchange."""
    return _judge(
        "page-locked",
        facts.torch.pinned if isinstance(facts.torch, Torch) else None,
        "Copies to and from the GPU are slow: raise the limit on locked memory (ulimit -l unlimited).",
    )


def _judge(name: str, probe: Probe | None, advice: str) -> Finding:
    """Return the finding on what was tried; `advice` is for a failure."""
    if probe is None:
        return Finding(name, Status.OK, "not tried: PyTorch uses no GPU here")
    if probe.works:
        return Finding(name, Status.OK, probe.detail)
    return Finding(name, Status.WARNING, probe.detail, advice)


def check_gpu_clocks(facts: Facts) -> Finding:
    """Return whether the GPUs run as fast as they can."""
    gpus = facts.driver.gpus
    slowed = [f"GPU {i} is slowed down by {' and '.join(gpu.slowed_by)}" for i, gpu in enumerate(gpus) if gpu.slowed_by]
    if slowed:
        return Finding(
            "GPU clocks",
            Status.WARNING,
            "; ".join(slowed),
            "All ranks wait for the slowest GPU: see nvidia-smi -q -d PERFORMANCE, the cooling, and the power limit.",
        )
    told = {f"{gpu.clock_mhz} MHz now, up to {gpu.max_clock_mhz}" for gpu in gpus if gpu.clock_mhz is not None}
    return Finding("GPU clocks", Status.OK, "; ".join(sorted(told)) or "not told by this driver")


GPU_CHECKS: tuple[Callable[[Facts], Finding], ...] = (
    check_driver,
    check_nccl,
    check_peers,
    check_mig,
    check_host_copies,
    check_gpu_clocks,
)


def judge_gpus(facts: Facts) -> list[Finding]:
    """Return every finding on GPUs; only that of the driver, if that does not answer; none without a driver."""
    driver = facts.driver
    if driver.gpus:
        return [check(facts) for check in GPU_CHECKS]
    return [check_driver(facts)] if not driver.nvml.works and driver != Driver() else []
