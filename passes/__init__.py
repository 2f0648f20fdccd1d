"""Graph passes, one a file. A pass is a frozen dataclass: `pass_(graph_module) -> graph_module`.

In the order in which they run:

| pass | graph | what it does |
|---|---|---|
| partition | Dynamo's | one unshard per parameter, however often it is read |
| residency | joint | which gathered parameters are kept for backward, which gathered again |
| sink | backward | computes large values late, so that fewer are alive at once |
| place | forward, backward | merges gathers and reductions and puts them where the plan says |
| update | backward | hands gradients to the optimizer where they are complete |
| release | forward, backward | marks where a bucket's parameters are last used |
| lower | forward, backward | chooses the primitive that carries each collective |

`verify` runs between them. `extract` is no pass: it reads off graphs what the planner plans.
"""

from zcompile.passes.lower import Lower
from zcompile.passes.partition import Partition
from zcompile.passes.place import Place
from zcompile.passes.release import Release
from zcompile.passes.residency import Residency
from zcompile.passes.sink import Sink
from zcompile.passes.update import Update
from zcompile.passes.verify import verify

__all__ = ["Lower", "Partition", "Place", "Release", "Residency", "Sink", "Update", "verify"]
