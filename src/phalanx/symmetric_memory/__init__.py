"""Memory that the ranks of a host share: create, hand over, map, carve.

The memory has no name: it is a `memfd`, handed from process to process as a file descriptor. Nothing has to be
cleaned up, whoever dies and however: the kernel frees it with the last process that holds it.
"""
