"""Parameters live on servers, and any number of trainers train them.

ParameterServer, Pulled: what a trainer uses        client.py, pulled.py
a server's part of the parameters, its updates      shard.py
a trainer's calls to servers, and who answers them  shard_calls.py, requests.py
requests that wait, replicas, take-over             hosting.py
which server has what                               layout.py
"""

from phalanx.parameter_server.client import ParameterServer
from phalanx.parameter_server.pulled import Pulled

__all__ = ["ParameterServer", "Pulled"]
