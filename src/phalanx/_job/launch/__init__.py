"""Turn the command line of `phalanx run` into an agent on each host.

    options, command_line   the command line, parsed and checked
    plan_job, devices       what this host starts: the number of ranks, their cores and devices, their environment
    adopt                   the same on one node of a job that a scheduler has started
    command                 `phalanx run`: this host's agent, alone or with those of other hosts (`_job.hosts`)
    join                    `phalanx join`: the same on a host that gets command and options from the first one
    calls                   `phalanx.launch(fn)`: a function of this process, called in the ranks

Nothing here imports torch.
"""
