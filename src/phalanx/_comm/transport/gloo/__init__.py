"""Carry groups over torch's own Gloo where memory cannot be shared, or the C core is not there.

session    agree, carry out, fail with one report
numerics   what Gloo adds up, of our element types and reductions
transport  every collective is one of Gloo's; messages
"""
