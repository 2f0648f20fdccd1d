"""Dynamic loss scaling for fp16: gradients that would vanish are computed 2^k times as large.

The scheme is that of Micikevicius et al., "Mixed Precision Training" (ICLR 2018), with DeepSpeed's
hysteresis: the scale falls at the last of so many overflows since it last changed, or since a
window of steps without any.
"""

from __future__ import annotations

from typing import Any

from zcompile.errors import OptionError


class LossScaler:
    """For zcompile.compile_step(..., scaler=LossScaler()).

    scale: the factor of the loss at first; window: steps without an overflow after which it
    doubles; hysteresis: overflows after which it halves (each of them skips its step); minimum: it
    never falls below this.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        window: int = 1000,
        hysteresis: int = 2,
        minimum: float = 1.0,
    ) -> None:
        for name, value, least in (
            ("scale", scale, minimum),
            ("window", window, 1),
            ("hysteresis", hysteresis, 1),
        ):
            if not value >= least:
                raise OptionError(f"LossScaler: {name} = {value!r} must be at least {least}")
        if not minimum > 0:
            raise OptionError(f"LossScaler: minimum = {minimum!r} must be above 0")
        self.window, self.hysteresis, self.minimum = window, hysteresis, minimum
        self.scale, self.good, self.forgiven, self.skipped = float(scale), 0, 0, 0

    def update(self, overflow: bool) -> None:
        """After each step. overflow: a gradient was not finite, and the step was left out."""
        if overflow:
            self.skipped += 1
            self.good = 0
            self.forgiven += 1
            if self.forgiven >= self.hysteresis:
                self.scale, self.forgiven = max(self.scale / 2, self.minimum), 0
            return
        self.good += 1
        if self.good % self.window == 0:
            self.scale, self.forgiven = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps. Every rank's is the same."""
        return {name: getattr(self, name) for name in ("scale", "good", "forgiven", "skipped")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.state_dict():
            setattr(self, name, type(getattr(self, name))(state[name]))
