"""verify: the rules of the dialect, as a list of checks that run between passes.

Each rule is a generator of complaints about a graph. Valid IR in, valid IR out: the first complaint
after a pass is that pass's fault, and the error names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import fx

from zcompile.dialect import (
    ALL_REDUCE_FINISH,
    ALL_REDUCE_START,
    GATHER_START,
    REDUCE_FINISH,
    REDUCE_START,
    RELEASE,
    UNSHARD,
    WAIT,
)
from zcompile.errors import GraphError
from zcompile.passes.graph import aliases, calls, item_users

Rule = Callable[[fx.Graph], Iterator[str]]


def verify(gm: fx.GraphModule, behind: str) -> None:
    """Check every rule. `behind`: the name of the pass that gave this graph.

    Raises:
        GraphError: names the pass, the rule that was broken, the node and its neighbourhood.
    """
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise GraphError(f"pass {behind!r} left an ill-formed graph: {error}") from error
    for rule in RULES:
        for complaint in rule(gm.graph):
            raise GraphError(f"pass {behind!r} broke the rule {rule.__name__!r}: {complaint}")


def each_start_has_one_finish(graph: fx.Graph) -> Iterator[str]:
    for start in calls(graph, GATHER_START, REDUCE_START, ALL_REDUCE_START):
        finishes = _finishes(start)
        if len(finishes) != 1:
            yield f"{start.format_node()} is awaited {len(finishes)} times, must be once"


def gathered_values_are_used_after_the_wait(graph: fx.Graph) -> Iterator[str]:
    for start in calls(graph, GATHER_START):
        (wait,) = _finishes(start)[:1] or (None,)
        if wait is None:
            continue
        for full in item_users(start):
            views = aliases(full)
            # A view made early reads nothing; its users are checked by themselves.
            for use in {u for view in views for u in view.users} - views - {wait}:
                if use < wait:
                    yield f"{use.format_node()} reads {full.name} before {wait.format_node()}"


def nothing_is_used_after_its_release(graph: fx.Graph) -> Iterator[str]:
    for release in calls(graph, RELEASE):
        for full in release.args[0]:
            for alias in aliases(full):
                for use in alias.users:
                    if use > release:
                        yield f"{use.format_node()} uses {full} after {release.format_node()}"


def keys_are_unique(graph: fx.Graph) -> Iterator[str]:
    seen: set[object] = set()
    for start in calls(graph, GATHER_START, REDUCE_START, ALL_REDUCE_START):
        key = _key(start)
        if key in seen:
            yield f"two collectives in flight have the key {key!r}"
        seen.add(key)


def gathered_shapes_are_whole(graph: fx.Graph) -> Iterator[str]:
    for node in calls(graph, UNSHARD):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            if value.shape[0] != node.args[1]:
                yield f"{node.format_node()} has {value.shape[0]} rows, must have {node.args[1]}"
            if value.dtype != node.args[2]:
                yield f"{node.format_node()} has dtype {value.dtype}, must have {node.args[2]}"


def a_wait_covers_its_whole_bucket(graph: fx.Graph) -> Iterator[str]:
    for start in calls(graph, GATHER_START):
        wholes = item_users(start)
        for wait in _finishes(start):
            if set(wait.args[0]) != set(wholes):
                yield f"{wait.format_node()} does not await every parameter of {start.name}"


def received_parts_are_read_only_when_complete(graph: fx.Graph) -> Iterator[str]:
    for start in calls(graph, REDUCE_START):
        (finish,) = _finishes(start)[:1] or (None,)
        for part in item_users(start):
            for use in part.users:
                if finish is not None and use < finish:
                    yield f"{use.format_node()} reads {part.name} before {finish.format_node()}"


def every_shard_has_its_rows(graph: fx.Graph) -> Iterator[str]:
    for start in calls(graph, GATHER_START):
        shards, rows, dtype = start.args[:3]
        if len(shards) != len(rows):
            yield f"{start.format_node()} has {len(shards)} shards and {len(rows)} row counts"
            continue
        for full, count in zip(start.meta["val"], rows, strict=True):
            if full.shape[0] != count or full.dtype != dtype:
                found = f"{tuple(full.shape)} {full.dtype}"
                yield f"{start.format_node()} gathers {found}, must have {count} rows of {dtype}"


RULES: tuple[Rule, ...] = (
    keys_are_unique,
    each_start_has_one_finish,
    gathered_values_are_used_after_the_wait,
    nothing_is_used_after_its_release,
    gathered_shapes_are_whole,
    a_wait_covers_its_whole_bucket,
    received_parts_are_read_only_when_complete,
    every_shard_has_its_rows,
)


def _key(start: fx.Node) -> object:
    return start.args[4] if start.target is GATHER_START else start.args[3]


def _finishes(start: fx.Node) -> list[fx.Node]:
    if start.target is ALL_REDUCE_START:
        return [u for u in start.users if u.target is ALL_REDUCE_FINISH]
    # A lowered reduction is awaited like a gather, and its mean is plain arithmetic.
    users = {u for item in item_users(start) for u in item.users}
    return [u for u in users if u.target in (WAIT, REDUCE_FINISH)]
