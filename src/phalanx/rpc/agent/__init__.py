"""The agent makes this process a worker. Threads and locks of rpc live in this package.

agent.py        all of it put together, and who reads what
state.py        the states of an agent
reader.py       the thread that reads the connections
pool.py         the threads that run functions and callbacks
answer.py       what a call returns, for the reader or for the thread that waits
calls.py        calls that wait for an answer, and when they have waited too long
completing.py   what becomes of an answer: the call's result
request.py      calls of others
answering.py    what others ask of the worker itself, and all answers
interrupts.py   Ctrl-C and handlers that raise, where a thread must not be left
connections.py  who the other workers are, and how they are reached
"""
