"""A `HostResources` object keeps what outlives an attempt at a job on this host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from phalanx.agent.adopted import Adopted
from phalanx.agent.error_files import ErrorFiles
from phalanx.agent.zygote_process import ZygoteProcess
from phalanx.inspect.agent_socket import AgentSocket
from phalanx.ipc.event_loop import Source
from phalanx.ipc.signals import read_signals
from phalanx.output.display import Display
from phalanx.output.logs import Logs
from phalanx.output.pump import Pump


@dataclass
class HostResources:
    """It has the zygote, the output, and the sources of signals and of requests; every attempt uses the same."""

    zygote: ZygoteProcess
    pump: Pump
    display: Display
    logs: Logs
    signals: int
    agent_socket: AgentSocket
    adopted: Adopted = field(default_factory=Adopted)
    errors: ErrorFiles = field(default_factory=ErrorFiles)

    def watch_signals(self, on_signal: Callable[[int], object]) -> Source:
        """Return the loop's source for signals."""

        def hear(ready: set[int]) -> None:
            for number in read_signals(self.signals) if self.signals in ready else ():
                on_signal(number)

        return Source(hear, lambda: (self.signals,))

    def watch_display(self) -> Source:
        """Return the loop's source that writes queued output as fast as it is read."""
        return Source(
            lambda ready: self.display.tick(),
            writable=lambda: (writer.fd for writer in self.display.writers),
            due=lambda: self.display.next_due,
        )
