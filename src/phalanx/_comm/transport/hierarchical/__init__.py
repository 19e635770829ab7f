"""Run groups whose ranks are on several hosts: through shared memory in each host, and by an engine between hosts.

layout      which ranks are on which host, and which drive the rails
session     agree, run, fail with one report            failure_reports: the report
agreement   the ranks verify that they call the same    exchange, bruck, inboxes: the messages between leaders
small, segmented, direct    collectives by size and by destination of the data      rails, compression: between hosts
by_engine   large collectives of ranks that have their hosts for themselves
messages    point to point                              preceding: messages that arrive before a collective ends
transport   combines all of these, and chooses
"""
