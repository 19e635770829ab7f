"""Execute the call in FOLDER as a rank: `python -m phalanx._job.launch.calls FOLDER`."""

from __future__ import annotations

if __name__ == "__main__":
    import sys

    from phalanx._job.launch.calls.rank import run

    run(sys.argv[1])
