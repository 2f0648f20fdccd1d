"""A plan: the communication of one training step, as data over node names.

It prints, saves, loads and compares without a graph and without a process group, and holds nothing
that differs between ranks. docs/plan-schema.md describes its JSON.

Where in a graph something stands is said by the *operation behind it*: `issue="mm_3"` means "issued
right before mm_3"; "" means at the end of the graph. Several at one place: what is issued comes
first, in the order of the rows, then what is awaited.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

VERSION = 2

# What memory is for, in the order in which curves are stacked.
CATEGORIES = (
    "parameters",  # this rank's shards, at rest
    "optimizer",  # its state, at rest
    "gradients",  # this rank's reduced gradients, and whole ones from their making to reduction
    "activations",  # everything else the graphs compute
    "gathered",  # whole parameters
    "communication",  # send and receive buffers of collectives in flight or being filled
    "workspace",  # what one operation needs while it runs
)

# Lanes of a timeline. Those after compute carry transfers.
LANES = ("compute", "gather", "reduce", "h2d", "d2h", "nvme")

KINDS = {"all-gather": "gather", "reduce-scatter": "reduce", "all-reduce": "reduce"}  # -> lane


@dataclass(frozen=True)
class Collective:
    """One row. graph: forward, backward or inference; kind: all-gather, reduce-scatter or
    all-reduce. `bytes` is of the whole values on the wire, `sent` what each rank sends of them,
    padding included (an average where shards are uneven and travel point to point).
    issue, wait: the operation right behind which stands in the graph; release: the last operation
    that reads a gathered parameter, "" where there is none (kept for backward, or not a gather).
    reason: why the planner put it there."""

    key: str
    graph: str
    kind: str
    parameters: tuple[str, ...]
    dtype: str
    bytes: int
    sent: int
    primitive: str
    issue: str
    wait: str
    release: str = ""
    reason: str = ""

    def line(self) -> str:
        """The row as ranks compare it: what is sent, not where in a rank's own graph."""
        return f"{self.kind} {list(self.parameters)} {self.dtype} {self.bytes} B {self.primitive}"


@dataclass(frozen=True)
class Parameter:
    """residency: "gathered" per use, "kept" gathered from forward to backward, "replicated" (whole
    at rest). bytes: whole, as gathered; shard_bytes: at rest on this rank, in its own dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    shard_bytes: int
    residency: str
    reason: str = ""


@dataclass(frozen=True)
class Graph:
    """The operations of one graph, in order: what `issue`, `wait` and `release` refer to."""

    direction: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class Event:
    """Something on a lane, in seconds from the beginning of the step.

    kind: "compute" (operations `name` .. , with nothing of the schedule between them), "issue",
    "wait" (the compute lane stands still; this is exposed communication), "finish" (arithmetic of a
    collective, such as a mean), "transfer" (on the lane of a link). key: of the collective."""

    lane: str
    kind: str
    name: str
    graph: str
    start: float
    end: float
    key: str = ""


@dataclass(frozen=True)
class Memory:
    """Live bytes over time: values[category][i] holds from times[i] to times[i + 1]."""

    times: tuple[float, ...]
    values: Mapping[str, tuple[int, ...]]

    def total(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.values.values())))


@dataclass(frozen=True)
class Timeline:
    """One step, simulated or measured. Seconds and bytes.

    exposed: per "graph/key", how long the compute lane stood still for a collective.
    bound_seconds: max(compute, communication): no schedule of this step is faster."""

    source: str  # "simulated" or "measured"
    seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    bound_seconds: float
    peak_bytes: int
    peak_seconds: float  # when
    peak_node: str  # in which operation
    exposed: Mapping[str, float] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    memory: Memory = field(default_factory=lambda: Memory((), {}))


@dataclass(frozen=True, repr=False)
class Plan:
    """The communication of one step. budget: bytes a rank may use, None where none was stated.
    costs: one line each on what the times come from (device, links, measured or not)."""

    name: str
    world: int
    device: str
    graphs: tuple[Graph, ...]
    parameters: tuple[Parameter, ...]
    collectives: tuple[Collective, ...]
    timeline: Timeline | None = None
    budget: int | None = None
    costs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fingerprint: str = ""  # of the graphs that it was made for

    def __repr__(self) -> str:
        """In one line; zcompile.show.text.text(plan) and to_json() say everything."""
        said = f"{self.world} ranks of {self.device}, {len(self.collectives)} collectives"
        if self.timeline is not None:
            seconds, peak = self.timeline.seconds, self.timeline.peak_bytes
            said += (
                f", {self.timeline.source} step {seconds * 1e3:.2f} ms, peak {peak / 1e6:.1f} MB"
            )
        return f"<plan of {self.name}: {said}>"

    def of(self, graph: str) -> tuple[Collective, ...]:
        return tuple(row for row in self.collectives if row.graph == graph)

    def kept(self) -> frozenset[str]:
        return frozenset(p.name for p in self.parameters if p.residency == "kept")

    def sent(self, kind: str | None = None) -> int:
        """Bytes each rank sends in a step, of all kinds or of one."""
        return sum(row.sent for row in self.collectives if kind in (None, row.kind))

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Raises ValueError for another version of the schema, or a field that is missing, unknown
        or of another type, naming it."""
        raw = json.loads(text)
        version = raw.pop("version", None) if isinstance(raw, dict) else None
        if version != VERSION:
            raise ValueError(f"the plan has schema version {version!r}; this is version {VERSION}")
        if raw.get("timeline") is not None:
            raw["timeline"] = _timeline(raw["timeline"])
        for name, kind in _ROWS.items():
            if name in raw:
                raw[name] = _rows(kind, raw[name], name)
        plan: Plan = _row(Plan, raw, "plan")
        try:
            return _checked().validate_python(dataclasses.asdict(plan))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"{where} is {first['input']!r}: {first['msg']}") from None


@functools.cache
def _checked() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def lines(direction: str, rows: Sequence[Collective]) -> list[str]:
    """What ranks compare before a graph runs. The last says what travels, however it is merged."""
    single = sorted(f"{row.kind} {name}" for row in rows for name in row.parameters)
    digest = hashlib.sha256("\n".join(single).encode()).hexdigest()[:16]
    return [f"{direction} graph", *(row.line() for row in rows), f"all of it: {digest}"]


_ROWS = {"graphs": Graph, "parameters": Parameter, "collectives": Collective}


def _timeline(raw: Any) -> Timeline:
    fields = dict(_object(raw, "timeline"))
    if "events" in fields:
        fields["events"] = _rows(Event, fields["events"], "timeline.events")
    if "memory" in fields:
        memory = _row(Memory, fields["memory"], "timeline.memory")
        curves = _object(memory.values, "timeline.memory.values")
        values = {name: tuple(curve) for name, curve in curves.items()}
        fields["memory"] = Memory(memory.times, values)
    made: Timeline = _row(Timeline, fields, "timeline")
    return made


def _object(raw: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where} is no object")
    return raw


def _rows(kind: Any, raw: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(raw, list):
        raise ValueError(f"{where} is no list")
    return tuple(_row(kind, each, f"{where}[{index}]") for index, each in enumerate(raw))


def _row(kind: Any, raw: Any, where: str) -> Any:
    raw = _object(raw, where)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(raw) - set(fields))
    if unknown:
        raise ValueError(f"{where} has the unknown field {unknown[0]!r}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
