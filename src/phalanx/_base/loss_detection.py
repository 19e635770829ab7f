"""How a lost or silent process is detected: by which observation, after how long, with which verdict.

On one host the kernel reports the end of a process, so nothing is guessed. On another host, or in a process that still
runs, only silence can be observed.

    observation                             by                             after                  verdict
    -------------------------------------   ----------------------------   --------------------   --------------------
    /proc shows that it is being ended      ranks, map_reduce, the agent   at once                lost
    its pidfd or its socket reports the end ranks, RPC, the zygote         its memory is freed    lost
    its connection breaks                   ranks of Gloo, map_reduce      AFTER_BREAK_S          lost, if it has ended
    none, while a rank waits in a call      every group                    CHECK_S                as others reported
    a report of another rank                groups over several hosts      REPORT_S               as reported
    no heartbeat of a host                  the coordinator, its members   HOST_TIMEOUT_S         lost, once hosts
    a host's connection ends, no other      the coordinator                CONNECTION_ENDED_S     with votes agree
    no answer of the coordinator            its members                    COORDINATOR_SILENT_S   unreachable
    no TCP acknowledgement of RPC's pulse   a worker of another host       RPC_PULSE_LOST_S       lost
    acknowledgements, but no heartbeat      the same                       RPC_SILENT_S           lost
    a rank has raised, and does not end     the agent                      ENDING_S               killed
    a rank was killed, and does not end     the agent                      DYING_S                counts as ended
    all but one gave up on their group      the agent of an elastic job    SILENT_RANK_S          that rank is killed
    no answer of the agent                  an elastic rank                SILENT_AGENT_S         the job is over
    the zygote does not sweep               the agent                      SWEEP_S                killed
    a host does not sweep                   the first host                 HOST_SWEEP_S           lost
    a rank keeps others waiting             the agent                      --evict-after          killed

A loss is published on one host by a word in the group's memory that every wait checks; between hosts by a report in
the job's store, and by agents to their ranks (`phalanx._comm.rendezvous.agent_file`).
"""

from __future__ import annotations

CHECK_S = 0.2  # how often a waiting thread checks whether the group has failed

AFTER_BREAK_S = 0.5  # by then a killed process has ended, or a rank that knows more has published its report
MAP_REDUCE_AFTER_BREAK_S = 5.0  # the same if the remaining work depends on which process ended

# How long a rank whose connection broke waits for a rank that saw the cause: a dead rank's neighbours notice in 50 ms.
REPORT_S = 0.4
COLLECT_REPORT_S = 1.5  # the same if that rank collects the positions or calls of all ranks first

HOST_TIMEOUT_S = 9.0  # the timeout of an agent; --host-timeout
MEMBER_TIMEOUT_S = 10.0  # the timeout of a coordinator without a job
COORDINATOR_SILENT_S = 30.0  # a running coordinator answers sooner, even a request that waits for a key
CONNECTION_ENDED_S = 1.5  # a live process reconnects at once, or at the kernel's second attempt, after 1 s
COORDINATOR_REFUSED_S = 1.0  # no process listens at a port that refuses connections for this long

RPC_PULSE_S = 0.2
RPC_PULSE_LOST_S = 0.7
RPC_SILENT_S = 30.0
RPC_LAST_ANSWERS_S = 0.1  # after the pulse has broken: the last answers of an ended process arrive by then

SAME_SIGNAL_S = 0.25  # a scheduler signals all processes of a job on a host within this time
SAME_SIGTERM_S = 2.0  # the same on all hosts
STARTING_S = 300.0  # a script that mentions `phalanx.elastic` but has not called it by then may not be elastic
REPORT_GRACE_S = 0.2  # the time for other ranks to report their errors before they are stopped
HOST_LOSS_GRACE_S = 3.0  # ranks check for a lost host every CHECK_S, and then query a store that may also be gone
SILENT_DEATH_LAG_S = 0.5  # subtracted from the time of an unreported death
ENDING_S = 5.0  # the time for a process to end after its exception, while the others wait
DYING_S = 5.0  # the time for the kernel to end a killed process (a system call that cannot be interrupted)
SILENT_RANK_S = 10.0  # how long a rank may delay others that have given up on it
SILENT_AGENT_S = 60.0  # the time for an agent to answer, however short the group's timeout is
SWEEP_S = 6.0  # a zygote that has not swept by then is killed: the agent sweeps
HOST_SWEEP_S = 15.0  # the time for a live host to kill its processes and report

_BEATS_PER_S = 250  # of all members together, unless each would then send too few


def heartbeat_s(lost_after_s: float, num_members: int = 1) -> float:
    """Return the interval of a member's heartbeats: longer with many members, but at least three per `lost_after_s`."""
    return min(max(min(2.0, lost_after_s / 5), num_members / _BEATS_PER_S), lost_after_s / 3)
