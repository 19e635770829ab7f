"""The processes of a job meet at the coordinator, and find out here which of them they are.

Service      the coordinator: keys and values, members, messages, reports     service.py, coordinator.py
Client       a process's connection to it                                     client.py, connection.py
Key          a process that knows it is let in                                key.py, key_file.py
launchers    who started this process, and as which of how many               launchers.py
"""
