"""Importing this module imports what a rank needs to join its group and to call its first collectives.

A process that forks ranks imports this module, so that each of its ranks does not import the same modules again.
"""

from __future__ import annotations

import phalanx.backend.create
import phalanx.backend.process_group.inbox
import phalanx.backend.start
import phalanx.backend.torch_integration.flight_recorder
import phalanx.backend.torch_integration.monitored_barrier
import phalanx.backend.torch_integration.object_collectives
import phalanx.backend.torch_integration.pickles_in_tensors
import phalanx.backend.torch_integration.rendezvous_handlers
import phalanx.diagnostics.whereabouts
import phalanx.transport.shared_memory  # noqa: F401
