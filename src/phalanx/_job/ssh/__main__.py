"""`python -m phalanx._job.ssh` runs on a host at the end of an ssh connection; `phalanx run --hosts` starts it there."""

import sys

from phalanx._job.ssh.session import main

sys.exit(main())
