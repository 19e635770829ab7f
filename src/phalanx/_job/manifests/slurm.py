"""Write a batch script for Slurm."""

from __future__ import annotations

from collections.abc import Sequence

from phalanx._job.manifests.request import JobRequest, quote


def write_batch_script(
    request: JobRequest, program: Sequence[str], *, time: str = "", partition: str = "", output: str = "%x-%j.log"
) -> str:
    """Return the script for `sbatch`. `program` starts `phalanx` on every host; the hosts share the file system."""
    # With a witness the other node continues if one fails or is lost.
    at_failure = "--no-kill --kill-on-bad-exit=0" if request.witness else "--kill-on-bad-exit=1"
    options = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={request.cpus}" if request.cpus else "--exclusive",
        *([f"--gpus-per-node={request.gpus}"] if request.gpus else []),
        *([f"--mem={request.memory}"] if request.memory else []),
        *([f"--partition={partition}"] if partition else []),
        *([f"--time={time}"] if time else []),
        *(["--no-kill"] if request.witness else []),
        f"--output={output}",
    ]
    cores = f"--cpus-per-task={request.cpus}" if request.cpus else "--cpu-bind=none"
    lines = [
        "#!/bin/bash",
        "# Written by: phalanx manifest slurm. Submit with: sbatch FILE",
        "# One `phalanx run` on each node starts the ranks there, one for each GPU or core.",
        *(f"#SBATCH {option if option.split() == [option] else quote([option])}" for option in options),
        "set -euo pipefail",
        "",
        "# Every connection between nodes needs the job's key, ~/.config/phalanx/key. The first node creates that file",
        "# if it is missing, and the others read it from the shared home directory. If the nodes share no home: create",
        "# a key once with `phalanx key FILE`, copy FILE to every node, and export PHALANX_KEY_FILE=FILE here.",
        "",
        f"exec srun {at_failure} --wait=0 {cores} \\",
        f"    {quote([*program, 'run', *request.run_words])}",
    ]
    return "\n".join(lines) + "\n"
