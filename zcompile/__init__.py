"""zcompile: ZeRO as a compiler. `torch.compile(model, backend="zero", options={"stage": 3})`."""

from zcompile.comm import Traffic, traffic
from zcompile.errors import GraphError, OptionError, ZeroError, ZeroWarning
from zcompile.options import Options
from zcompile.sharding import shard
from zcompile.state import full_state_dict, load_full_state_dict

__version__ = "0.1.0"

__all__ = [
    "GraphError",
    "OptionError",
    "Options",
    "Traffic",
    "ZeroError",
    "ZeroWarning",
    "full_state_dict",
    "load_full_state_dict",
    "shard",
    "traffic",
]
