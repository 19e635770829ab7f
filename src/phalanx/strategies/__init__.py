"""Strategies distribute a training job over ranks. Get one by its name: `phalanx.strategies.get("mirrored")`.

strategy.py        the interface of a strategy
choose.py          strategies by name, and "auto"
start.py           restarting a plain script that asks for several devices
recipe.py          recreating an optimizer over a rank's parameters
"""

from phalanx.strategies.choose import STRATEGIES as STRATEGIES
from phalanx.strategies.choose import get as get
from phalanx.strategies.current import has_strategy as has_strategy
from phalanx.strategies.mirrored import MirroredStrategy as MirroredStrategy
from phalanx.strategies.mirrored import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from phalanx.strategies.periodic import DiLoCoStrategy as DiLoCoStrategy
from phalanx.strategies.periodic import LocalSGDStrategy as LocalSGDStrategy
from phalanx.strategies.pipelined import PipelineStrategy as PipelineStrategy
from phalanx.strategies.servers import ParameterServerStrategy as ParameterServerStrategy
from phalanx.strategies.sharded import ShardedStrategy as ShardedStrategy
from phalanx.strategies.single_device import OneDeviceStrategy as OneDeviceStrategy
from phalanx.strategies.single_device import SingleDeviceStrategy as SingleDeviceStrategy
from phalanx.strategies.single_device import get_replica_context as get_replica_context
from phalanx.strategies.single_device import get_strategy as get_strategy
from phalanx.strategies.strategy import Strategy as Strategy

__all__ = [
    "STRATEGIES",
    "DiLoCoStrategy",
    "LocalSGDStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PipelineStrategy",
    "ShardedStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "get",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
]
