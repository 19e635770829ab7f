"""The agent is the process that the user starts: it owns the ranks of its host, and exits last.

    settings, plan        the command's settings, and this host's plan
    zygote, worker        import torch once and fork the ranks; turn a fork into the user's `python script.py`
    attempt               one start of all ranks, until the last has exited; the module draws its parts
    supervision, elastic  decide when to stop the ranks, and how the job continues after a loss
    generation            the rank of each process after ranks are lost or added
    host_link             an attempt's link to the job's other hosts (`phalanx._job.hosts`)
    job                   runs the attempts, prints the summary, returns the exit code
    failure               the first failure, and its report

Nothing here imports torch, except the zygote, inside a function.
"""
