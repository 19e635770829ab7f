"""`HostRecords` keeps what other hosts tell the leader of their ranks' operations, ends and files of the report."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from phalanx._comm.diagnostics.observer import GroupLog
from phalanx._job.hosts.control_channel import ControlMessage
from phalanx._job.hosts.flights import logs_from_json, merge_logs

if TYPE_CHECKING:
    from phalanx._job.agent.attempt import Attempt

KINDS = ("flight", "rank file", "report host")  # the kinds of messages that it takes


class HostRecords:
    """The records of one attempt. Their times are those of this host's clock."""

    def __init__(self) -> None:
        self._logs: list[GroupLog] = []
        self.ended_ns: dict[int, int] = {}  # when processes ended, by process number

    def hear(self, message: ControlMessage, offset_s: float, attempt: Attempt) -> None:
        """Keep what a host tells whose clock was at zero at `offset_s` of this host's.

        Raises:
            KeyError, TypeError, ValueError: it makes no sense.
        """
        body: Mapping[str, Any] = message.body
        if message.kind == "flight":
            logs, ended_ns = logs_from_json(body["groups"], body["ended_ns"], int(offset_s * 1e9))
            self._logs += logs
            self.ended_ns.update(ended_ns)
        elif message.kind == "report host":
            attempt.report_hosts[str(body["host"])] = (offset_s, float(body["copy_bytes_per_s"]))
        elif attempt.report_folder:
            from phalanx._job.report.transfer import unpack_file  # here, because most jobs leave no report

            with contextlib.suppress(OSError):  # its own end says so, too
                unpack_file(attempt.report_folder, str(body["name"]), str(body["text"]))

    def merge_logs(self, logs: list[GroupLog]) -> list[GroupLog]:
        """Return `logs` with what the ranks of other hosts have recorded, group by group."""
        return merge_logs([*logs, *self._logs])
