"""Run groups whose ranks are on several hosts: through shared memory in each host, and an engine between hosts.

layout      which ranks are on which host, and which drive the rails
session     wraps each operation                        failure_reports: the report that all ranks raise
agreement   the ranks verify that their calls match     exchange, bruck: the messages between leaders
small, segmented, direct    collectives by size and by destination of the data      rails, compression: between hosts
by_engine   large collectives if no two ranks share a host
messages    point to point                              preceding: messages that arrive before a collective ends
transport   combines these, and chooses among them
"""
