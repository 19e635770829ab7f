"""How processes are one job: agents, hosts, the coordinator, the launcher."""
