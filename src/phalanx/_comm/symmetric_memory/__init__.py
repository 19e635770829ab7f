"""The ranks of a host share memory; this package creates it, hands it over, maps it and allocates in it.

The memory has no name: it is a `memfd`, handed from process to process as a file descriptor. Nothing has to be cleaned
up, however a process dies: the kernel frees it with the last process that holds it.
"""
