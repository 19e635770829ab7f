"""Import once, before ranks are forked, the modules that every rank of these tests needs."""

import torch._dynamo  # noqa: F401 - every optimizer imports it at its first step

import phalanx._comm.backend.shared_reducer
import phalanx._comm.diagnostics.operation_sampler
import phalanx._comm.diagnostics.step_file
import phalanx._comm.symmetric_memory.pool  # noqa: F401
