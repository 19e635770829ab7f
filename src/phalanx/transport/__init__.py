"""Who carries a group's operations: the memory of one host, several hosts, MPI.

shared_memory  the ranks of one host
hierarchical   several hosts: memory inside each, an engine between
mpi            whatever MPI started the job
"""
