"""Create the memory that the ranks of a host share, send it to the ranks, map it, and allocate tensors in it.

The memory is a `memfd`, which has no name and is sent to processes as a file descriptor. Nothing needs cleaning up,
however a process dies: the kernel frees the memory with the last process that has it open.
"""
