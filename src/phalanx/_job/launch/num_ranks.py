"""Decide how many ranks a host gets, of so many cores and GPUs."""

from __future__ import annotations

from phalanx._job.agent.settings import USAGE_EXIT_CODE
from phalanx.errors import LaunchError

RANKS_PER_CORE = 64  # more is a slip of the finger: each rank is a process that wants memory and time


def decide_num_ranks(nproc: str, cpus: int, gpus: int, ranks_per_gpu: int | None = None) -> int:
    """Return how many ranks `nproc` means on a host with so many usable cores and GPUs.

    Raises:
        LaunchError: gpu without a GPU, more ranks than the GPUs are to have, or than any use could explain.
    """
    if ranks_per_gpu is not None:
        return _decide_ranks_on_gpus(nproc, gpus, ranks_per_gpu)
    if nproc == "gpu" and gpus == 0:
        raise LaunchError(
            "phalanx run: --nproc-per-node gpu: this host has no GPU that CUDA could use "
            "(the driver shows none, or CUDA_VISIBLE_DEVICES hides them). "
            f"Use --nproc-per-node cpu for {cpus} ranks, one per core; `nvidia-smi` shows what the driver sees.",
            exit_code=USAGE_EXIT_CODE,
        )
    if nproc in ("auto", "cpu", "gpu"):
        return gpus if nproc == "gpu" or (nproc == "auto" and gpus) else cpus
    count, limit = int(nproc), RANKS_PER_CORE * max(cpus, 1)
    if count > limit:
        raise LaunchError(
            f"phalanx run: --nproc-per-node {count}: more than {RANKS_PER_CORE} ranks for each of the {cpus} cores "
            f"that this command may use, {limit} in all. Give at most that; --nproc-per-node cpu starts {cpus}.",
            exit_code=USAGE_EXIT_CODE,
        )
    return count


def _decide_ranks_on_gpus(nproc: str, gpus: int, ranks_per_gpu: int) -> int:
    asked = f"phalanx run: --ranks-per-gpu {ranks_per_gpu}"
    most = gpus * ranks_per_gpu
    if gpus == 0:
        problem = (
            f"{asked}: this host has no GPU that CUDA could use (the driver shows none, or CUDA_VISIBLE_DEVICES hides "
            "them). Leave it out for ranks on the CPU; `nvidia-smi` shows what the driver sees."
        )
    elif nproc == "cpu":
        problem = f"{asked} and --nproc-per-node cpu: ranks are counted by GPUs or by cores. Give one of the two."
    elif nproc.isdecimal() and int(nproc) > most:
        have = "1 GPU has" if gpus == 1 else f"{gpus} GPUs have"
        problem = (
            f"{asked}: {have} room for {most} ranks, and --nproc-per-node asks for {nproc}. "
            f"Give --ranks-per-gpu {-(-int(nproc) // gpus)}."
        )
    else:
        return int(nproc) if nproc.isdecimal() else most
    raise LaunchError(problem, exit_code=USAGE_EXIT_CODE)
