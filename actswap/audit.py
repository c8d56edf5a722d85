"""What ran: operator streams, and how often each site ran and on what."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from actswap.classes import MethodEdit, unwrapped
from actswap.dataflow import position_in
from actswap.running import Inputs, call, marked, tensors, undisturbed
from actswap.sites import AttributePlace, CallPlace, ModulePlace, Site
from actswap.source import Position, codes


@dataclass(frozen=True)
class Op:
    """One ATen operator that ran.

    Args:
        name: `aten.relu.default`.
        given, gave: shape, dtype and device of each tensor.
        site: the path of the site it belongs to, where it ran inside one.
        where: the path of the innermost module that ran it.
        source: the nearest line of code outside torch.
    """

    name: str
    given: tuple[str, ...]
    gave: tuple[str, ...]
    site: str | None = None
    where: str = ""
    source: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What two streams are compared by."""
        return self.name, self.given, self.gave


def _described(tree: Any) -> tuple[str, ...]:
    return tuple(f"{tuple(t.shape)} {str(t.dtype)[6:]} {t.device}" for t in tensors(tree))


class Recorder(TorchDispatchMode):
    """Records every ATen operator; `within` is the site that is running, if one is."""

    def __init__(self, modules: Mapping[nn.Module, str], sources: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.within: str | None = None
        self.modules, self.sources = modules, sources
        self.stack: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _described((args, kwargs))
        out = func(*args, **(kwargs or {}))
        where = self.stack[-1] if self.stack else ""
        source = _user_line() if self.sources and self.within is None else ""
        self.ops.append(Op(str(func), given, _described(out), self.within, where, source))
        return out

    @contextlib.contextmanager
    def watching(self, sites: Mapping[nn.Module, str]) -> Iterator[None]:
        """Know which module runs, and which of these modules are sites."""
        before = torch.nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = torch.nn.modules.module.register_module_forward_hook(self._leave, always_call=True)
        try:
            with marked(sites, self._marked):
                yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.stack.append(self.modules.get(module, ""))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()

    @contextlib.contextmanager
    def _marked(self, path: str) -> Iterator[None]:
        outer, self.within = self.within, path
        try:
            yield
        finally:
            self.within = outer


def _user_line() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] not in ("torch", "actswap"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return ""


def stream(
    model: nn.Module, example_inputs: Inputs, paths: Mapping[nn.Module, str], sites: Mapping[nn.Module, str]
) -> list[Op]:
    """The operators of one forward on fake tensors: no memory and no arithmetic, whatever the size of the model.

    Raises:
        Exception: what the model raises on fake tensors, where its code depends on values.
    """
    mode = _fake_mode(model, example_inputs)
    recorder = Recorder(paths, sources=True)
    with undisturbed(model), torch.no_grad(), mode:
        args = pytree.tree_map(lambda v: _fake(mode, v), example_inputs)
        state = {name: _fake(mode, t) for name, t in (*model.named_parameters(), *model.named_buffers())}
        with recorder.watching(sites), recorder:
            call(model, state, args)
    return recorder.ops


def _fake_mode(model: nn.Module, example_inputs: Inputs) -> FakeTensorMode:
    """The mode that a model made of fake tensors belongs to, else a new one."""
    for tensor in (*model.parameters(), *model.buffers(), *tensors(example_inputs)):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
        return value
    return mode.from_tensor(value.detach(), static_shapes=True)


@dataclass
class Observation:
    """What one site did during a forward."""

    calls: int = 0
    elements: int = 0
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    def add(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Count one call."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self.calls += 1
                self.elements += value.numel()
                self.device, self.dtype = value.device, value.dtype
                return


class _Calls(TorchFunctionMode):
    """Counts the calls in Python code, each at its place in the source and by the instance that ran it."""

    def __init__(self, by_code: dict[CodeType, list[tuple[Position, nn.Module, Observation]]]) -> None:
        super().__init__()
        self.by_code = by_code

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for frame in _frames(sys._getframe(1), 8):
            if entries := self.by_code.get(frame.f_code):
                self._count(entries, frame, args, kwargs or {})
                break
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _count(entries: Any, frame: FrameType, args: Any, kwargs: Any) -> None:
        position = position_in(frame)
        here = {owner: observation for at, owner, observation in entries if at == position}
        for caller in _frames(frame, 12):  # a helper does not hold the owner; the method that called it does
            for value in caller.f_locals.values():
                if isinstance(value, nn.Module) and value in here:
                    here[value].add(args, kwargs)
                    return


def _frames(frame: FrameType | None, depth: int) -> Iterator[FrameType]:
    while frame is not None and depth:
        yield frame
        frame, depth = frame.f_back, depth - 1


@contextlib.contextmanager
def observing(sites: Sequence[Site]) -> Iterator[dict[Site, Observation]]:
    """Count, per site, what the forward passes run inside the block do. Nodes of a graph are not observed."""
    seen: dict[Site, Observation] = {}
    by_code: dict[CodeType, list[tuple[Position, nn.Module, Observation]]] = {}
    by_module: dict[nn.Module, list[Observation]] = {}
    with contextlib.ExitStack() as stack:
        for site in sites:
            owner, observation = site.owner, Observation()
            assert owner is not None
            if isinstance(site.place, ModulePlace):
                by_module.setdefault(owner._modules[site.place.key], []).append(observation)  # type: ignore[arg-type]
            elif isinstance(site.place, CallPlace):
                for code in _live_codes(owner, site.place.edits[0]):
                    by_code.setdefault(code, []).append((site.place.call.position, owner, observation))
            elif isinstance(site.place, AttributePlace):
                if isinstance(module := site.place.read(owner), nn.Module):
                    by_module.setdefault(module, []).append(observation)
                else:
                    stack.enter_context(_counted(owner, site.place, observation))
            else:
                continue
            seen[site] = observation
        for module, observations in by_module.items():
            stack.callback(module.register_forward_pre_hook(_counter(observations), with_kwargs=True).remove)
        if by_code:
            stack.enter_context(_Calls(by_code))
        yield seen


def _live_codes(owner: nn.Module, edit: MethodEdit) -> Iterator[CodeType]:
    """The code objects that a call may run from: its function's, in every class of the owner that defines it."""
    attributes = [vars(cls).get(edit.name) for cls in type(owner).__mro__]
    for function in map(unwrapped, [*attributes, edit.helper]):
        if function is not None:
            yield from codes(function.__code__)


def _counter(observations: list[Observation]) -> Callable[..., None]:
    def count(module: nn.Module, args: Any, kwargs: Any) -> None:
        for observation in observations:
            observation.add(args, kwargs)

    return count


@contextlib.contextmanager
def _counted(owner: nn.Module, place: AttributePlace, observation: Observation) -> Iterator[None]:
    function, name = place.read(owner), place.name
    before = vars(owner).get(name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        observation.add(args, kwargs)
        return function(*args, **kwargs)

    vars(owner)[name] = place.holding(getattr(owner, name), counted)
    try:
        yield
    finally:
        if before is None:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before
