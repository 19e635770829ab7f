"""Carry groups whose ranks are on several hosts: through shared memory in each host, and by an engine between.

layout      who sits where, and who drives the rails
session     agree, carry out, fail with one report      failure_reports: what it says
collectives memory, rails, memory                      rails, compression: what happens between the hosts
messages    point to point
"""
