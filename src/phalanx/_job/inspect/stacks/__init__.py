"""`phalanx stacks` shows where each rank of a running job is, without stopping it.

    jobs          which jobs of this user run on this host
    job_choice    which of them is meant
    job_snapshot  the one exchange with a job's agent: who the ranks are, their recorders, where they write their stacks
    survey        ask every rank for its stack, wait for those who answer, say why the others do not
    report        what is printed

The agent only hands out descriptors; all waiting is done by the command.
"""
