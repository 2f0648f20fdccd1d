"""What several passes ask of an FX graph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from zcompile._torch import OpOverload, enclosing_fake_mode, make_fx, select_decomp_table


def calls(graph: fx.Graph, *targets: Any) -> list[fx.Node]:
    """The nodes that call one of `targets`, in order."""
    wanted = set(targets)
    return [n for n in graph.nodes if n.op == "call_function" and n.target in wanted]


def first_user(node: fx.Node) -> fx.Node:
    """The user that comes first in the graph. (Nodes of one graph compare by position.)"""
    return min(node.users)


def is_view(node: fx.Node, of: fx.Node) -> bool:
    """Whether `node` may share memory with its argument `of`: read off the schema, not a list of
    names. What has no schema is taken to share."""
    if node.op == "output":
        return False
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, OpOverload):
        return True
    schema = node.target._schema
    results = [r.alias_info for r in schema.returns if r.alias_info is not None]
    if not results:
        return False
    # A list of views names no set of its own; its source is the argument marked as going anywhere.
    shared = set[str]().union(*(info.before_set for info in results))
    lists = any(not info.before_set for info in results)
    for argument, value in zip(schema.arguments, node.args):
        if value is of and argument.alias_info is not None:
            sets = argument.alias_info.before_set
            if shared & set(sets) or (lists and "*" in argument.alias_info.after_set):
                return True
    return False


def aliases(node: fx.Node) -> set[fx.Node]:
    """`node` and every node that may be a view of it, through any chain."""
    found, queue = {node}, [node]
    while queue:
        current = queue.pop()
        for user in current.users:
            if user not in found and is_view(user, current):
                found.add(user)
                queue.append(user)
    return found


def trivial_source(node: fx.Node) -> fx.Node:
    """Skip views that change nothing: `to_local` leaves one between a shard and its use."""
    same = (torch.ops.aten.view.default, torch.ops.aten.alias.default)
    while node.op == "call_function" and node.target in same:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if shape_of(source) != shape_of(node) or shape_of(node) is None:
            break
        node = source
    return node


def returned_as(node: fx.Node) -> fx.Node | None:
    """The node that the graph returns for `node`: itself, or a view of it that changes nothing.
    None where anything else reads it."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.op == "output":
            return node
        if trivial_source(user) is not trivial_source(node):
            return None
        node = user
    return None


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def size_of(node: fx.Node) -> int:
    """Bytes of what a node gives, with symbolic sizes as they were when the graph was made."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return sum(
        math.prod(hint(n) for n in v.shape) * v.element_size()
        for v in values
        if isinstance(v, torch.Tensor)
    )


def hint(size: Any) -> int:
    """A size, or a symbolic one as it was when the graph was made."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def nbytes(value: torch.Tensor) -> int:
    return value.numel() * value.element_size()


def add(graph: fx.Graph, target: Callable[..., Any], args: tuple[Any, ...], val: Any) -> fx.Node:
    """A call with its `val`; a list of values also gets its getitem nodes, see `items`."""
    node = graph.call_function(target, args)
    node.meta["val"] = val
    return node


def items(graph: fx.Graph, node: fx.Node, values: Sequence[Any]) -> list[fx.Node]:
    return [add(graph, operator.getitem, (node, i), value) for i, value in enumerate(values)]


def item_users(node: fx.Node) -> list[fx.Node]:
    """The getitem nodes of a call that returns a list, by index."""
    users = [u for u in node.users if u.target is operator.getitem]
    return sorted(users, key=lambda user: user.args[1])


def inline(graph: fx.Graph, function: Callable[..., Any], args: Sequence[Any]) -> list[fx.Node]:
    """Insert the operations of a plain tensor function at the graph's insertion point.

    args: nodes or lists of nodes, whose fake values the function is traced with. Returns the nodes
    of its result, as a flat list.
    """
    flat, spec = torch.utils._pytree.tree_flatten(list(args))
    values = [n.meta["val"] for n in flat]
    mode = enclosing_fake_mode(*values)

    def flattened(*tensors: Any) -> list[Any]:
        result = function(*torch.utils._pytree.tree_unflatten(list(tensors), spec))
        return list(result) if isinstance(result, (list, tuple)) else [result]

    with mode:
        # Decomposed as Inductor expects what reaches it behind AOTAutograd.
        traced = make_fx(flattened, select_decomp_table())(*values)
    traced.graph.eliminate_dead_code()
    mapping: dict[fx.Node, fx.Node] = {}
    sources = iter(flat)
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            mapping[node] = next(sources)
        elif node.op == "output":
            return [mapping[n] for n in torch.utils._pytree.tree_leaves(node.args[0])]
        else:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
            mapping[node].meta = dict(node.meta)
    raise AssertionError("a traced graph has an output")


def fake_order(graph: fx.Graph) -> torch.Tensor:
    """The traced value of an order token, see dialect.py."""
    values = [n.meta.get("val") for n in graph.nodes if n.op == "placeholder"]
    with enclosing_fake_mode(*values):
        return torch.empty(1, dtype=torch.uint8)
