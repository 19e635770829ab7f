"""`phalanx stacks` shows where each rank of a running job is, without stopping the rank.

    jobs          find the jobs of this user on this host, and choose one
    job_snapshot  the exchange with a job's agent: the ranks, their recorders, the files of their stacks
    dump          a process's stacks, as faulthandler writes them
    report        ask every rank for its stack, wait for the answers, explain missing answers, format the text

The agent only passes descriptors; only the command waits.
"""
