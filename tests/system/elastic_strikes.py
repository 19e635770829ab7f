"""A training under `phalanx.elastic` that is struck from inside: ranks are killed, and so is their zygote.

python elastic_strikes.py FOLDER [disturbed]
"""

import hashlib
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch.distributed as dist
from tests.elastic.jobs import Job, Strike, train_job

STRIKES = (
    Strike(1, "backward", 5),
    Strike(2, "forward", 12),
    Strike(1, "restore", -1),
)


class StruckJob(Job):
    """Its zygote is killed as well, before the second rank is."""

    def strike(self, place: str, step: int) -> None:
        if self.strikes and place == "batch" and step == 10 and dist.get_rank() == 2:
            os.kill(os.getppid(), signal.SIGKILL)
        super().strike(place, step)


def main() -> None:
    strikes = STRIKES if "disturbed" in sys.argv else ()
    job = StruckJob(sys.argv[1], strikes, samples=96)
    ended = train_job(job)
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in ended["weights"].values())).hexdigest()
    print("rank", os.environ["RANK"], "ends at step", ended["step"], "with", digest)
    if os.environ["RANK"] == "0":
        print("every sample once:", [sorted(used) == list(range(job.samples)) for used in job.samples_of_epochs()])


if __name__ == "__main__":
    main()
