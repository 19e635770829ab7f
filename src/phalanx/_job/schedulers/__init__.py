"""Find the scheduler that started this command, and this node's number in the job, from environment variables.

    allocation            the result, and the line that reports it
    slurm, kubernetes,    the variables of a scheduler, and how it starts this command on every host
    hosts (LSF, PBS)
    find                  which scheduler it is, or `mpiexec`; an error names contradictory variables
    rendezvous            the rendezvous of the job's agents, where the scheduler does not name it

`phalanx._job.launch.adopt` puts the result into the settings of `phalanx run`.

Each start of `phalanx run` is a node of the job, whatever the scheduler calls it (task, pod, MPI process). One host
may have several nodes.
"""

# Without any of these variables there is no scheduler, so that no module needs to be imported to find that out.
SIGNS = (
    "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "LSB_JOBID",
    "PBS_JOBID",
)  # fmt: skip
