"""What every rank would import by itself is imported once here."""

import warnings

import torch._dynamo  # every optimizer imports it at its first step
import torch.distributed.pipelining  # the schedule zero_bubble imports it

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of its torch.jit.script
    import torch.distributed.optim  # noqa: F401 - the sharded optimizer imports it
