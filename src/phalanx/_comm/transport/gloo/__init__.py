"""Run groups over torch's own Gloo if memory cannot be shared, or the C core is missing.

session    agree, run, fail with one report
numerics   how Gloo reduces our element types
transport  every collective is one of Gloo's; messages
"""
