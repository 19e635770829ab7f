"""Run groups over torch's own Gloo if memory cannot be shared, or the C core is missing.

session    the ranks agree on each call, and report the same failure
numerics   how Gloo reduces our element types
transport  the collectives, each by one of Gloo's own, and messages
"""
