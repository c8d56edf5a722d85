"""DataFlow: what feeds a site and what follows it, from shallow torch.fx traces."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from actswap.source import Position

Node = fx.Node
Role = Literal["hidden", "gate", "output", "unknown"]

_CALL_SITE = "actswap_call_site"
_GATES = frozenset({"sigmoid", "hardsigmoid", "tanh"})
_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d", "einsum"})
_PRODUCTS |= {f"conv_transpose{n}d" for n in (1, 2, 3)} | {
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
}


@contextlib.contextmanager
def attributes_kept(modules: list[nn.Module]) -> Iterator[None]:
    """Put back, on exit, every plain attribute of the modules that the code run inside changed.

    The contents of dicts, lists and sets in attributes come back too: models keep caches there.
    """
    before = [(vars(module), dict(vars(module))) for module in modules]
    contents: dict[int, tuple[Any, Any]] = {}
    for _, kept in before:
        for name, value in kept.items():
            if name not in _REGISTRIES:
                _remember(value, contents)
    try:
        yield
    finally:
        for now, kept in before:
            if now.keys() != kept.keys() or any(now[name] is not value for name, value in kept.items()):
                now.clear()
                now.update(kept)
        for container, kept in contents.values():
            if not _same_items(container, kept):
                container.clear()
                container.extend(kept) if isinstance(container, list) else container.update(kept)


_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}


def _remember(value: Any, contents: dict[int, tuple[Any, Any]]) -> None:
    """Note the items of a container and of the containers in it."""
    if not isinstance(value, (dict, list, set)) or id(value) in contents:
        return
    contents[id(value)] = value, copy.copy(value)
    for item in value.values() if isinstance(value, dict) else value:
        _remember(item, contents)


def _same_items(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    if isinstance(a, set):
        return bool(a == b)
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


class _TensorsKept(TorchDispatchMode):
    """Whatever would write into a tensor that was there before writes into a copy of it.

    A trace runs a model's code: what that does to symbolic values is recorded, and what it does to buffers is done.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[int, Tensor] = {}  # by the address of the storage; holding them, so that no address comes twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func._schema.is_mutable:
            args = list(args)
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                if place < len(args):
                    args[place] = self._copied(args[place])
                elif argument.name in kwargs:
                    kwargs[argument.name] = self._copied(kwargs[argument.name])
        out = func(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._note(tensor)
        return out

    def _copied(self, value: Any) -> Any:
        return pytree.tree_map_only(Tensor, self._note_copy, value)

    def _note_copy(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.untyped_storage()._cdata in self.made else self._note(tensor.clone())

    def _note(self, tensor: Tensor) -> Tensor:
        self.made.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor


@contextlib.contextmanager
def tensors_kept() -> Iterator[None]:
    """Let no operation change a tensor that was there before, nor its version counter."""
    versions = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # here the counters are raised
    with torch._C._ExcludeDispatchKeyGuard(versions), _TensorsKept():
        yield


class _Proxy(fx.Proxy):
    """A symbolic value on which `x += y` and `x[i] = y` are seen as what they are: fx takes the first for `x + y`."""

    def __setitem__(self, place: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, place, value), {})


def _augmented(function: Any) -> Any:
    def method(self: _Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


AUGMENTED = ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor")
for _name in AUGMENTED:
    setattr(_Proxy, f"__{_name}__", _augmented(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    """Traces one module with its children as leaves, and notes for each node where in the source it was called."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta[_CALL_SITE] = tuple(_callers(sys._getframe(1)))
        return node


def _callers(frame: FrameType | None, depth: int = 12) -> Iterator[tuple[str, Position]]:
    while frame is not None and depth:
        yield frame.f_code.co_filename, position_in(frame)
        frame, depth = frame.f_back, depth - 1


def position_in(frame: FrameType) -> Position:
    """The position of the expression that a frame is evaluating."""
    positions = _positions(frame.f_code)
    index = frame.f_lasti // 2
    return positions[index] if 0 <= index < len(positions) else Position(0, 0, 0, 0)


@functools.lru_cache(maxsize=4096)
def _positions(code: CodeType) -> list[Position]:
    """The position of every instruction."""
    return [Position(*(part or 0 for part in (a, b, c, d))) for a, b, c, d in code.co_positions()]


class DataFlow:
    """What feeds a site and what follows it, from shallow traces of the owners above it; traces are made on demand.

    A module that cannot be traced has no data flow: what is asked about it is unknown.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root = root
        self._graphs: dict[nn.Module, fx.Graph | None] = {}
        self._parents: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
        for parent in root.modules():
            for key, child in parent._modules.items():
                if child is not None:
                    self._parents.setdefault(child, []).append((parent, key))

    def graph(self, owner: nn.Module) -> fx.Graph | None:
        """The owner's own data flow, its children as leaves; None when it cannot be traced."""
        if isinstance(owner, fx.GraphModule):
            return owner.graph
        if owner not in self._graphs:
            with attributes_kept([owner]), torch.random.fork_rng(devices=[]), torch.no_grad(), tensors_kept():
                try:
                    self._graphs[owner] = _Tracer().trace(owner)
                except Exception:  # anything may go wrong in a model's code under symbolic values: then it is unknown
                    self._graphs[owner] = None
        return self._graphs[owner]

    def parents(self, module: nn.Module) -> list[tuple[nn.Module, str]]:
        """The modules that have this one as a child, and its name there."""
        return self._parents.get(module, [])

    def child_nodes(self, parent: nn.Module, key: str) -> list[fx.Node]:
        """The nodes in the parent's graph that call one of its children."""
        graph = self.graph(parent)
        child = parent._modules.get(key)
        keys = {k for k, module in parent._modules.items() if module is child}  # a trace knows one name per instance
        nodes = graph.nodes if graph is not None else ()
        found = [node for node in nodes if node.op == "call_module" and node.target in keys]
        if type(parent).forward is nn.Sequential.forward:  # runs its children in order: each use is known
            same = [k for k, module in parent._modules.items() if module is child]
            return found[same.index(key) : same.index(key) + 1]
        return found

    def call_nodes(self, owner: nn.Module, position: Position, filename: str) -> list[fx.Node]:
        """The nodes made by the call expression at a position of a source file."""
        graph = self.graph(owner)
        nodes = graph.nodes if graph is not None else ()
        return [node for node in nodes if (filename, position) in node.meta.get(_CALL_SITE, ())]

    def attribute_nodes(self, owner: nn.Module, name: str) -> list[fx.Node]:
        """The nodes made by calls of a stored callable: it cannot be told from others, so there are none."""
        return []

    def role(self, owner: nn.Module, nodes: list[fx.Node], activation: str) -> Role:
        """What the result at these nodes is for; the nodes must agree."""
        roles = {_strongest(self._follow(owner, node, activation, set())) for node in nodes}
        return roles.pop() if len(roles) == 1 else "unknown"

    def _follow(self, owner: nn.Module, node: fx.Node, activation: str, seen: set[fx.Node]) -> set[Role]:
        """Walk the users of a node until each path has met a layer, a product of two tensors, or the output."""
        found: set[Role] = set()
        for user in _users(node):
            if user in seen:
                continue
            seen.add(user)
            name = function_name(user)
            if user.op == "output":
                found |= self._outside(owner, activation)
            elif user.op == "call_module":
                child = owner.get_submodule(str(user.target))
                parametric = next(child.parameters(), None) is not None
                found |= {"hidden"} if parametric else self._follow(owner, user, activation, seen)
            elif name in _PRODUCTS or _has_parameter(user):
                found.add("hidden")
            elif name in ("mul", "mul_", "imul") and activation in _GATES and _two_tensors(user):
                found.add("gate")
            else:
                found |= self._follow(owner, user, activation, seen)
        return found

    def _outside(self, owner: nn.Module, activation: str) -> set[Role]:
        """The roles of an owner's result."""
        if owner is self.root:
            return {"output"}
        found: set[Role] = set()
        for parent, key in self.parents(owner):
            nodes = self.child_nodes(parent, key)
            for node in nodes:
                found |= self._follow(parent, node, activation, set())
            if not nodes:
                found.add("unknown")
        return found

    def feeding(self, owner: nn.Module, nodes: list[fx.Node]) -> list[Tensor]:
        """One parameter of each layer that feeds these nodes; empty when none is known."""
        found: list[Tensor] = []
        for node in nodes:
            self._back(owner, node, found, set())
        return found

    def _back(self, owner: nn.Module, node: fx.Node, found: list[Tensor], seen: set[fx.Node]) -> None:
        for source in node.all_input_nodes:
            if source in seen:
                continue
            seen.add(source)
            parameter = None
            if source.op == "call_module":
                parameter = _last_parameter(owner.get_submodule(str(source.target)))
            elif source.op == "get_attr":
                value: Any = owner
                for part in str(source.target).split("."):
                    value = getattr(value, part, None)
                parameter = value if isinstance(value, Tensor) else None
            elif source.op == "placeholder":
                for parent, key in self.parents(owner):
                    for call in self.child_nodes(parent, key):
                        self._back(parent, call, found, set())
            if parameter is not None:
                found.append(parameter)
            else:
                self._back(owner, source, found, seen)


def _strongest(roles: set[Role]) -> Role:
    """One use that trains through a layer makes a result hidden, whatever its other uses."""
    order: tuple[Role, ...] = ("gate", "hidden", "unknown", "output")
    return next((role for role in order if role in roles), "unknown")


def _users(node: fx.Node) -> list[fx.Node]:
    """What uses a node's result; of a call in place whose value is dropped, what uses its input afterwards."""
    if node.users or not node.all_input_nodes:
        return list(node.users)
    later = list(node.graph.nodes)
    position = later.index(node)
    return [user for user in node.all_input_nodes[0].users if later.index(user) > position]


def _last_parameter(module: nn.Module) -> Tensor | None:
    """The parameter whose device a module's result is on: the last one's, where a module spans devices."""
    parameter = None
    for parameter in module.parameters():  # noqa: B007
        pass
    return parameter


def function_name(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))


def _has_parameter(node: fx.Node) -> bool:
    return function_name(node) in ("mul", "matmul") and any(n.op == "get_attr" for n in node.all_input_nodes)


def _two_tensors(node: fx.Node) -> bool:
    return len(node.all_input_nodes) == 2
