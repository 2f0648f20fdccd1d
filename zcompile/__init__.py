"""zcompile: ZeRO as a compiler. `torch.compile(model, backend="zero", options={"stage": 3})`."""

from zcompile.accumulation import no_sync
from zcompile.comm import Traffic, traffic
from zcompile.dry_run import plan
from zcompile.errors import (
    BudgetError,
    GraphError,
    OptionError,
    PlanError,
    ZeroError,
    ZeroWarning,
)
from zcompile.fused import fuse
from zcompile.options import Options
from zcompile.scaler import LossScaler
from zcompile.sharding import shard
from zcompile.state import full_state_dict, load_full_state_dict
from zcompile.step import Step, compile_step

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "GraphError",
    "LossScaler",
    "OptionError",
    "Options",
    "PlanError",
    "Step",
    "Traffic",
    "ZeroError",
    "ZeroWarning",
    "compile_step",
    "full_state_dict",
    "fuse",
    "load_full_state_dict",
    "no_sync",
    "plan",
    "shard",
    "traffic",
]
