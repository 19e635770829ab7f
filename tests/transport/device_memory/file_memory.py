"""Memory of the CPU in the place of a device's: files without a name, which several processes map."""

import mmap
import os

import torch


class FileMapping:
    """A mapped file, as bytes of the CPU."""

    def __init__(self, fd, nbytes):
        self.tensor = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)

    def close(self):
        self.tensor = None  # the mapping goes with the last tensor of it


class FileMemory:
    """A `DeviceMemory`; `refuses` names what it cannot do on this rank: "create", "open" or nothing."""

    def __init__(self, refuses=""):
        self.refuses = refuses

    def create(self, device, nbytes):
        if self.refuses == "create":
            raise OSError("this device shares no memory")
        fd = os.memfd_create("device")
        os.ftruncate(fd, nbytes)
        return fd, FileMapping(fd, nbytes)

    def open(self, fd, device, nbytes):
        if self.refuses == "open":
            raise OSError("this device does not reach that one")
        return FileMapping(fd, nbytes)
