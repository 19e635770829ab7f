"""Choose the backend if `init_process_group` names none, and explain a start without a launcher."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist

from phalanx._comm.rendezvous.launchers import find_agents_store

NAME = "phalanx"
_ENV = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def init_process_group(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Call torch's `original` for a call that names no backend; under `phalanx run`, pass this backend."""
    call = inspect.signature(original).bind(*args, **kwargs)
    if is_default(os.environ, call.arguments.get("device_id"), _accelerator(), _supported_devices()):
        call.arguments["backend"] = NAME
    original(*call.args, **call.kwargs)


def refuse_unknown_backend(backend: object, called: str = "init_process_group") -> None:
    """Refuse the name of an unregistered backend, for which torch raises an AssertionError.

    Arguments:
        backend: a name, or pairs such as "cpu:gloo,cuda:nccl"; other types are not checked.
        called: the function that the user called, for the message.

    Raises:
        ValueError: torch does not know the backend.
    """
    if not isinstance(backend, str):
        return
    known = dist.Backend.backend_list
    for name in (part.rpartition(":")[2].strip().lower() for part in backend.split(",")):
        if name and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            names = ", ".join(repr(one) for one in sorted(known) if one != dist.Backend.UNDEFINED)
            raise ValueError(
                f"{called}: unknown backend {name!r}.{meant} torch knows {names}; another package registers its "
                "backend when the package is imported."
            )


@contextlib.contextmanager
def launched(url: str) -> Iterator[None]:
    """Explain, in an error of torch's rendezvous at `url`, how to start this process, if no launcher started it.

    Raises:
        ValueError: as torch does.
    """
    try:
        yield
    except ValueError as error:
        if urlsplit(url).scheme != "env" or not (missing := _missing(url, os.environ)):
            raise
        raise ValueError(explain_unlaunched(missing, sys.argv, str(error))) from None


def is_default(environ: Mapping[str, str], device_id: object, accelerator: str, carried: Sequence[str]) -> bool:
    """Return whether ours is the default backend: under `phalanx run`, unless the call names a device.

    torch's default backend is for `accelerator` only. Ours must support the accelerator, too: `carried` lists the types
    of device that it supports.
    """
    return bool(find_agents_store(environ)) and device_id is None and accelerator in carried


def explain_unlaunched(missing: Sequence[str], argv: Sequence[str], torch_error: str) -> str:
    """Return the message for a process whose environment does not describe a job."""
    script = os.path.basename(argv[0]) if argv and argv[0].endswith(".py") else "train.py"
    are = "is" if len(missing) == 1 else "are"
    return (
        f"init_process_group with backend 'phalanx': no launcher started this process: {', '.join(missing)} "
        f"{are} not set.\n"
        f"torch said: {torch_error}\n"
        f"Start it with `phalanx run --nproc-per-node 2 {script}` (torchrun and mpiexec work, too). To run it "
        "without a launcher too, call phalanx.init() instead of init_process_group: it then forms a job of one rank."
    )


def _missing(url: str, environ: Mapping[str, str]) -> list[str]:
    """Return the unset variables that `env://` needs; the URL may contain the rank and the world size instead."""
    query = parse_qs(urlsplit(url).query)
    return [name for name in _ENV if name.lower() not in query and not environ.get(name)]


def _accelerator() -> str:
    """Return the type of device for which torch would choose a backend; this initialises no device."""
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def _supported_devices() -> list[str]:
    return dist.Backend.backend_capability[NAME]
