"""The agent makes this process a worker. Threads and locks of rpc live in this package.

serving.py      which thread reads, and which ones run the functions that others call
answering.py    what others ask of the worker itself, and all answers
calls.py        calls that wait for an answer, and when they have waited too long
reading.py      which thread reads the answers to calls
completing.py   what becomes of an answer: the call's result
modes.py        modes of torch, in which a thread makes no results for others
interrupts.py   Ctrl-C and handlers that raise, where a thread must not be left
connections.py  who the other workers are, and how they are reached
agent.py        all of it put together
"""
