"""Communication between the processes of one host.

channel         messages with file descriptors over a Unix socket: between agent, zygote, ranks and `phalanx stacks`
agent           connections and messages to the agent of this host
local_listener  a rank listens for the other ranks of its host, which send the job's token
private         sockets that no other user of the machine can reach
event_loop      waits for several sources at once; signals and wakeup are such sources
"""
