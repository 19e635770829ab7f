"""Run as a rank, `python -m phalanx._job.launch.calls FOLDER`, the call that the caller has written to FOLDER."""

from __future__ import annotations

if __name__ == "__main__":
    import sys

    from phalanx._job.launch.calls.rank import run

    run(sys.argv[1])
