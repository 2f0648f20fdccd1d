"""What zcompile raises and warns with. Every text names the value, the limit and the remedy."""


class ZeroError(RuntimeError):
    """The model, the ranks or the plan are not what zcompile can run."""


class OptionError(ZeroError, ValueError):
    """An option has an unknown name or a value outside its range."""


class GraphError(ZeroError):
    """A graph broke a rule of the dialect between two passes (see passes/verify.py)."""


class ZeroWarning(UserWarning):
    """Something runs correctly but slower than it could, and the text says why."""


class Disagreement(ZeroError):
    """The ranks are about to do different things. everyone: the lines of each, by rank."""

    def __init__(self, text: str, everyone: list[list[str]]) -> None:
        super().__init__(text)
        self.everyone = everyone


class BudgetError(ZeroError):
    """No schedule of the step fits the memory budget."""


class PlanError(ZeroError):
    """A plan does not fit the graphs that it was given for; names the row and the remedy."""
