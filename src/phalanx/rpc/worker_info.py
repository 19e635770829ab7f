"""A `WorkerInfo` names a worker for the user; a `WorkerAddress` is how other workers reach it."""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import dataclass
from typing import Any

from phalanx._comm.symmetric_memory.watch import ProcessId

_NAME = re.compile(r"[A-Za-z0-9_:.-]{1,127}")


class WorkerNameError(ValueError, RuntimeError):
    """This name is not valid for a worker. (PyTorch raises a RuntimeError.)"""


class UnknownWorkerError(ValueError, RuntimeError):
    """There is no such worker. (PyTorch raises a RuntimeError.)"""


@dataclass(frozen=True)
class WorkerInfo:
    """A `WorkerInfo` is a worker's name and its rank (`id`)."""

    name: str
    id: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise WorkerNameError(
                "Worker name must match [A-Za-z0-9_:.-]*, must be non-empty and shorter than 128 characters, got "
                f"{self.name[:200]!r}"
            )

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


@dataclass(frozen=True)
class WorkerAddress:
    """A `WorkerAddress` is how other workers reach a worker. `uid` distinguishes workers that had the same name.

    Workers with the same `host` can share memory. A worker listens at `local` for the workers on its host, and at
    `network` for all others.
    """

    info: WorkerInfo
    uid: int
    host: str
    hostname: str
    process: ProcessId
    local: str = ""
    network: str = ""

    @classmethod
    def of_self(cls, name: str, number: int, host: str, **addresses: str) -> WorkerAddress:
        uid = int.from_bytes(os.urandom(6), "little")
        return cls(WorkerInfo(name, number), uid, host, socket.gethostname(), ProcessId.of_self(), **addresses)

    def to_json(self) -> str:
        process = self.process
        return json.dumps(
            {
                "name": self.info.name,
                "id": self.info.id,
                "uid": self.uid,
                "host": self.host,
                "hostname": self.hostname,
                "process": [process.pid, process.start_ticks, process.namespace, process.has_pidfds],
                "local": self.local,
                "network": self.network,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> WorkerAddress:
        fields: dict[str, Any] = json.loads(text)
        process = ProcessId(*fields.pop("process"))
        return cls(WorkerInfo(fields.pop("name"), fields.pop("id")), process=process, **fields)

    def __str__(self) -> str:
        return f"worker {self.info.name!r} (rank {self.info.id}, pid {self.process.pid} on {self.hostname})"
