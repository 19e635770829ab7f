"""Make the dumps of PyTorch's flight recorder from ours, for our groups, at no cost to any operation.

torch 2.15 hangs a recorder on each group, which listens at the dispatcher, where a call of ours does not go: to send it
there costs 10 µs a call. Our own recorder has written the call down anyway. So the dumps are made from that when
somebody asks for them, and say more than the hook could: whether an operation is over, and how long it took.

    torch._C._distributed_c10d._dump_fr_trace(backend="phalanx")        and _json, _file, _reset_fr_trace

A call that names no backend, as none could before 2.15, is answered for the backend of the default group.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import time
from collections.abc import Callable
from typing import Any

from phalanx._base.torch_names import report_loss
from phalanx._comm.backend.torch_integration.groups import phalanx_group
from phalanx._comm.backend.torch_integration.patch import distributed_c10d, patch

BACKEND = "phalanx"
_FILE_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_SIZE_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_OLDEST_FORMAT = "2.10"
_since_ns = [0]  # entries that began before are not dumped any more

_Original = Callable[..., Any]
_originals: dict[str, _Original] = {}


@patch(
    "torch._C._distributed_c10d._dump_fr_trace",
    "torch._C._distributed_c10d._dump_fr_trace_json",
    loses="PyTorch's flight recorder does not show our groups; `phalanx stacks` does",
)
def serve_dumps() -> None:
    """Let torch's functions that dump its flight recorder answer for our groups too, each that this torch has."""
    c10d = _bindings()
    is_new = _names_backends(c10d._dump_fr_trace)
    for name, ours in (
        ("_dump_fr_trace", _dump),
        ("_dump_fr_trace_json", _dump_json),
        ("_dump_fr_trace_file", _dump_file),
        ("_reset_fr_trace", _reset),
    ):
        original = getattr(c10d, name, None)
        if original is not None:
            _originals[name] = original
            setattr(c10d, name, _answering(original, ours))
        elif is_new:  # older ones have two of the four
            report_loss(f"has no torch._C._distributed_c10d.{name}", "what it did is not done for our groups")


def _bindings() -> Any:
    import torch

    return torch._C._distributed_c10d


def _answering(original: _Original, ours: _Original) -> _Original:
    @functools.wraps(original)
    def call(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        if backend is None and args and isinstance(args[-1], str):
            *args, backend = args  # type: ignore[assignment]  # its place is the last
        if backend == BACKEND or (backend is None and _is_default_group_ours()):
            return ours(*args, **kwargs)
        if backend is not None and _names_backends(original):
            kwargs["backend"] = backend
        return original(*args, **kwargs)

    return call


def _names_backends(dump: Any) -> bool:
    """Return whether this function of torch's takes a backend's name (2.15); older analysers refuse new names."""
    return "backend" in (getattr(dump, "__doc__", "") or "")


def _is_default_group_ours() -> bool:
    return phalanx_group(distributed_c10d().GroupMember.WORLD) is not None


def take_dump(
    collectives: bool | None = None, stacks: bool | None = None, active: bool | None = None
) -> dict[str, Any]:
    """Return the dump of this process's groups, with the arguments of `_dump_fr_trace`; None means its defaults."""
    from phalanx import __version__
    from phalanx._comm.backend.process_group.open_groups import open_groups
    from phalanx._comm.backend.process_group.recorded import left_groups, read_group
    from phalanx._comm.backend.torch_integration.recorder_dump import dump_groups

    groups = sorted([*left_groups(), *map(read_group, open_groups())], key=lambda group: group.number)
    return dump_groups(
        groups if is_recording() else [],
        version=_format_version(),
        library=BACKEND if _names_backends(_originals.get("_dump_fr_trace")) else "gloo",
        library_version=__version__,
        unix_offset_ns=time.time_ns() - time.monotonic_ns(),
        since_ns=_since_ns[0],
        collectives=collectives is not False,
        stacks=stacks is not False,
        only_active=bool(active),
    )


def is_recording() -> bool:
    """Return whether torch's recorder is on, by the variables that say so: then its dumps hold something."""
    sizes = (os.environ.get(name) for name in _SIZE_VARIABLES)
    return int(next((size for size in sizes if size), "2000")) > 0


def _format_version() -> str:
    """Return the version of the format that this torch's analyser reads: that of torch's own dumps."""
    dumped = json.loads(_originals["_dump_fr_trace_json"](False, False)) if _originals else {}
    return str(dumped.get("version", _OLDEST_FORMAT))


def _dump(
    includeCollectives: bool | None = None, includeStackTraces: bool | None = None, onlyActive: bool | None = None
) -> bytes:
    return pickle.dumps(take_dump(includeCollectives, includeStackTraces, onlyActive), protocol=2)


def _dump_json(includeCollectives: bool | None = None, onlyActive: bool | None = None) -> bytes:
    dump = take_dump(includeCollectives, False, onlyActive)
    for entry in dump.get("entries", ()):  # it is as in torch's, which has no null there
        entry["time_discovered_completed_ns"] = entry["time_discovered_completed_ns"] or 0
    if not dump.get("entries", True):
        del dump["entries"]
    return json.dumps(dump).encode()


def _dump_file(
    rank: int,
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = None,
    onlyActive: bool | None = None,
) -> None:
    path = f"{_file_prefix()}{rank}"
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    part = f"{path}.part"
    with open(part, "wb") as file:
        file.write(_dump(includeCollectives, includeStackTraces, onlyActive))
    os.replace(part, path)


def _file_prefix() -> str:
    told = next((os.environ[name] for name in _FILE_VARIABLES if os.environ.get(name)), "")
    return told or os.path.join(os.path.expanduser("~"), ".cache", "torch", "comm_lib_trace_rank_")


def _reset() -> None:
    _since_ns[0] = time.monotonic_ns()
