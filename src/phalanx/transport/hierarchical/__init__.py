"""Groups whose ranks are on several hosts: memory inside each, an engine between, composed hierarchically.

layout      who sits where, and who drives the rails
session     agree, carry out, fail with one report      failure_reports: what it says
collectives memory, rails, memory                      rails, compression: what happens between the hosts
messages    point to point
"""
