"""PyTorch's backend "mpi" on a wheel that was built without MPI: through mpi4py, whatever MPI started the job.

torch_hook     how `init_process_group("mpi")` and `new_group` get here
start          MPI on all ranks of a group, or on none
process_group  the group that torch sees
operations     what its collectives do; agreement, deadlines, and the report that all ranks tell
datatypes      what MPI calls our element types and reductions
"""
