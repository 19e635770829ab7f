"""The agent: what makes this process a worker. Threads and locks of rpc live here.

serving.py      which thread reads, and which ones run the functions that others call
calls.py        calls that wait for an answer, and when they have waited too long
links.py        the connections to workers of this host
agent.py        all of it put together
"""
