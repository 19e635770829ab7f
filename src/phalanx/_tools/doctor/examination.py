"""Gather all facts of this host."""

from __future__ import annotations

import phalanx
from phalanx._tools.doctor.driver import query_driver
from phalanx._tools.doctor.facts import DoctorFacts
from phalanx._tools.doctor.host import examine_host
from phalanx._tools.doctor.kernel import examine_kernel
from phalanx._tools.doctor.trial import try_training


def examine() -> DoctorFacts:
    """Return all facts that the checks need; this takes the seconds of importing PyTorch."""
    torch, training = try_training()
    return DoctorFacts(phalanx.__version__, examine_host(), examine_kernel(), torch, training, query_driver())
