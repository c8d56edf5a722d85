"""Aliasing: which results in a data flow are memory of their own, and who else sees a tensor that is overwritten."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import fx, nn
from torch.nn.modules import batchnorm, conv, normalization, pooling

from actswap.dataflow import AUGMENTED, DataFlow, function_name

_MAKERS = (
    nn.Linear, conv._ConvNd, batchnorm._NormBase, normalization.LayerNorm, normalization.GroupNorm,
    normalization.RMSNorm, pooling._MaxPoolNd, pooling._AvgPoolNd,
)  # fmt: skip
"""Modules whose result is new memory, also when a subclass calls the same kernels."""

_LAYERS = frozenset(
    cls for cls in vars(nn).values() if isinstance(cls, type) and issubclass(cls, _MAKERS)
)  # fmt: skip

_MAKING = frozenset({
    "linear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "add", "sub", "mul", "div", "truediv",
    "cat", "stack", "matmul", "bmm", "einsum", "embedding", "max_pool2d", "avg_pool2d", "clone",
})  # fmt: skip
"""Functions and methods whose result is new memory."""


def is_new(owner: nn.Module, node: fx.Node) -> bool:
    """Whether a node's result is memory that it made itself."""
    if node.op == "call_module":
        return isinstance(owner.get_submodule(str(node.target)), _MAKERS)
    return node.op in ("call_function", "call_method") and function_name(node) in _MAKING


def _is_kernel(module: nn.Module) -> bool:
    """Whether a module is a layer whose code is PyTorch's own."""
    return any(type(module).forward is cls.forward for cls in type(module).__mro__ if cls in _LAYERS)


def is_private(owner: nn.Module, node: fx.Node) -> bool:
    """Whether nothing but this node sees what it reads, and its own result is used: then it may as well make a copy.

    Walks back to where the memory was made; every value on the way must have one user.
    """
    return bool(node.users) and all(_only(owner, source) for source in node.all_input_nodes)


def _only(owner: nn.Module, node: fx.Node) -> bool:
    if len(node.users) != 1 or node.op in ("placeholder", "get_attr"):
        return False
    return is_new(owner, node) or all(_only(owner, source) for source in _shown(node))


def _shown(node: fx.Node) -> list[fx.Node]:
    """The arguments whose memory a node may show: what it writes into, else any."""
    first = node.args[0] if node.args else None
    return [first] if isinstance(first, fx.Node) and _writes(node, first) else node.all_input_nodes


def result_is_overwritten(flow: DataFlow, owner: nn.Module, nodes: list[fx.Node]) -> bool:
    """Whether an operation in place may write into the result of these nodes; True also where that is not known."""
    return not nodes or any(_Writes(flow, unknown=True).after(owner, node) for node in nodes)


def input_is_overwritten(flow: DataFlow, owner: nn.Module, nodes: list[fx.Node]) -> bool:
    """Whether an operation in place is known to write, later on, into what these nodes read."""
    for node in nodes:
        writes = _Writes(flow, unknown=False)
        for maker in _makers(owner, node.all_input_nodes[:1]):
            if writes.after(owner, maker, since=node):
                return True
    return False


def _makers(owner: nn.Module, nodes: list[fx.Node]) -> Iterator[fx.Node]:
    """The nodes that made the memory which these nodes may show: in the owner's own graph."""
    for node in nodes:
        if node.op in ("placeholder", "get_attr") or is_new(owner, node):
            yield node
        else:
            yield node
            yield from _makers(owner, _shown(node))


class _Writes:
    """A walk over every name that a value has after it was made, in search of a write."""

    def __init__(self, flow: DataFlow, unknown: bool) -> None:
        self.flow, self.unknown = flow, unknown
        self.seen: set[tuple[nn.Module, fx.Node]] = set()

    def after(self, owner: nn.Module, node: fx.Node, since: fx.Node | None = None) -> bool:
        """Whether the value of a node is written to, after another node of its graph where one is given."""
        if (owner, node) in self.seen:
            return False
        self.seen.add((owner, node))
        for user in node.users:
            if since is not None and not since < user:
                continue
            if _writes(user, node) or self._through(owner, user, node, since):
                return True
        return False

    def _through(self, owner: nn.Module, user: fx.Node, node: fx.Node, since: fx.Node | None) -> bool:
        if user.op == "output":
            return self._outside(owner)
        if user.op == "call_module":  # what a layer makes is new, and it may still write into what it is given
            child = owner.get_submodule(str(user.target))
            return not _is_kernel(child) and self._inside(child, user, node)
        return not is_new(owner, user) and self.after(owner, user, since)

    def _outside(self, owner: nn.Module) -> bool:
        if owner is self.flow.root:
            return self.unknown  # the caller has it
        for parent, key in self.flow.parents(owner):
            nodes = self.flow.child_nodes(parent, key)
            if (not nodes and self.unknown) or any(self.after(parent, node) for node in nodes):
                return True
        return False

    def _inside(self, child: nn.Module, call: fx.Node, node: fx.Node) -> bool:
        graph = self.flow.graph(child)
        if graph is None:
            return self.unknown
        arguments = [n for n in graph.nodes if n.op == "placeholder"]
        taken = [a for a, given in zip(arguments, call.args, strict=False) if given is node]
        taken += [a for a in arguments if call.kwargs.get(str(a.target)) is node]
        return (not taken and self.unknown) or any(self.after(child, argument) for argument in taken)


def _writes(user: fx.Node, node: fx.Node) -> bool:
    """Whether a node writes into this one of its arguments."""
    if user.op not in ("call_function", "call_method"):
        return False
    name = function_name(user)
    if user.kwargs.get("out") is node:
        return True
    if not user.args or user.args[0] is not node:
        return False
    by_name = (name.endswith("_") and not name.endswith("__")) or name in (*AUGMENTED, "setitem")
    return by_name or _argument(user, "inplace") is True


def _argument(node: fx.Node, name: str) -> Any:
    """The value of a function's argument, by name or by place."""
    if name in node.kwargs or node.op != "call_function":
        return node.kwargs.get(name)
    try:
        return inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get(name)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # built-ins that do not say
        return None
