"""Turn the command line of `phalanx run` into an agent on each host.

    options, command_line   the command line, parsed and checked
    plan_job, devices       this host's plan: the number of ranks, their cores and devices, their environment
    adopt                   the plan of one node of a job that a scheduler has started
    command                 `phalanx run`: this host's agent, alone or with other hosts' agents (`_job.hosts`)
    join                    `phalanx join`: the agent of a host that gets the command and options from the first host
    calls                   `phalanx.launch(fn)`: call a function of this process in the ranks

Nothing here imports torch.
"""
