"""`phalanx stacks` shows where each rank of a running job is, without stopping the rank.

    jobs          which jobs of this user run on this host, and the choice of one of them
    job_snapshot  the exchange with a job's agent: the ranks, their recorders, the files of their stacks
    dump          a process's stacks, as faulthandler writes them
    report        ask every rank for its stack, wait for the answers, explain missing ones, format the text

The agent only passes descriptors; only the command waits.
"""
