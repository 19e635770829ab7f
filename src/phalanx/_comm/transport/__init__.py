"""A transport runs a group's operations; this package has the interface and its implementations.

base           the interface and its contract
shared_memory  the ranks of one host
hierarchical   ranks on several hosts: shared memory inside each host, an engine between hosts
gloo           ranks that cannot share memory
rehearsal      a replacement rank before it joins the others: no other rank takes part
"""
