"""Show what the flight recorders of a job's ranks say once it has ended: for people and for programs.

summary   which rank waited where, and for whom: printed when a job fails
files     flight.json in --log-dir
"""
