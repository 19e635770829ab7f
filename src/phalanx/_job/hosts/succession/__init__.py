"""If the host that coordinates a job is lost, another takes over: agreed on beforehand, decided by a majority."""
