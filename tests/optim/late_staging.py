"""A device whose copies come as late as they may, on tensors of the CPU: what does not wait for them sees it."""

from typing import ClassVar

import torch

from phalanx.optim.staging import HostStaging


class LateStaging(HostStaging):
    """Copies to the host are made when somebody waits; copies to the device when it computes, or somebody waits."""

    made: ClassVar = []

    def __init__(self, device):
        super().__init__(device)
        self.takes_checksums = True
        self._to_host, self._to_device, self._then = [], [], []
        LateStaging.made.append(self)

    def to_host(self, host, tensor):
        host.fill_(float("nan"))
        copy = (host, tensor.detach())
        self._to_host.append(copy)

        def wait():
            if any(copy is other for other in self._to_host):
                self._to_host = [other for other in self._to_host if other is not copy]
                host.copy_(tensor)

        return wait

    def follow(self):
        """Here it has no say: whoever changes a gradient that is being copied has waited."""

    def to_device(self, tensors, host):
        self._to_device += [(tensor, source, source.clone()) for tensor, source in zip(tensors, host, strict=True)]

    def queue_after_copies(self, then):
        self._then.append(then)

    def synchronize(self):
        copies, self._to_device = self._to_device, []
        then, self._then = self._then, []
        with torch.no_grad():
            for tensor, host, read in copies:
                assert torch.equal(host, read), "the host's memory was written before it was read"
                tensor.copy_(host)
            for do in then:
                do()

    @classmethod
    def compute(cls, module, _inputs=None):
        """Before a forward: the device gets to it in order."""
        for staging in cls.made:
            staging.synchronize()
