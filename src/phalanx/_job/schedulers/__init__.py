"""Find the scheduler that started this command, and this host's place, from variables and without an option.

    allocation            the result, and the line that reports it
    slurm, kubernetes,    one file each: its variables, and how it starts this command on every host
    lsf, pbs, mpi
    find                  which of them it is; variables that contradict each other are refused by name
    meet                  where the agents of a job meet, if the scheduler does not say it

`phalanx._job.launch.adopt` puts the result into the settings of `phalanx run`.

One start of `phalanx run` is a node of the job, whatever the scheduler calls it (task, pod, MPI process): also where it
starts several on one host.
"""

# Without any of these nothing needs to be loaded to find that there is no scheduler.
SIGNS = (
    "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX", "LSB_JOBID",
    "PBS_JOBID",
)  # fmt: skip
