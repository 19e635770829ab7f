"""Run a job on several hosts: one agent on each, connected by the coordinator on the first host.

    first host                                              every other host
    agent ── decides: signals, restarts, the exit code      agent ── forks its ranks, reports their events,
      │      shows all lines and the first failure             │     follows; stops them when the first host is lost
    coordinator ◀───────── authenticated, encrypted ───────────┘
      ├─ zygote ── ranks 0, 1                                  └─ zygote ── ranks 2, 3

    start, lead, join_job  decide whether this host leads, and run the job to its end
    job_spec, node_plan    the first host's description of the job, and the ranks of each host: a pure plan
    control_channel        messages between agents, without waiting; job_membership: a follower's connections
    gather, reach          wait until all hosts have joined, and test whether they reach each other
    leader, follower       the two kinds of host while ranks run; elastic_hosts is the leader's part in an elastic job
    succession             the job survives the loss of its leader; leader and follower have one object of it each

A job on one host imports none of these modules.
"""
