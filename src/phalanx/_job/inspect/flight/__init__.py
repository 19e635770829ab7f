"""Show the flight recorders of a finished job's ranks, for people and for programs.

summary   which rank waited where, and for whom: printed when a job fails
files     flight.json in --log-dir
"""
