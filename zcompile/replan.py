"""Plans a step again from what it was measured to take.

After a few steps one forward and one backward run are measured, the ranks exchange their times,
and each plans again: from the same times they come to the same plan. Where that promises enough,
Dynamo is told to forget the compiled code; the next call compiles the new plan. The times are kept
on disk, and the next job begins with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from zcompile import comm, machine, planning
from zcompile.dump import Dump
from zcompile.errors import ZeroError
from zcompile.measure import Marks, Run, mean, operations, timeline
from zcompile.schedule.step import Step

log = logging.getLogger("zcompile")


@dataclass
class Replan:
    """Watches the runs of one step's graphs. forget: makes the next call compile anew."""

    group: comm.Group
    planned: planning.Planned
    lean: Step | None
    after: int
    gain: float
    dump: Dump | None
    forget: Callable[[], None]
    steps: int = 0
    done: bool = False
    runs: dict[int, Run] = field(default_factory=dict)

    def ready(self, direction: str) -> bool:
        """Whether this rank would measure its next run. It does where all ranks would."""
        begun = direction == planning.STEP[0] or 0 in self.runs
        return not self.done and self.steps >= self.after and begun

    def run(
        self,
        direction: str,
        run_graph: Callable[[list[Any]], Any],
        args: list[Any],
        measured: bool,
    ) -> Any:
        graph = planning.STEP.index(direction)
        self.steps += graph
        if not measured:
            return run_graph(args)
        with Marks() as marks:
            result = run_graph(args)
        self.runs[graph] = marks.run()
        if graph:
            self.done = True
            self._plan_again()
        return result

    def _plan_again(self) -> None:
        found, sim = self.planned.found, self.planned.sim
        assert self.group.control is not None
        everyone = comm.everyone(self.runs, self.group.control.group)
        try:
            runs = {graph: mean([each[graph] for each in everyone]) for graph in self.runs}
            measured = operations(sim, found.schedule, runs)
        except ZeroError as error:  # the model has collectives of its own
            log.info("not planned again: %s", error)
            return
        took = sum(run.seconds for run in runs.values())
        mark = sim.step.fingerprint
        setting = replace(self.planned.setting, measured={mark: measured})
        measured[planning.LINK] = planning.fit(setting, sim.step, found.schedule, took)
        machine.remember(self.group, mark, measured)
        now = setting.simulator(sim.step).time(found.schedule).seconds
        then = planning.again(setting, sim.step, self.lean)
        gain = 1.0 - then / now
        before = self.planned.plan.timeline
        assert before is not None
        text = (
            f"measured {took * 1e3:.2f} ms a step, {before.seconds * 1e3:.2f} "
            f"had been predicted; planned again with the measured times: {then * 1e3:.2f} ms in "
            f"place of {now * 1e3:.2f}, a gain of {gain:.1%}"
        )
        if gain >= self.gain:
            text += ": compiled at the next call"
            self.forget()
        else:
            text += f", less than replan_gain={self.gain:.1%}: the plan stays"
        log.info("%s", text)
        if self.dump is not None:
            seen = replace(
                self.planned.plan,
                timeline=timeline(sim, found.schedule, runs),
                notes=(*self.planned.plan.notes, text),
            )
            self.dump.plan(seen, "measured")
