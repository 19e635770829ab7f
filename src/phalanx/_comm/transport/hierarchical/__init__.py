"""Carry groups whose ranks are on several hosts: through shared memory in each host, and by an engine between.

layout      who sits where, and who drives the rails
session     agree, carry out, fail with one report      failure_reports: what it says
agreement   the ranks learn that they call the same
small, segmented, direct    collectives by size, and by where the bytes go      rails, compression: between the hosts
messages    point to point                              preceding: what arrives before the next collective is over
transport   has all of these, and chooses
"""
