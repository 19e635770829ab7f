"""Show what the flight recorders of a job's ranks say once it has ended: for people, for programs, as a picture.

summary   which rank waited where, and for whom: printed when a job fails
files     flight.json and flight.trace.json in --log-dir
trace     the Chrome trace format, which Perfetto opens
"""
