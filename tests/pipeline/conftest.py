"""What every rank would import by itself is imported once here."""

import warnings

import torch._dynamo

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of its torch.jit.script
    import torch.distributed.optim  # noqa: F401
