"""The agent is the process that the user started: it owns the ranks of its host, and ends last.

    settings, plan        what was asked for, and what this host made of it
    zygote, worker        imports torch once and forks the ranks; turns a fork into the user's `python script.py`
    attempt               one start of all ranks, to the end of the last; its parts are drawn there
    supervision, elastic  decide what becomes of the ranks, and of the job after a loss
    generation            which process is which rank then
    host_link             what an attempt has of the job's other hosts (`phalanx._job.hosts`)
    job                   attempt after attempt, the summary, the exit code
    failure               which failure came first, and how it is told

Nothing here imports torch, except the zygote, inside a function: that is what it is for.
"""
