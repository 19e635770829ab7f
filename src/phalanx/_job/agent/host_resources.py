"""`HostResources` are the resources of this host that all attempts of a job share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx._base.ipc.event_loop import Source
from phalanx._base.ipc.signals import read_signals
from phalanx._base.processes import ENDING_SIGNALS, name_signal
from phalanx._job.agent.adopted import AdoptedRanks
from phalanx._job.agent.error_files import ErrorFiles
from phalanx._job.agent.zygote_process import ZygoteProcess
from phalanx._job.inspect.agent_socket import AgentSocket
from phalanx._job.output.display import Display
from phalanx._job.output.logs import Logs
from phalanx._job.output.pump import Pump
from phalanx.errors import LaunchError

_REPEAT_S = 0.05


@dataclass
class HostResources:
    """`HostResources` are the zygote, the output, and the sources of signals and requests."""

    zygote: ZygoteProcess
    pump: Pump
    display: Display
    logs: Logs
    signals: int
    agent_socket: AgentSocket
    adopted: AdoptedRanks = field(default_factory=AdoptedRanks)
    errors: ErrorFiles = field(default_factory=ErrorFiles)
    arrived: dict[int, float] = field(default_factory=dict)  # by pending signal: when to process it
    received: set[int] = field(default_factory=set)  # all signals received by this process

    def watch_signals(self, on_signal: Callable[[int], object]) -> Source:
        """Return the event loop's source for signals.

        A signal that ends the job is processed after `_REPEAT_S`. If the signal is repeated within that time, as by the
        command `timeout`, both count as one request.
        """

        def receive(ready: set[int]) -> None:
            now = time.monotonic()
            for number in read_signals(self.signals) if self.signals in ready else ():
                self.received.add(number)
                self.arrived.setdefault(number, now + _REPEAT_S if number in ENDING_SIGNALS else now)
            for number in [number for number, at in self.arrived.items() if at <= now]:
                del self.arrived[number]
                on_signal(number)

        return Source(receive, lambda: (self.signals,), due=lambda: min(self.arrived.values(), default=None))

    def watch_display(self) -> Source:
        """Return the event loop's source that writes queued output as fast as its reader accepts it."""
        return Source(
            lambda ready: self.display.tick(),
            writable=lambda: (writer.fd for writer in self.display.writers),
            due=lambda: self.display.next_due,
        )


def raise_if_ending(number: int, when: str = "before the job began") -> None:
    """Raise LaunchError if the signal `number` ends a job; ignore other signals.

    Raises:
        LaunchError: the signal ends a job; `when` ends the message.
    """
    if number in ENDING_SIGNALS:
        raise LaunchError(f"phalanx run: stopped by {name_signal(number)} {when}", exit_code=128 + number)
