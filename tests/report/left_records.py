"""Records that a run has left."""

import json
import socket
import time

from phalanx._comm.diagnostics.step_file import StepFile

HOST = socket.gethostname()


def leave_record(folder, name, *, run="", pid=0, ago_s=0.0, host=HOST):
    """What a rank leaves that has done one step."""
    (folder / "ranks").mkdir(exist_ok=True)
    now = time.monotonic() - ago_s
    file = StepFile(folder / "ranks" / name, now, time.time() - time.monotonic())
    file.set_facts({"rank": 0, "host": host, "pid": pid, "run": run})
    file.set_state(json.dumps({"tally": {"rank": 0, "num_steps": 1}}))
    file.close()
    return now
