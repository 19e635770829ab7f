"""`phalanx stacks` shows where each rank of a running job is, without stopping it.

    jobs          which jobs of this user run on this host
    job_choice    the choice of one of them
    job_snapshot  the exchange with a job's agent: the ranks, their recorders, the files of their stacks
    survey        ask every rank for its stack, wait for answers, explain missing ones
    report        the printed text

The agent only passes descriptors; only the command waits.
"""
