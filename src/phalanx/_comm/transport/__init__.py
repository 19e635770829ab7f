"""A transport runs a group's operations; this package has the interface and three implementations.

base           the interface and its contract
shared_memory  the ranks of one host
hierarchical   several hosts: memory inside each, an engine between
gloo           ranks that cannot share memory
"""
