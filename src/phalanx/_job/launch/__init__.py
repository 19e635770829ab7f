"""Turn the command line of `phalanx run` into an agent on each host.

    options, command_line   the command line, checked before anything starts
    num_ranks, devices      how many ranks, on which devices
    run_job                 this host's agent, alone or with those of other hosts (`_job.hosts`)
    join                    `phalanx join`: the same on a host that takes command and options from the first one
    calls                   `phalanx.launch(fn)`: a function of this process, called in the ranks

Nothing here imports torch.
"""
