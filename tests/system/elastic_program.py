"""A rank of an elastic job that runs a program of `tests.elastic.programs`, and leaves all that it holds.

FOLDER/program      the job and the program, pickled; without a program, the job's own training runs
FOLDER/end-RANK     what the rank held at the end, as torch saves it
"""

import os
import pickle
import sys
from pathlib import Path

import torch
from tests.elastic.jobs import train_job
from tests.elastic.programs import train_program

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    job, program = pickle.loads((folder / "program").read_bytes())
    held = train_job(job) if program is None else train_program(job, program)
    torch.save(held, folder / f"end-{os.environ['RANK']}")
