"""Run a job on several hosts: one agent on each, which meet at the coordinator of the first.

    first host                                              every other host
    agent ── decides: signals, restarts, the exit code      agent ── forks its ranks, tells what becomes of them,
      │      shows all lines, tells the first failure          │     follows; stops them when the first host is gone
    coordinator ◀───────── authenticated, encrypted ───────────┘
      ├─ zygote ── ranks 0, 1                                  └─ zygote ── ranks 2, 3

    addresses        which addresses this host has, and whether a name is one of them
    job_spec         what the first host says of the job to those who come
    node_plan        who has come, and which ranks each gets: a pure plan
    control_channel  messages between agents, without waiting
    reach            whether every host reaches every other one under the address that it gives
    gather           the first host, until all have come
    leader           the first host, while ranks run
    follower         every other host
    orphaned         what is told to the first host when the agent of another one was killed
    start            which of both this one is

Nothing here is imported by a job on one host.
"""
