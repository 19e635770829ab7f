"""The agent makes this process a worker: it sends calls, runs the calls of other workers, and owns the threads.

agent.py          the agent, its parts, and which thread reads what
state.py          the states of an agent
reader.py         the thread that reads the connections
pool.py           the threads that run functions and callbacks
answer.py         the answer to a call: a future, or a line that the waiting thread reads
calls.py          calls that wait for an answer, and their timeouts
answer_reader.py  from a received answer to the result of its call
incoming_call.py  a call of another worker
answer_sender.py  controls and orders of other workers, and all answers to other workers
interrupts.py     Ctrl-C and signal handlers that raise, where a thread must not be interrupted
connections.py    the other workers, and the connection to each
"""
