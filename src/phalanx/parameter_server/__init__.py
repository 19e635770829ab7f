"""A `ParameterServer` keeps parameters on servers; any number of trainers train them.

what a trainer uses: ParameterServer, Pulled        client.py
a server's part of the parameters, its updates      shard.py
a trainer's calls to servers, and their handlers    client.py, requests.py
waiting requests, replicas, failover                hosted_shard.py
placement of parameters on servers                  layout.py
"""

from phalanx.parameter_server.client import ParameterServer, Pulled

__all__ = ["ParameterServer", "Pulled"]
