"""A job's agent sends `phalanx stacks` and `phalanx top` a description of the job, and descriptors of ranks' memory.

    command ──{"kind": "snapshot"}──▶ agent
    command ◀──description (a file), the ranks' stacks, the groups' control memory, the ranks' pages── agent

The description is a file because it may exceed a socket's buffer; descriptors are sent in several messages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple

from phalanx._base.deadline import Deadline
from phalanx._base.ipc.agent import connect
from phalanx._base.ipc.channel import Channel
from phalanx._comm.diagnostics.observer import GroupInfo
from phalanx._comm.symmetric_memory.memfd import create
from phalanx.errors import LaunchError

_FDS_AT_ONCE = 64
_MAX_DESCRIPTION_BYTES = 1 << 24


@dataclass(frozen=True)
class JobSnapshot:
    """A `JobSnapshot` describes a running job: its agent, target, living ranks (each rank and its pid) and groups."""

    agent: int
    target: str
    world_size: int
    zygote: int
    ranks: tuple[tuple[int, int], ...]
    groups: tuple[GroupInfo, ...]
    node: int = 0
    num_nodes: int = 1
    pages: tuple[int, ...] = ()  # the pids of the processes that have a progress page
    with_stacks: bool = True
    ended: tuple[tuple[int, int], ...] = ()  # ranks and their exit codes
    restart_count: int = 0
    max_restarts: int = 0
    generation: int = 0
    started_ns: int = 0  # when this attempt started; CLOCK_MONOTONIC
    lost: tuple[tuple[int, int, int, str], ...] = ()  # by loss of an elastic job: rank, pid, when (ns), why
    report: str = ""  # the folder of the report that the ranks record; empty if there is none

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> JobSnapshot:
        """Decode the result of `to_bytes`.

        Raises:
            KeyError, TypeError, ValueError: the data was written by another version of Phalanx.
        """
        fields = json.loads(data)
        ranks = tuple((int(rank), int(pid)) for rank, pid in fields.pop("ranks"))
        groups = tuple(
            GroupInfo(
                group_info["name"], group_info["world_size"], tuple(group_info["ranks"]), tuple(group_info["pids"])
            )
            for group_info in fields.pop("groups")
        )
        ended = tuple((int(rank), int(code)) for rank, code in fields.pop("ended"))
        lost = tuple((int(rank), int(pid), int(at), str(why)) for rank, pid, at, why in fields.pop("lost"))
        return cls(ranks=ranks, groups=groups, pages=tuple(fields.pop("pages")), ended=ended, lost=lost, **fields)


class SnapshotAnswer(NamedTuple):
    """A `SnapshotAnswer` is a snapshot and its descriptors.

    The stacks' descriptors are in the order of `ranks` (none if not requested), the control memories' in the order of
    `groups`, and the pages' in the order of `pages`.
    """

    snapshot: JobSnapshot
    stacks: list[int]
    controls: list[int]
    pages: list[int]


def answer(
    channel: Channel,
    snapshot: JobSnapshot,
    stacks: Sequence[int],
    controls: Sequence[int],
    pages: Sequence[int] = (),
) -> None:
    """Send the agent's answer without blocking; a client that has left, or does not read, gets nothing."""
    with suppress(OSError), _file(snapshot.to_bytes()) as description:
        fds = [description, *stacks, *controls, *pages]
        for start in range(0, len(fds), _FDS_AT_ONCE):
            channel.put({}, fds[start : start + _FDS_AT_ONCE])


@contextmanager
def _file(data: bytes) -> Iterator[int]:
    """Yield an in-memory file with `data`, which may be longer than a socket accepts at once."""
    fd = create("phalanx-snapshot")
    try:
        os.write(fd, data)
        yield fd
    finally:
        os.close(fd)


class HostAnswer(NamedTuple):
    """A `HostAnswer` is another host's answer; its clock is `offset_s` behind the first host's."""

    name: str
    text: str
    offset_s: float


def answer_others(channel: Channel, answers: Sequence[HostAnswer]) -> None:
    """Send the agent's answer to `ask_others`, without blocking."""
    with suppress(OSError), _file(json.dumps(answers).encode()) as description:
        channel.put({}, [description])


def ask_others(name: str, timeout_s: float, *, what: str = "stacks") -> list[HostAnswer]:
    """Return the answers of the job's other hosts for `phalanx stacks`, or for the command `what`."""
    deadline = Deadline.after(timeout_s)
    try:
        with closing(connect(name, timeout_s)) as channel:
            if channel.peer.uid != os.getuid():
                return []
            channel.put({"kind": "stacks of other hosts", "what": what})
            answered = channel.receive(deadline)
    except OSError:
        return []
    if answered is None or not answered.fds:
        return []
    with open(answered.fds[0], "rb") as file:
        data = os.pread(file.fileno(), _MAX_DESCRIPTION_BYTES, 0)
    return [HostAnswer(str(host), str(text), float(offset_s)) for host, text, offset_s in json.loads(data)]


@contextmanager
def ask(
    name: str, agent: int, timeout_s: float, *, command: str = "phalanx stacks", stacks: bool = True
) -> Iterator[SnapshotAnswer]:
    """Yield the answer of the agent with pid `agent` at the socket `name` to `command`; close its descriptors on exit.

    Raises:
        LaunchError: the agent has ended, is another user's, or does not answer.
    """
    fds: list[int] = []
    try:
        deadline = Deadline.after(timeout_s)
        with ExitStack() as stack:
            try:
                channel = stack.enter_context(closing(connect(name, timeout_s, max_fds=_FDS_AT_ONCE)))
                peer = channel.peer
                if peer.uid != os.getuid() or peer.pid != agent:
                    raise LaunchError(
                        f"{command}: job {agent}: another process answers at its address, and was not asked. "
                        "If the job runs in a container with its own PID namespace, run this command there."
                    )
                channel.put({"kind": "snapshot", "stacks": stacks})
                snapshot = _receive(channel, fds, deadline)
            except TimeoutError:
                raise LaunchError(
                    f"{command}: job {agent}: `phalanx run` does not answer within {timeout_s:g} s. "
                    "If it was stopped (Ctrl-Z), its ranks are stopped, too: `fg` or `kill -CONT` continues it."
                ) from None
            except OSError as error:
                raise LaunchError(
                    f"{command}: job {agent}: cannot be reached: {error.strerror or error}. It may have ended."
                ) from None
            except (KeyError, TypeError, ValueError):
                raise LaunchError(
                    f"{command}: job {agent} runs with another version of Phalanx: use that version"
                ) from None
        first = 1 + (len(snapshot.ranks) if snapshot.with_stacks else 0)
        last = first + len(snapshot.groups)
        yield SnapshotAnswer(snapshot, fds[1:first], fds[first:last], fds[last:])
    finally:
        for fd in fds:
            os.close(fd)


def _receive(channel: Channel, fds: list[int], deadline: Deadline) -> JobSnapshot:
    """Receive the answer; append descriptors to `fds` as they arrive, so that the caller can always close them."""
    snapshot, expected = None, 1
    while len(fds) < expected:
        part = channel.receive(deadline)
        if part is None or not part.fds:
            raise OSError("it closed the connection")
        fds += part.fds
        if snapshot is None:
            snapshot = JobSnapshot.from_bytes(os.pread(fds[0], _MAX_DESCRIPTION_BYTES, 0))
            num_stacks = len(snapshot.ranks) if snapshot.with_stacks else 0
            expected = 1 + num_stacks + len(snapshot.groups) + len(snapshot.pages)
    assert snapshot is not None
    return snapshot
