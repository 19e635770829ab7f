"""`Options` of a process group, as in `init_process_group("phalanx", pg_options=phalanx.Options(...))`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx._comm.schedules.algorithms import find
from phalanx._comm.schedules.network import Link

ENGINES = ("gloo", "mpi")
_WIRE_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Options:
    """`Options` of a group that spans hosts. All but `interface` must be the same on every rank.

    Arguments:
        algorithm: the algorithm between hosts, by its name in `phalanx explain`; None chooses the cheapest.
        wire_dtype: the type to which float32 (and half) sums are rounded when they are sent between hosts; they are
            added in float32. None sends them unrounded.
        error_feedback: keep the rounding error, and add it to the next all_reduce of a tensor at the same address and
            with the same size.
        engine: the library that sends the bytes: "gloo", or "mpi" in a job that mpiexec started.
        interface: the network interface at which other hosts reach this one; None chooses it by the routing table.
        allow_public_address: tensors between hosts are neither encrypted nor authenticated, so an address that the
            whole internet can reach is refused by default. True allows it, and so does the environment variable
            PHALANX_ALLOW_PUBLIC_ADDRESS=1. This has no effect on MPI and NCCL, which choose addresses themselves.
        link: the latency and bandwidth between hosts that the choice of `algorithm` assumes; None means 30 µs and
            1 Gbit/s. They are never measured at run time, because two runs might then choose different algorithms,
            which add in different orders, and their results would not be bitwise identical.

    Raises:
        ValueError: an option has an invalid value; the message lists all problems.
    """

    algorithm: str | None = None
    wire_dtype: torch.dtype | None = None
    error_feedback: bool = False
    engine: str = "gloo"
    interface: str | None = None
    link: Link | None = None
    allow_public_address: bool = False

    def __post_init__(self) -> None:
        problems = []
        if self.algorithm is not None:
            try:
                find(self.algorithm)
            except ValueError as error:
                problems.append(str(error))
        if type(self.link) not in (Link, type(None)):
            problems.append(f"link must be a phalanx.collectives.Link, got {type(self.link).__name__}")
        if self.wire_dtype is not None and self.wire_dtype not in _WIRE_DTYPES:
            problems.append(f"wire_dtype must be torch.bfloat16 or torch.float16, got {self.wire_dtype}")
        if self.error_feedback and self.wire_dtype is None:
            problems.append("error_feedback has no effect without wire_dtype, which rounds the tensors")
        if self.engine == "nccl":
            problems.append(f"engine applies to CPU tensors: {', '.join(ENGINES)}; CUDA tensors always use NCCL")
        elif self.engine not in ENGINES:
            problems.append(f"engine {self.engine!r} is unknown; valid: {', '.join(ENGINES)}")
        if problems:
            raise ValueError("phalanx.Options: " + "; ".join(problems))

    def agreed(self) -> str:
        """Return the options that must be the same on every rank, as text to compare."""
        names = ("algorithm", "wire_dtype", "error_feedback", "engine", "link", "allow_public_address")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)
