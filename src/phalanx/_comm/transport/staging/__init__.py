"""Stage a device's tensors in the host's memory: copy them there and back, in the order of the device's streams."""

from __future__ import annotations

from phalanx._comm.transport.staging.host_memory import HostMemory
from phalanx._comm.transport.staging.staged_call import StagedCall
from phalanx._comm.transport.staging.streams import CopyStream, open_copy_stream

__all__ = ["CopyStream", "HostMemory", "StagedCall", "open_copy_stream"]
