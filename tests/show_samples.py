"""Plans as a planner makes them, of a GPT's shape, for the tests of zcompile.show.

sample(layers=24, stage=3)      144 collectives and a simulated timeline
sample(stage=2)                 gathered once, kept for backward
measured(plan)                  the same plan with measured times
large()                         about 800 collectives over 10,000 operations
"""

from __future__ import annotations

import dataclasses
import random

from zcompile.schedule.plan import (
    CATEGORIES,
    KINDS,
    Collective,
    Event,
    Graph,
    Memory,
    Parameter,
    Plan,
    Timeline,
)

BANDWIDTH = 40e9  # bytes per second each rank sends
LATENCY = 40e-6
FLOPS = 60e12
GATHERED = "gathered again: keeping it would take the peak {over:.1f} GB over the budget"
EARLY = "issued {n} operations early, so that {ms:.1f} ms of compute hide its transfer"
LATE = "nothing before it is long enough to hide its transfer"


def parameters(layers: int, hidden: int, world: int, stage: int) -> list[Parameter]:
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (50304, hidden),
        "wpe.weight": (1024, hidden),
    }
    for i in range(layers):
        at = f"h.{i}."
        shapes |= {
            f"{at}ln_1.weight": (hidden,),
            f"{at}attn.qkv.weight": (3 * hidden, hidden),
            f"{at}attn.proj.weight": (hidden, hidden),
            f"{at}ln_2.weight": (hidden,),
            f"{at}mlp.fc.weight": (4 * hidden, hidden),
            f"{at}mlp.proj.weight": (hidden, 4 * hidden),
        }
    shapes["ln_f.weight"] = (hidden,)
    made = []
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        whole = 2 * count
        if len(shape) == 1:
            residency, reason = "replicated", "below persistence_threshold (100,000 elements)"
            rest = 4 * count
        else:
            rest = -(-shape[0] // world) * (count // shape[0]) * 4
            late = name.startswith(("h.22.", "h.23."))
            kept = stage < 3 or late
            residency = "kept" if kept else "gathered"
            reason = (
                "kept: backward reads it before anything else needs its memory"
                if late
                else "stage 2 keeps what it gathered"
                if kept
                else GATHERED.format(over=0.3 + whole / 1e9)
            )
        made.append(Parameter(name, shape, "bfloat16", whole, rest, residency, reason))
    return made


def sample(
    layers: int = 24,
    hidden: int = 2048,
    world: int = 8,
    stage: int = 3,
    ops: int = 14,
    ahead: int = 9,
    budget: float | None = 6e9,
    tokens: int = 2048,
    name: str = "",
) -> Plan:
    """ops: operations of one layer in forward; backward has twice as many. ahead: how many
    operations before its use a gather is issued."""
    owned = parameters(layers, hidden, world, stage)
    by_name = {p.name: p for p in owned}
    kinds = ("layer_norm", "mm", "view", "split", "sdpa", "mm", "add", "layer_norm", "mm", "gelu",
             "mm", "add", "view", "permute")  # fmt: skip
    nodes: dict[str, list[str]] = {"forward": ["embedding"], "backward": ["nll_loss_backward"]}
    rows: list[Collective] = []
    counts = {"forward": 0, "backward": 0}  # of gathers: keys are numbered per graph
    uses: list[tuple[str, int, int, tuple[str, ...]]] = []
    grads: list[tuple[int, tuple[str, ...]]] = []
    for direction, factor in (("forward", 1), ("backward", 2)):
        order = range(layers) if direction == "forward" else reversed(range(layers))
        for layer in order:
            first = len(nodes[direction])
            nodes[direction] += [
                f"{kinds[i % len(kinds)]}_{'b' if factor == 2 else ''}{layer}_{i}"
                for i in range(ops * factor)
            ]
            attn = (f"h.{layer}.attn.qkv.weight", f"h.{layer}.attn.proj.weight")
            mlp = (f"h.{layer}.mlp.fc.weight", f"h.{layer}.mlp.proj.weight")
            half, last = first + ops * factor // 2, first + ops * factor - 1
            groups = [(first, half - 1, attn), (half, last, mlp)]
            if direction == "backward":
                groups = [(first, half - 1, mlp), (half, last, attn)]
                grads += [(half, mlp), (last, attn)]
            uses += [(direction, a, b, names) for a, b, names in groups]
    end = len(nodes["backward"])
    for direction, first, last, names in uses:
        if direction == "backward" and by_name[names[0]].residency == "kept":
            continue
        whole = sum(by_name[n].bytes for n in names)
        issue = max(0, first - ahead)
        kept = by_name[names[0]].residency == "kept"
        hidden_for = 2.0 * ahead / 10
        rows.append(
            Collective(
                f"gather.{counts[direction]}",
                direction,
                "all-gather",
                names,
                "bfloat16",
                whole,
                whole * (world - 1) // world,
                "all_gather_into_tensor",
                nodes[direction][issue],
                nodes[direction][first],
                "" if kept else nodes[direction][last],
                EARLY.format(n=first - issue, ms=hidden_for) if first > issue + 2 else LATE,
            )
        )
        counts[direction] += 1
    for number, (ready, names) in enumerate(grads):
        whole = 2 * sum(by_name[n].bytes for n in names)
        wait = ready + 2 * ahead
        rows.append(
            Collective(
                f"reduce.{number}",
                "backward",
                "reduce-scatter",
                names,
                "float32",
                whole,
                whole * (world - 1) // world,
                "reduce_scatter_tensor",
                nodes["backward"][ready],
                nodes["backward"][wait] if wait < end else "",
                "",
                "issued as soon as its last gradient exists: its memory goes back the earliest",
            )
        )
    small = tuple(p.name for p in owned if p.residency == "replicated")
    whole = 2 * sum(by_name[n].bytes for n in small)
    rows.append(
        Collective(
            "all_reduce.0",
            "backward",
            "all-reduce",
            small,
            "float32",
            whole,
            2 * whole * (world - 1) // world,
            "all_reduce",
            "",
            "",
            "",
            "one bucket of every replicated gradient: latency, not bytes, is what it costs",
        )
    )
    place = {
        d: {n: i for i, n in enumerate(names)} | {"": len(names)} for d, names in nodes.items()
    }
    rows.sort(key=lambda r: (r.graph != "forward", place[r.graph][r.issue]))
    made = Plan(
        name or f"gpt-{layers}x{hidden}, stage {stage}",
        world,
        "NVIDIA H100 SXM",
        tuple(Graph(d, tuple(names)) for d, names in nodes.items()),
        tuple(owned),
        tuple(rows),
        None,
        int(budget) if budget else None,
        (
            "compute: roofline of an H100 SXM, 989 TFLOP/s bf16, 3.35 TB/s, efficiency 0.6",
            "links: 40.0 GB/s per rank, 40 us, not measured",
        ),
        ("prefetch stops at the budget: 4 gathers could stand earlier with 0.8 GB more",),
        "3f9a1c77",
    )
    return dataclasses.replace(made, timeline=simulate(made, hidden, tokens))


def simulate(
    plan: Plan, hidden: int, tokens: int = 2048, jitter: float = 0.0, source: str = "simulated"
) -> Timeline:
    """A small replay: enough for timelines that hang together."""
    rng = random.Random(7)
    noise = (lambda: 1 + jitter * (2 * rng.random() - 0.7)) if jitter else (lambda: 1.0)
    rest = sum(p.shard_bytes for p in plan.parameters)
    live = dict.fromkeys(CATEGORIES, 0) | {"parameters": rest, "optimizer": 2 * rest}
    times: list[float] = []
    curves: dict[str, list[int]] = {name: [] for name in CATEGORIES}
    events: list[Event] = []
    exposed: dict[str, float] = {}
    now = compute = 0.0
    free = {"gather": 0.0, "reduce": 0.0}
    ends: dict[str, float] = {}
    peak = (0, 0.0, "")

    def note(at: float, node: str) -> None:
        nonlocal peak
        if times and at <= times[-1]:
            at = times[-1]
            for name in CATEGORIES:
                curves[name][-1] = max(curves[name][-1], live[name])
        else:
            times.append(at)
            for name in CATEGORIES:
                curves[name].append(live[name])
        total = sum(curves[name][-1] for name in CATEGORIES)
        if total > peak[0]:
            peak = (total, at, node)

    for graph in plan.graphs:
        rows = plan.of(graph.direction)
        at: dict[str, list[tuple[str, Collective]]] = {}
        for row in rows:
            at.setdefault(row.issue, []).append(("issue", row))
        for row in rows:
            at.setdefault(row.wait, []).append(("wait", row))
        releases: dict[str, list[Collective]] = {}
        for row in rows:
            if row.release:
                releases.setdefault(row.release, []).append(row)
        begun, first, last = now, "", ""
        step = tokens * hidden * 2 * (1 if graph.direction == "forward" else -0.5)
        per_op = 24 * tokens * hidden**2 / FLOPS / 14

        for node in (*graph.nodes, ""):
            for what, row in at.get(node, ()):
                flush(events, graph.direction, first, last, begun, now)
                first = ""
                key, lane = f"{graph.direction}/{row.key}", KINDS[row.kind]
                if what == "issue":
                    spent = 8e-6 * noise()
                    events.append(
                        Event(
                            "compute",
                            "issue",
                            f"issue {row.key}",
                            graph.direction,
                            now,
                            now + spent,
                            row.key,
                        )
                    )
                    now += spent
                    begin = max(now, free[lane])
                    end = begin + (LATENCY + row.sent / BANDWIDTH) * noise()
                    free[lane] = ends[key] = end
                    events.append(
                        Event(
                            lane,
                            "transfer",
                            f"transfer {row.key}",
                            graph.direction,
                            begin,
                            end,
                            row.key,
                        )
                    )
                    live["communication"] += row.bytes // plan.world
                    live["gathered" if lane == "gather" else "gradients"] += row.bytes
                    note(now, node)
                    continue
                if ends[key] > now:
                    events.append(
                        Event(
                            "compute",
                            "wait",
                            f"wait {row.key}",
                            graph.direction,
                            now,
                            ends[key],
                            row.key,
                        )
                    )
                    exposed[key] = ends[key] - now
                    now = ends[key]
                live["communication"] -= row.bytes // plan.world
                if lane == "reduce":
                    live["gradients"] -= row.bytes - row.bytes // plan.world
                    spent = 5e-6 * noise()
                    events.append(
                        Event(
                            "compute",
                            "finish",
                            f"finish {row.key}",
                            graph.direction,
                            now,
                            now + spent,
                            row.key,
                        )
                    )
                    now += spent
                note(now, node)
            if not node:
                break
            if not first:
                begun, first = now, node
            last = node
            spent = per_op * noise() * (2.2 if node.startswith("mm") else 0.25)
            live["workspace"] = tokens * hidden * 4 if node.startswith(("mm", "sdpa")) else 0
            live["activations"] = max(0, live["activations"] + int(step))
            note(now, node)
            now, compute = now + spent, compute + spent
            for row in releases.get(node, ()):
                live["gathered"] -= row.bytes
            live["workspace"] = 0
            note(now, node)
        flush(events, graph.direction, first, last, begun, now)
        if graph.direction == "backward":
            live["gathered"] = 0
    note(now, "")
    moved = {lane: sum(e.end - e.start for e in events if e.lane == lane) for lane in free}
    return Timeline(
        source,
        now,
        compute,
        sum(moved.values()),
        sum(exposed.values()),
        max(compute, *moved.values()),
        peak[0],
        peak[1],
        peak[2],
        exposed,
        tuple(sorted(events, key=lambda e: (e.start, e.end))),
        Memory(tuple(times), {name: tuple(curve) for name, curve in curves.items()}),
    )


def flush(events: list[Event], graph: str, first: str, last: str, begun: float, now: float) -> None:
    if first and now > begun:
        span = first if first == last else f"{first} .. {last}"
        events.append(Event("compute", "compute", span, graph, begun, now))


def measured(plan: Plan, hidden: int = 2048, tokens: int = 2048) -> Plan:
    timeline = simulate(plan, hidden, tokens, jitter=0.12, source="measured")
    return dataclasses.replace(plan, timeline=timeline)


def large() -> Plan:
    return sample(layers=133, hidden=4096, world=256, ops=25, budget=62e9, name="gpt-133x4096")
