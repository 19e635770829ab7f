"""Run a job on several hosts: one agent on each, connected by the coordinator on the first host.

    first host                                              every other host
    agent ── decides: signals, restarts, the exit code      agent ── forks its ranks, reports their events,
      │      shows all lines and the first failure             │     executes orders; stops its ranks if no host leads
    coordinator ◀───────── authenticated, encrypted ───────────┘
      ├─ zygote ── ranks 0, 1                                  └─ zygote ── ranks 2, 3

    start, lead, join_job  decide whether this host leads, and run the job
    job_spec, node_plan    the first host's description of the job; the plan of each host's ranks, as pure data
    control_channel        non-blocking messages between agents
    job_membership         a follower's connections
    gather, reach          wait until all hosts have joined, and test whether they can connect to each other
    leader, follower       what the first host, and each other host, does while ranks run
    elastic_hosts          the leader's decisions in an elastic job
    succession             survive the loss of the leader

A job on one host imports none of these modules.
"""
