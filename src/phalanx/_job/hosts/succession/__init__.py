"""A job survives the loss of its leader: the hosts agree on possible successors, and a majority elects one of them.

    leader_succession, follower_succession   what LeaderLink and FollowerLink call, during an attempt
    lead_guard, host_succession              the same between attempts
    config, voter, primary, candidate        the protocol, as pure data
    proposer, successor                      send the protocol's messages: the leader, and every other host
    standby, take_over, handover             a copy of the coordinator, and how it replaces the coordinator
    departure                                a leader leaves on SIGTERM
    moved_job, leader_notice                 how hosts find the leader when it is not where the job began
    witness                                  a vote outside the job

`tests/test_architecture.py` lists the names that other rooms use.
"""
