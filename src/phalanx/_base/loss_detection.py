"""This table says how a lost or silent process is noticed: by which signal, after how long, with which verdict.

On one host the kernel tells, so nothing is guessed; between hosts, and of processes that live, only silence does.

    what is seen                            by whom                        after                  verdict
    -------------------------------------   ----------------------------   --------------------   --------------------
    /proc says that it is being ended       ranks, map_reduce, the agent   at once                lost
    its pidfd or its socket says so         ranks, RPC, the zygote         its memory is freed    lost
    its connection breaks                   ranks of Gloo, map_reduce      AFTER_BREAK_S          lost, if it has ended
    nothing, while one waits in a call      every group                    LOOK_S                 what others reported
    a report of what another rank saw       groups over several hosts      REPORT_S               as it says
    no heartbeat of a host                  the coordinator, its members   HOST_TIMEOUT_S         lost, once hosts
    a host's connection ends, no other      the coordinator                CONNECTION_ENDED_S     with votes agree
    no answer of the coordinator            its members                    COORDINATOR_SILENT_S   unreachable
    no TCP acknowledgement of RPC's pulse   a worker of another host       RPC_PULSE_LOST_S       lost
    acknowledgements, but no heartbeat      the same                       RPC_SILENT_S           lost
    a rank has raised, and does not end     the agent                      ENDING_S               killed
    a rank was killed, and does not end     the agent                      DYING_S                taken for ended
    all but one gave up on their group      the agent of an elastic job    SILENT_RANK_S          that one is killed
    no answer of the agent                  an elastic rank                SILENT_AGENT_S         the job is over
    the zygote does not sweep               the agent                      SWEEP_S                killed
    a host does not sweep                   the first host                 HOST_SWEEP_S           lost
    a rank keeps others waiting             the agent                      --evict-after          killed

How a loss is told: on one host by a word in the group's memory that every wait looks at; between hosts by a report in
the job's store, and by agents to their ranks (`phalanx._comm.rendezvous.agent_file`).
"""

from __future__ import annotations

LOOK_S = 0.2  # a thread that waits asks so often whether the group is over

AFTER_BREAK_S = 0.5  # a killed process is gone by then, or a rank that saw more has posted its report
MAP_REDUCE_AFTER_BREAK_S = 5.0  # the same where the rest of the work depends on who it was

REPORT_S = 0.4
COLLECT_REPORT_S = 1.5

HOST_TIMEOUT_S = 9.0  # the timeout of an agent; --host-timeout
MEMBER_TIMEOUT_S = 10.0  # the timeout of a coordinator without a job
COORDINATOR_SILENT_S = 30.0  # a coordinator that is asked answers sooner, also who waits for a key
CONNECTION_ENDED_S = 1.5  # a live process connects again at once, or when the kernel tries a second time, after 1 s
COORDINATOR_REFUSED_S = 1.0  # a port that refuses for so long has nobody behind it any more

RPC_PULSE_S = 0.2
RPC_PULSE_LOST_S = 0.7
RPC_SILENT_S = 30.0
RPC_LAST_ANSWERS_S = 0.1  # after the pulse: if the process has ended, the other connection ends behind its answers

SAME_SIGNAL_S = 0.25  # within this time a scheduler has signalled all processes of a job on a host
SAME_SIGTERM_S = 2.0  # the same on all hosts
STARTING_S = 300.0  # a script that mentions `phalanx.elastic`, and has not come to it by then, may not be elastic
SETTLE_S = 0.2  # other ranks can say in this time what they saw, before they are stopped
HOST_LOSS_SETTLE_S = 3.0  # ranks look every LOOK_S whether a host is lost, and then ask a store that may be gone, too
SILENT_DEATH_LAG_S = 0.5  # a death without a word is dated back by so much
ENDING_S = 5.0  # what a process may take to end after its exception, while the others wait
DYING_S = 5.0  # what the kernel may take to end a process that was killed (a system call that cannot be interrupted)
SILENT_RANK_S = 10.0  # what a rank may keep the others waiting, which have given up on it
SILENT_AGENT_S = 60.0  # what an agent may take to answer, however short the operations of the group may be
SWEEP_S = 6.0  # a zygote that has not swept by then is killed: the agent sweeps
HOST_SWEEP_S = 15.0  # what a host may take to kill and tell, which is otherwise alive

_BEATS_PER_S = 250  # that all members together should send, where that leaves enough of them


def heartbeat_s(lost_after_s: float, num_members: int = 1) -> float:
    """Return how often a member says that it is there; of many each says it less often, at least thrice in the time."""
    return min(max(min(2.0, lost_after_s / 5), num_members / _BEATS_PER_S), lost_after_s / 3)
