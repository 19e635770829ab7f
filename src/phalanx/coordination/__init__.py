"""Where the processes of a job meet, and who says which of them they are.

Service      the coordinator: keys and values, members, messages, reports     service.py, coordinator.py
Client       a process's connection to it                                     client.py, connection.py
Key          who knows it is in                                               key.py, key_file.py
launchers    who started this process, and as which of how many               launchers.py
"""
