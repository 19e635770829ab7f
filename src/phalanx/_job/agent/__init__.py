"""The agent is the `phalanx run` process: it starts and supervises the ranks of its host, and exits last.

    settings, plan        the options of the command, and the values derived from them on this host
    zygote, worker        import torch once and fork the ranks; turn a fork into the user's `python script.py`
    attempt               one start of all ranks, until the last exits; its module docstring shows its parts
    supervision, elastic  decide when to stop the ranks, and how the job continues after a rank is lost
    generation            the rank of each process after ranks are lost or added
    host_link             an attempt's link to the job's other hosts (`phalanx._job.hosts`)
    job                   runs the attempts, prints the summary, returns the exit code
    failure               the first failure, and its report

No module here imports torch, except `zygote`, inside a function.
"""
