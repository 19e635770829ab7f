"""`phalanx run --hosts` starts `python -m phalanx._job.ssh` on each host, at the end of an ssh connection."""

import sys

from phalanx._job.ssh.session import main

sys.exit(main())
