"""Random steps for the planner: valid, of any size, on links of any speed, under any budget.

Forward then backward (now and then one graph alone), activations that are saved for backward,
parameters of mixed sizes and dtypes, some tied to several operations, some used in one direction
only, some replicated (their gradient is all-reduced), some frozen (they have no gradient),
gradients that are needed before the end, shards that are computed first.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from zcompile.schedule import planner
from zcompile.schedule.costs import Costs, Device
from zcompile.schedule.simulate import AtRest, Simulator
from zcompile.schedule.step import Gather, Op, Owned, Reduction, Step

MB = 10**6
DEVICE = Device("toy", {"float32": 1e12, "bfloat16": 4e12}, 1e11, 16 * 10**9, 2e-6, 1.0, "made up")


@dataclass(frozen=True)
class AffineLink:
    """latency + sent / bandwidth on the link, launch + whole / memory on the host. Two primitives:
    `small` has a tenth of the latency and a quarter of the bandwidth."""

    latency: float
    bandwidth: float
    share: float = 0.0
    launch: float = 0.0
    memory: float = 1e11
    small: bool = False

    def primitive(self, kind: str, sent: int) -> str:
        return min(self._times(sent))[1]

    def transfer(self, kind: str, sent: int) -> float:
        return min(self._times(sent))[0] * (2 if kind == "all-reduce" else 1)

    def _times(self, sent: int) -> list[tuple[float, str]]:
        times = [(self.latency + sent / self.bandwidth, "large")]
        if self.small:
            times.append((self.latency / 10 + 4 * sent / self.bandwidth, "small"))
        return times

    def issue(self, kind: str, whole: int) -> float:
        return self.launch + (whole / self.memory if kind != "all-gather" else 0.0)

    def finish(self, kind: str, whole: int) -> float:
        return self.launch / 2 + whole / self.memory


@dataclass(frozen=True)
class Case:
    """budget: bytes of the peak; None: unlimited. may_keep: parameters whose residency is free."""

    step: Step
    costs: Costs
    at_rest: AtRest
    budget: int | None
    may_keep: tuple[str, ...]

    def simulator(self) -> Simulator:
        return Simulator(self.step, self.costs, self.at_rest)

    def within(self, budget: int | None) -> Case:
        return replace(self, budget=budget)

    def collectives(self) -> int:
        return len(self.step.gathers) + len(self.step.reductions)


def random_case(
    rng: random.Random,
    parameters: tuple[int, int] = (1, 4),
    ops: tuple[int, int] = (1, 6),
    share: bool | None = None,
) -> Case:
    """parameters, ops: at least and at most, ops of each direction. share: whether transfers slow
    computing down; None for sometimes."""
    step = random_step(rng, rng.randint(*parameters), rng.randint(*ops), rng.randint(*ops))
    costs = random_costs(rng, step, share)
    rest = AtRest(sum(p.shard_bytes for p in step.parameters), rng.choice([0, 8]) * MB, 0)
    sim = Simulator(step, costs, rest)
    names = sorted(sim.pairs)
    may_keep = tuple(names) if rng.random() < 0.8 else ()
    return Case(step, costs, rest, random_budget(rng, sim, may_keep), may_keep)


def random_budget(rng: random.Random, sim: Simulator, may_keep: tuple[str, ...]) -> int | None:
    """From the leanest schedule's peak to no limit."""
    least = int(sim.memory(planner.lean(sim, may_keep=may_keep)).max())
    span = sum(g.bytes for g in sim.step.gathers) + sum(r.bytes for r in sim.step.reductions)
    spent = rng.choice([0.0, rng.uniform(0, 0.2), rng.uniform(0, 1), rng.uniform(0, 1), None])
    return None if spent is None else least + int(spent * span)


def random_costs(rng: random.Random, step: Step, share: bool | None = None) -> Costs:
    """Transfers that together take from a tenth to four times as long as the operations."""
    bare = Costs(DEVICE, AffineLink(0.0, 1.0))
    compute = sum(bare.compute(step)) or 1e-3
    rows = (*step.gathers, *step.reductions)
    wire = compute * 10 ** rng.uniform(-1, 0.6)
    in_latency = rng.choice([0.0, rng.uniform(0, 0.3), rng.uniform(0, 0.9)])
    sent = sum(r.sent for r in rows) or 1
    share = rng.random() < 0.5 if share is None else share
    link = AffineLink(
        latency=wire * in_latency / max(len(rows), 1),
        bandwidth=sent / (wire * (1 - in_latency)),
        share=rng.choice([0.25, 0.75, 1.0]) if share else 0.0,
        launch=rng.choice([0.0, compute / max(len(rows), 1) * rng.uniform(0, 0.1)]),
        memory=rng.choice([1e11, 1e10]),
        small=rng.random() < 0.3,
    )
    return Costs(DEVICE, link)


def random_step(rng: random.Random, parameters: int, forward: int, backward: int) -> Step:
    """Of so many parameters and operations. One in ten has one graph only."""
    world = rng.choice([2, 2, 4, 8, 64, 1]) if rng.random() < 0.3 else rng.choice([2, 8])
    single = rng.random() < 0.1
    ends = (forward,) if single else (forward, forward + backward)
    directions = ("inference",) if single else ("forward", "backward")
    ops = tuple(_op(rng, index) for index in range(ends[-1]))
    native = rng.random() < 0.5
    owned, gathers, reductions = [], [], []
    for index in range(parameters):
        name = f"p{index}"
        dtype = rng.choice(["bfloat16", "bfloat16", "float32"])
        size = int(10 ** rng.uniform(5, 8))
        cast = rng.random() < 0.3
        sharded = rng.random() < 0.85
        shard = -(-size // world) * (2 if cast else 1) if sharded else size
        owned.append(Owned(name, (size,), dtype, size, shard, sharded))
        if sharded:
            sent = _sent(rng, size, world, native)
            gathers += _gathers(rng, name, dtype, size, sent, cast, ends)
        if not single and rng.random() < 0.85:
            reductions.append(_reduction(rng, name, size, sharded, ends, world, native))
    gathers.sort(key=lambda g: (g.graph, g.first))
    reductions.sort(key=lambda r: r.ready)
    return Step(
        world=world,
        native=native,
        directions=directions,
        ends=ends,
        ops=ops,
        gathers=tuple(gathers),
        reductions=tuple(reductions),
        parameters=tuple(owned),
        live={"activations": _activations(rng, ends)},
    )


def _op(rng: random.Random, index: int) -> Op:
    if rng.random() < 0.15:
        return Op(f"view_{index}", 0.0, 0.0, "float32")
    return Op(f"op_{index}", 10 ** rng.uniform(7, 9.5), rng.uniform(0, 20 * MB), "float32")


def _gathers(
    rng: random.Random,
    name: str,
    dtype: str,
    size: int,
    sent: int,
    cast: bool,
    ends: tuple[int, ...],
) -> list[Gather]:
    directions = [True, True]
    if rng.random() < 0.2:
        directions[rng.randrange(2)] = False  # an embedding, a bias
    found, begin = [], 0
    for graph, end in enumerate(ends):
        if directions[graph]:
            first = rng.randrange(begin, end)
            last = first if rng.random() < 0.7 else rng.randrange(first, end)
            if graph == 0 and rng.random() < 0.03:
                last = end  # it leaves the graph
            ready = begin if rng.random() < 0.9 else rng.randint(begin, first)
            found.append(Gather(name, graph, first, last, ready, size, sent, dtype, cast))
        begin = end
    return found


def _reduction(
    rng: random.Random,
    name: str,
    size: int,
    sharded: bool,
    ends: tuple[int, ...],
    world: int,
    native: bool,
) -> Reduction:
    graph, end = len(ends) - 1, ends[-1]
    ready = rng.randint(ends[-2] + 1, end)
    needed = end if rng.random() < 0.85 else rng.randint(ready, end)
    wide = rng.random() < 0.3  # sent in a wider dtype than it was computed in
    whole = size * 2 if wide else size
    kind = "reduce-scatter" if sharded else "all-reduce"
    sent = _sent(rng, whole, world, native) if sharded else 2 * (whole * (world - 1) // world)
    result = -(-whole // world) if sharded else whole
    return Reduction(
        name, graph, kind, ready, needed, whole, sent, "float32", size, result, f"{kind} {wide}"
    )


def _sent(rng: random.Random, size: int, world: int, native: bool) -> int:
    """Flat buffers are padded where rows do not divide by the ranks; messages are not."""
    if not native:
        return size * (world - 1) // world
    part = -(-size // world)
    return (world - 1) * int(part * rng.choice([1, 1, 1, rng.uniform(1, 1.2)]))


def _activations(rng: random.Random, ends: tuple[int, ...]) -> tuple[int, ...]:
    """Each forward operation makes a value that later ones read, in backward if there is one."""
    slots = 2 * ends[-1] + 1
    live = [0] * slots
    for born in range(ends[-1]):
        size = int(10 ** rng.uniform(5, 7.7))
        if born < ends[0] and len(ends) > 1 and rng.random() < 0.6:
            dies = rng.randrange(ends[0], ends[-1])
        else:
            dies = min(born + rng.randint(0, 2), ends[-1] - 1)
        for slot in range(2 * born + 1, 2 * dies + 2):
            live[slot] += size
    return tuple(live)
