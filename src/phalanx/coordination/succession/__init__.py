"""Who coordinates a job after the host that does is lost: agreed on beforehand, decided by a majority."""
