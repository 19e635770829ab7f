"""The agent is the process that the user started: it owns the ranks of its host, and ends last.

    settings, plan        the command's settings, and this host's plan
    zygote, worker        imports torch once and forks the ranks; turns a fork into the user's `python script.py`
    attempt               one start of all ranks, to the end of the last; its parts are drawn there
    supervision, elastic  decide about the ranks, and about the job after a loss
    generation            the rank of each process after a loss or a gain
    host_link             an attempt's link to the job's other hosts (`phalanx._job.hosts`)
    job                   attempt after attempt, the summary, the exit code
    failure               the first failure, and its report

Nothing here imports torch, except the zygote, inside a function.
"""
