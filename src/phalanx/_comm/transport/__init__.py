"""A transport carries a group's operations; this package has one interface and three transports behind it.

base           the interface and its contract
shared_memory  the ranks of one host
hierarchical   several hosts: memory inside each, an engine between
gloo           where memory can't be shared
"""
