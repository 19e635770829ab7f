"""Let the processes of one host talk to each other.

channel         messages with file descriptors over a Unix socket: between agent, zygote, ranks and `phalanx stacks`
agent           a rank finds its agent, and tells it something
local_listener  a rank listens for the others of its host, who bring the job's token
private         sockets that no other user of the machine can reach
peer            tells which process is at the other end
"""
