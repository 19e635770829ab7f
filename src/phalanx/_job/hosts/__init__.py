"""Run a job on several hosts: one agent on each; they meet at the first host's coordinator.

    first host                                              every other host
    agent ── decides: signals, restarts, the exit code      agent ── forks its ranks, tells what becomes of them,
      │      shows all lines, tells the first failure          │     follows; stops them when the first host is gone
    coordinator ◀───────── authenticated, encrypted ───────────┘
      ├─ zygote ── ranks 0, 1                                  └─ zygote ── ranks 2, 3

    start, lead, join_job  which of both this host is, and how each runs a job to its end
    job_spec, node_plan    what the first host says of the job, and which ranks each host gets: a pure plan
    control_channel        messages between agents, without waiting
    gather, reach          the first host until all have come, and whether every host reaches every other one
    leader, follower       the two kinds of host while ranks run; elastic_hosts is the leader's part in an elastic job
    succession             whom the hosts elect when the leader is lost; lead_guard asks a majority before one is lost
    successor, take_over   how the elected host comes to lead; departure: how a leader leaves; moved_job: who says so

A job on one host imports none of these modules.
"""
