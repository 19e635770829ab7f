"""`python -m phalanx._job.launch.calls FOLDER`, as a rank, calls a function of another process."""

from __future__ import annotations

if __name__ == "__main__":
    import sys

    from phalanx._job.launch.calls.rank import run

    run(sys.argv[1])
