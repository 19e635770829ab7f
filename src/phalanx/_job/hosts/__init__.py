"""Run a job on several hosts: one agent on each; they meet at the first host's coordinator.

    first host                                              every other host
    agent ── decides: signals, restarts, the exit code      agent ── forks its ranks, reports their events,
      │      shows all lines and the first failure             │     follows; stops them when the first host is lost
    coordinator ◀───────── authenticated, encrypted ───────────┘
      ├─ zygote ── ranks 0, 1                                  └─ zygote ── ranks 2, 3

    start, lead, join_job  decide which of both this host is, and run a job to its end
    job_spec, node_plan    the first host's description of the job, and the ranks of each host: a pure plan
    control_channel        messages between agents, without waiting
    gather, reach          wait for all hosts to join, and test whether they reach each other
    leader, follower       the two kinds of host while ranks run; elastic_hosts is the leader's part in an elastic job
    succession             election of a leader; lead_guard asks a majority before removing a host
    successor, take_over   the elected host becomes the leader; departure: a leader leaves; moved_job: its notice

A job on one host imports none of these modules.
"""
