"""Between a Schedule (positions in a Step) and a Plan (names, which save and load)."""

from __future__ import annotations

from collections.abc import Iterable

from zcompile.errors import PlanError
from zcompile.schedule.plan import Collective, Graph, Parameter, Plan
from zcompile.schedule.planner import Found
from zcompile.schedule.simulate import Bucket, Schedule, Simulator


def to_plan(
    sim: Simulator,
    found: Found,
    *,
    name: str,
    budget: int | None = None,
    free_residency: bool = False,
    notes: Iterable[str] = (),
) -> Plan:
    """Everything there is to say of a schedule. budget: as stated, in bytes."""
    step, schedule = sim.step, found.schedule
    graphs = tuple(
        Graph(direction, tuple(op.name for op in step.ops[step.start(g) : step.ends[g]]))
        for g, direction in enumerate(step.directions)
    )
    return Plan(
        name=name,
        world=step.world,
        device=sim.costs.device.name,
        graphs=graphs,
        parameters=tuple(_parameters(sim, found, free_residency)),
        collectives=tuple(rows(sim, schedule, _reasons(sim, found))),
        timeline=sim.timeline(schedule),
        budget=budget,
        costs=tuple(sim.costs.lines),
        notes=tuple(notes),
        fingerprint=step.fingerprint,
    )


def rows(sim: Simulator, schedule: Schedule, reasons: Iterable[str] = ()) -> list[Collective]:
    step, made = sim.step, []
    whys = list(reasons) or [""] * len(schedule.buckets)
    order = sorted(range(len(schedule.buckets)), key=lambda i: schedule.buckets[i].graph)
    keys = sim.keys(schedule)
    for index in order:
        bucket = schedule.buckets[index]
        of = step.gathers if bucket.kind == "all-gather" else step.reductions
        members = [of[m] for m in bucket.members]
        sent = sim.sent(bucket)
        made.append(
            Collective(
                key=keys[index],
                graph=step.directions[bucket.graph],
                kind=bucket.kind,
                parameters=tuple(m.parameter for m in members),
                dtype=members[0].dtype,
                bytes=sim.bytes_of(bucket),
                sent=sent,
                primitive=sim.primitive(bucket),
                issue=step.anchor(bucket.graph, bucket.issue),
                wait=step.anchor(bucket.graph, bucket.wait),
                release=_release(sim, schedule, bucket),
                reason=whys[index],
            )
        )
    return made


def from_plan(sim: Simulator, plan: Plan) -> Schedule:
    """The schedule that a plan's rows describe.

    Raises:
        PlanError: a row names a parameter, an operation or a dtype that the step does not have, or
            a parameter has no row.
    """
    step, buckets = sim.step, []
    left: dict[tuple[int, str, str], list[int]] = {}
    kept = plan.kept()
    listed = {parameter.name for parameter in plan.parameters}
    for owned in step.parameters:
        if owned.name not in listed:
            raise PlanError(f"parameters: the plan has no row for {owned.name!r}")
    for index in sim.gathered(kept):
        gather = step.gathers[index]
        left.setdefault((gather.graph, "all-gather", gather.parameter), []).append(index)
    for index, reduction in enumerate(step.reductions):
        left.setdefault((reduction.graph, reduction.kind, reduction.parameter), []).append(index)
    for row in plan.collectives:
        if row.graph not in step.directions:
            raise PlanError(f"{row.key}: there is no {row.graph} graph in this step")
        graph = step.directions.index(row.graph)
        members = []
        for name in row.parameters:
            waiting = left.get((graph, row.kind, name))
            if not waiting:
                raise PlanError(
                    f"{row.key}: the {row.graph} graph has no {row.kind} of {name!r}, or the plan "
                    "has it more than once"
                )
            members.append(waiting.pop(0))
            reads = step.gathers if row.kind == "all-gather" else step.reductions
            if (dtype := reads[members[-1]].dtype) != row.dtype:
                raise PlanError(
                    f"{row.key}: dtype={row.dtype!r}, but {name!r} travels in {dtype}: param_dtype "
                    "and reduce_dtype say in what"
                )
        positions = []
        for what, anchor in (("issue", row.issue), ("wait", row.wait)):
            try:
                positions.append(sim.position(graph, anchor))
            except KeyError:
                raise PlanError(
                    f"{row.key}: {what}={anchor!r} is not an operation of the {row.graph} graph. A "
                    "plan of another model, shape or version has other names"
                ) from None
        buckets.append(Bucket(row.kind, graph, tuple(members), positions[0], positions[1]))
    missing = next((key for key, waiting in left.items() if waiting), None)
    if missing is not None:
        graph, kind, name = missing
        raise PlanError(
            f"the plan has no row for the {kind} of {name!r} in {step.directions[graph]}: add it "
            "to a row of that kind"
        )
    # Whoever edits a plan moves an issue, not the row.
    return Schedule(tuple(sorted(buckets, key=lambda b: (b.graph, b.issue))), kept)


def _release(sim: Simulator, schedule: Schedule, bucket: Bucket) -> str:
    """The last operation that reads any of a bucket's parameters; "" where one leaves the graph."""
    if bucket.kind != "all-gather":
        return ""
    last = max(sim.last(m, schedule.kept) for m in bucket.members)
    return sim.step.ops[last].name if last < sim.step.ends[bucket.graph] else ""


def _parameters(sim: Simulator, found: Found, free: bool) -> Iterable[Parameter]:
    step, kept = sim.step, found.schedule.kept
    # Read on in a later graph without a gather of its own there.
    through = {g.parameter for g in step.gathers if g.last >= step.ends[g.graph]}
    through -= set(sim.pairs)
    for owned in step.parameters:
        if not owned.sharded:
            residency, why = (
                "replicated",
                "below persistence_threshold, or the stage shards nothing",
            )
        elif owned.name in kept or owned.name in through:
            residency, why = "kept", _kept_reason(sim, found, owned.name, free)
        else:
            residency = "gathered"
            why = "kept would not fit or not pay" if free else "the stage gathers at each use"
            if owned.name not in sim.pairs:
                why = "used in one direction only"
        yield Parameter(
            owned.name, owned.shape, owned.dtype, owned.bytes, owned.shard_bytes, residency, why
        )


def _kept_reason(sim: Simulator, found: Found, name: str, free: bool) -> str:
    if not free:
        return "the stage keeps gathered parameters for backward"
    if name not in sim.pairs:
        return "within the budget: saves a gather in backward"
    forward, backward = sim.pairs[name]
    wire = sim.price(Bucket("all-gather", 0, (backward,), 0, 0))[1]
    size = sim.step.gathers[forward].bytes
    return f"saves a gather of {_ms(wire)} in backward, for {size / 1e6:.2f} MB until then"


def _reasons(sim: Simulator, found: Found) -> list[str]:
    schedule, replay = found.schedule, found.replay
    curve = sim.memory(schedule)
    reached = sim.reached(replay)
    whys = []
    for bucket, start, end, stall in zip(
        schedule.buckets, replay.starts, replay.ends, replay.stalls, strict=True
    ):
        parts = []
        if len(bucket.members) > 1:
            parts.append(
                f"{len(bucket.members)} merged into one: in buckets of up to this size the latency "
                "saved is worth the bytes held"
            )
        if bucket.kind == "all-gather":
            early = float(reached[bucket.wait] - reached[bucket.issue])
            if bucket.issue == bucket.wait:
                parts.append("issued at its use: earlier gains nothing or does not fit")
            else:
                held = int(curve[2 * bucket.issue : 2 * bucket.wait].max())
                parts.append(
                    f"issued {_ms(early)} ahead of its use, its transfer takes {_ms(end - start)}; "
                    f"memory in between is at most {held / 1e6:.1f} MB"
                )
        elif bucket.wait == bucket.issue:
            parts.append("finished where it is issued: its gradients are freed at once")
        else:
            parts.append(
                f"issued when its last gradient is there, awaited where its transfer "
                f"({_ms(end - start)}) is over"
            )
        parts.append(f"exposed {_ms(stall)}" if stall > 0 else "hidden")
        whys.append("; ".join(parts))
    return whys


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
