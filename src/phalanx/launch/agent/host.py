"""What outlives an attempt at a job on this host."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.inspect.agent_socket import AgentSocket
from phalanx.launch.agent.adopted import Adopted
from phalanx.launch.agent.zygote_process import ZygoteProcess
from phalanx.launch.error_files import ErrorFiles
from phalanx.output.display import Display
from phalanx.output.logs import Logs
from phalanx.output.pump import Pump


@dataclass
class Host:
    """What outlives an attempt: the zygote, the way out for lines, where signals arrive, where requests come."""

    zygote: ZygoteProcess
    pump: Pump
    display: Display
    logs: Logs
    signals: int
    agent_socket: AgentSocket
    adopted: Adopted = field(default_factory=Adopted)
    errors: ErrorFiles = field(default_factory=ErrorFiles)
