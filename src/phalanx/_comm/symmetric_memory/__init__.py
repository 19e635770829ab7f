"""The ranks of a host share memory; this package creates it, passes it to the ranks, maps it and allocates in it.

The memory has no name: it is a `memfd`, passed from process to process as a file descriptor. Nothing needs cleaning
up, however a process dies: the kernel frees the memory with the last process that has it open.
"""
