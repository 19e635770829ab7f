"""Carry out collectives of device tensors in memory of the device that all ranks of the host map.

areas        each rank's memory for what the others read, mapped by all
reductions   what the core's kernels compute, on a device
collectives  copy in, meet, read from the others
call         one operation: its tensors, and the device's stream on which it is queued
"""

from __future__ import annotations

from phalanx.transport.device_memory.areas import AREA_BYTES, Areas
from phalanx.transport.device_memory.call import DeviceCall
from phalanx.transport.device_memory.collectives import DeviceCollectives
from phalanx.transport.device_memory.reductions import can_combine_on_device

__all__ = ["AREA_BYTES", "Areas", "DeviceCall", "DeviceCollectives", "can_combine_on_device"]
