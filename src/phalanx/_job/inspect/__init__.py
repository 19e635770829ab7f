"""Inspect a running or finished job from outside.

    stacks         `phalanx stacks`: where each rank is
    top            `phalanx top`: what each rank does now
    flight         the flight recorders of a finished job
    http_server    pages about a job, for a browser or a scraper
    agent_socket   the socket at which a job's agent answers these commands, and other hosts' agents

The launcher serves the data; nothing here starts or stops a rank, or imports torch.
"""
