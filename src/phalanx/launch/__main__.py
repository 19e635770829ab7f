"""`python -m phalanx.launch` has the command line of `python -m torch.distributed.launch`.

The script receives its local rank as its first argument, `--local-rank=0`, or `--local_rank=0` if it parses only that
spelling. With --use-env it receives the local rank only in LOCAL_RANK.
"""

from __future__ import annotations

import signal
import sys

if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # as `phalanx` does: Ctrl-C ends it until something is started
    from phalanx._job.launch.command import main

    sys.exit(main(sys.argv[1:], old_launcher=True))
