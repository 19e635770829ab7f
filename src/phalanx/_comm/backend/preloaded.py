"""Import the modules that a rank needs to join its group and to call its first collectives.

A process that forks ranks imports this module first, so that the ranks inherit the imported modules.
"""

from __future__ import annotations

import importlib.util

import phalanx._comm.backend.create
import phalanx._comm.backend.start
import phalanx._comm.backend.torch_integration.monitored_barrier
import phalanx._comm.backend.torch_integration.object_collectives
import phalanx._comm.backend.torch_integration.pickles_in_tensors
import phalanx._comm.backend.torch_integration.rendezvous_handlers
import phalanx._comm.backend.torch_integration.stores
import phalanx._comm.diagnostics.whereabouts

if importlib.util.find_spec("phalanx._core") is not None:  # else the ranks use Gloo
    import phalanx._comm.backend.process_group.inbox
    import phalanx._comm.transport.shared_memory  # noqa: F401
