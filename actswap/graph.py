"""Activations in the graph of an fx.GraphModule, and nodes made to do something else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from actswap.patterns import Match, Undetermined, match
from actswap.recognize import Tables

GraphModule = fx.GraphModule


@dataclass(frozen=True)
class GraphCall:
    """An activation in a graph; `blocked` says why it cannot be rewritten."""

    node: str
    match: Match[Any]
    blocked: str | None = None


def in_graph(module: fx.GraphModule, tables: Tables) -> list[GraphCall]:
    """The functions and methods of a GraphModule's graph that are activations; its submodules are modules."""
    found = []
    for node in module.graph.nodes:
        if node.op == "call_function":
            patterns, callee = tables.call(node.target), node.target
        elif node.op == "call_method":
            patterns, callee = tables.methods.get(node.target, []), getattr(Tensor, node.target, None)
        else:
            continue
        try:
            matched = match(patterns, node.args, node.kwargs, _constant(node), callee) if patterns else None
        except Undetermined as problem:
            found.append(GraphCall(node.name, Match(patterns[0].activation, {}, False), str(problem)))
            continue
        if matched is not None:
            blocked = None if isinstance(matched.tensor, fx.Node) else "its input is not a tensor of the graph"
            found.append(GraphCall(node.name, matched, blocked))
    return found


def _constant(node: fx.Node) -> Any:
    def evaluate(value: Any) -> Any:
        if isinstance(value, fx.Node):
            if value.op == "get_attr":
                return value
            raise Undetermined(f"an argument of {node.name} is the result of {value.name}")
        return value

    return evaluate


@dataclass(frozen=True)
class NodeName:
    """Stands for a node in stored arguments, so that they survive a copy of the graph."""

    name: str


@dataclass(frozen=True)
class NodeState:
    """What a node does: enough to put it back."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def node_state(module: fx.GraphModule, name: str) -> NodeState:
    """What a node does now."""
    node = _node(module, name)
    return NodeState(node.op, node.target, _named(node.args), _named(node.kwargs))


def set_node(module: fx.GraphModule, name: str, state: NodeState) -> None:
    """Make a node do something else, and regenerate the module's code."""
    nodes = {node.name: node for node in module.graph.nodes}
    node = nodes[name]
    node.op, node.target = state.op, state.target
    node.args, node.kwargs = _nodes(state.args, nodes), _nodes(state.kwargs, nodes)
    module.recompile()


def slot_state(module: fx.GraphModule, name: str, slot: str) -> NodeState:
    """A node as a call of a slot on the tensor that it takes now."""
    node = _node(module, name)
    first = node.args[0] if node.args else next(iter(node.kwargs.values()))
    return NodeState("call_module", slot, (_named(first),), {})


def _node(module: fx.GraphModule, name: str) -> fx.Node:
    found: fx.Node = next(node for node in module.graph.nodes if node.name == name)
    return found


def _named(value: Any) -> Any:
    mapped: Any = lambda v: NodeName(v.name) if isinstance(v, fx.Node) else v  # noqa: E731
    return fx.node.map_aggregate(value, mapped)


def _nodes(value: Any, nodes: dict[str, fx.Node]) -> Any:
    return fx.node.map_aggregate(value, lambda v: nodes[v.name] if isinstance(v, NodeName) else v)
