"""A loop whose events are counted, and a clock that is turned."""

from phalanx._comm.diagnostics.step_machine import (
    BEGIN_BACKWARD,
    BEGIN_DATA,
    BEGIN_UPDATE,
    END_BACKWARD,
    END_BACKWARD_WITH_LOSS,
    END_DATA,
    END_PHASE,
    END_UPDATE,
    END_WAIT,
    FORWARD,
    NO_DATA,
    NO_LOSS,
    OWN_LOSS,
    SAMPLES,
    STEP,
)


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def __call__(self):
        return self.now


EVENTS = [
    (BEGIN_DATA, 0), (END_DATA, 8), (NO_DATA, 0), (BEGIN_BACKWARD, 0), (END_BACKWARD, 0), (END_BACKWARD_WITH_LOSS, 2.5),
    (BEGIN_UPDATE, 1), (BEGIN_UPDATE, 2), (END_UPDATE, 0), (END_PHASE, FORWARD), (SAMPLES, 3), (OWN_LOSS, 1),
    (NO_LOSS, 0), (STEP, 0), (END_WAIT, 0.004),
]  # fmt: skip


LOOP = [
    (BEGIN_DATA, 0),
    (END_DATA, 8),
    (BEGIN_BACKWARD, 0),
    (END_BACKWARD_WITH_LOSS, 1),
    (BEGIN_UPDATE, 1),
    (END_UPDATE, 0),
]


FIELDS = (
    "steps", "steps_done", "phase", "phase_since", "num_workers", "first_broken", "last_finite", "reached",
)  # fmt: skip
