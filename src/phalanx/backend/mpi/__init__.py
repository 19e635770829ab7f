"""This package provides PyTorch's backend "mpi" through mpi4py, for wheels of torch that were built without MPI.

It works with whatever MPI has started the job.

torch_hook     how `init_process_group("mpi")` and `new_group` get here
start          MPI on all ranks of a group, or on none
process_group  the group that torch sees
operations     what its collectives do; agreement, deadlines, and the report that all ranks tell
datatypes      what MPI calls our element types and reductions
"""
