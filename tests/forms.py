"""Models whose activations are kept, picked or called in ways that no list names; what is found of each.

A model here is a class without arguments. `SITES` lists the paths of the relu sites that are swapped, `BLOCKED` gives,
for each relu site that is refused, a part of the reason.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import operator
import sys
import types
import weakref

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn


class Form(nn.Module):
    """Two layers of 6."""

    SITES: tuple[str, ...] = ()
    BLOCKED: tuple[str, ...] = ()
    PICKLED = True

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)


# --- made anew ---------------------------------------------------------------------------------------------------


class MadeAnew(Form):
    """Modules made in the forward."""

    SITES = ("relu", "relu_1", "relu_2")

    def forward(self, x):
        act = nn.ReLU()
        x = nn.ReLU(inplace=True)(self.first(x))
        return act(nn.ReLU()(self.second(x)) - 0.1)


class MadeFromTheClass(Form):
    """The class of an activation kept in an attribute, and in a table there."""

    BLOCKED = ("from the class kept in act", "from the class kept in table['a']")

    def __init__(self):
        super().__init__()
        self.act, self.table = nn.ReLU, {"a": nn.ReLU, "b": nn.Tanh}

    def forward(self, x):
        return self.table["a"]()(self.act()(self.first(x)) - 0.1)


class MadeElsewhere(Form):
    """A container made in the forward."""

    BLOCKED = ("torch.nn.ReLU() is made here", "nn.ReLU() is made here")

    def forward(self, x):
        return torch.nn.ReLU().forward(nn.Sequential(self.first, nn.ReLU(), self.second)(x))


# --- containers --------------------------------------------------------------------------------------------------


class ListOfModules(Form):
    """A list, a tuple and a dict of modules and functions in plain attributes."""

    SITES = ("acts.0", "acts.1", "pair.0", "table.first")

    def __init__(self):
        super().__init__()
        self.acts = [nn.ReLU(), F.relu]
        self.pair = (F.relu, torch.tanh)
        self.table = {"first": nn.ReLU(), "last": torch.sigmoid}

    def forward(self, x):
        for layer, act in zip((self.first, self.second), self.acts, strict=True):
            x = act(layer(x) + 0.1)
        for act in self.pair:
            x = act(self.first(x))
        return functools.reduce(lambda h, name: self.table[name](h), self.table, self.second(x))


class NestedContainers(Form):
    """Containers in containers."""

    SITES = ("stages.deep.0",)

    def __init__(self):
        super().__init__()
        self.stages = {"deep": [F.relu], "sizes": [1, 2]}

    def forward(self, x):
        return self.second(self.stages["deep"][0](self.first(x)))


class OnTheClass(Form):
    """Containers and modules in class attributes, shared by all instances."""

    SITES = ("act", "acts.0", "acts.1")
    act = nn.ReLU()
    acts = (F.relu, nn.ReLU())

    def forward(self, x):
        return self.acts[1](self.acts[0](self.act(self.first(x)) - 0.1) - 0.1)


class SetOfFunctions(Form):
    """A set: no copy with another item keeps what a set means."""

    BLOCKED = ("kept as acts[0]",)

    def __init__(self):
        super().__init__()
        self.acts = {F.relu}

    def forward(self, x):
        for act in self.acts:
            x = act(self.first(x))
        return x


class AlsoRegistered(Form):
    """One instance, registered and in a list."""

    SITES = ("act", "acts.0")

    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()
        self.acts = [self.act]

    def forward(self, x):
        return self.acts[0](self.second(self.act(self.first(x))))


# --- picked by a key ---------------------------------------------------------------------------------------------


class ByName(Form):
    """A function picked by its name."""

    SITES = ("relu", "relu_1", "relu_2")

    def __init__(self):
        super().__init__()
        self.act_name = "relu"
        self.__private = "relu"

    def forward(self, x):
        x = getattr(F, self.act_name)(self.first(x))
        x = getattr(torch, self.__private, torch.tanh)(x - 0.1)
        return getattr(F, "relu")(self.second(x))  # noqa: B009


TABLE = {"relu": F.relu, "tanh": torch.tanh, "module": nn.ReLU(), "class": nn.ReLU}


class ByTable(Form):
    """Dispatch tables: of the module, in the method, with a default."""

    SITES = ("relu", "relu_1", "relu_2", "relu_3", "relu_4")

    def __init__(self):
        super().__init__()
        self.name = "relu"

    def forward(self, x):
        x = TABLE[self.name](self.first(x))
        x = {"relu": F.relu, "gelu": F.gelu}[self.name](x - 0.1)
        x = TABLE.get("no", F.relu)(x - 0.1)
        x = TABLE["module"](x - 0.1)
        return TABLE["class"]()(self.second(x))


class ByNamespace(Form):
    """A module's namespace as the table."""

    SITES = ("relu", "relu_1", "relu_2", "relu_3")

    def forward(self, x):
        x = vars(F)["relu"](self.first(x))
        x = torch.nn.functional.__dict__["relu"](x - 0.1)
        x = globals()["module_relu"](x - 0.1)
        return sys.modules["torch.nn.functional"].relu(self.second(x))


module_relu = F.relu


class ByRunTimeName(Form):
    """A name that is known only at run time."""

    BLOCKED = ("name picks what is called",)

    def forward(self, x, name="relu"):
        return {"relu": F.relu}[name](self.first(x))


class MethodByName(Form):
    """A tensor's method picked by its name."""

    BLOCKED = ("picks it by its name", "picks it by its name", "picks it by its name", "picks it by its name")

    def __init__(self):
        super().__init__()
        self.name = "relu"

    def forward(self, x):
        x = getattr(self.first(x), "relu")()  # noqa: B009
        x = getattr(self.second(x), self.name)()
        return operator.attrgetter("relu")(F)(operator.methodcaller("relu")(x))


rectify = operator.methodcaller("relu")


class GlobalMethodCaller(Form):
    """A methodcaller of the module."""

    BLOCKED = ("it is called as operator.methodcaller",)

    def forward(self, x):
        return rectify(self.first(x))


class Named(enum.Enum):
    """Activations by name."""

    RELU = functools.partial(F.relu)
    TANH = functools.partial(torch.tanh)


class ByEnum(Form):
    """A member of an enum, picked in the code and at run time."""

    SITES = ("relu",)
    BLOCKED = ("it is inside Named.RELU",)

    def __init__(self):
        super().__init__()
        self.name = "RELU"

    def forward(self, x):
        return Named[self.name].value(self.second(Named.RELU.value(self.first(x))))


# --- callees that are expressions --------------------------------------------------------------------------------


class ConditionalCallee(Form):
    """A ternary, a walrus, an `or`, a starred list and a lambda called at once."""

    BLOCKED = ("passed on as a value",) * 4
    SITES = ("relu_4",)

    def __init__(self):
        super().__init__()
        self.rectifies = True

    def forward(self, x):
        x = (F.relu if self.rectifies else F.gelu)(self.first(x))
        x = (act := F.relu)(x - 0.1)
        x = (None or torch.relu)(x - 0.1)
        x = [*(F.relu,)][-1](act(x) - 0.1)
        return (lambda y: F.relu(y))(self.second(x))


class Matched(Form):
    """A match statement."""

    SITES = ("relu", "relu_1")

    def __init__(self):
        super().__init__()
        self.kind = "a"

    def forward(self, x):
        match self.kind:
            case "a":
                act = F.relu
                x = F.relu(self.first(x))
            case other:
                return other
        return act(self.second(x))


class Reduced(Form):
    """functools.reduce over functions, and a call with starred arguments."""

    BLOCKED = ("holds it", "unpacked with *")

    def forward(self, x):
        steps = [self.first, F.relu, self.second]
        x = functools.reduce(lambda h, step: step(h), steps, x)
        return F.relu(*(x,))


class NamespaceInAttribute(Form):
    """torch.nn.functional kept in an attribute."""

    BLOCKED = ("a module of functions kept in an attribute",)
    PICKLED = False

    def __init__(self):
        super().__init__()
        self.functions = F

    def forward(self, x):
        return self.functions.relu(self.first(x))


# --- functions and objects ---------------------------------------------------------------------------------------


class Defaults(Form):
    """Functions, a module and a class as default arguments."""

    SITES = ("relu_1",)
    BLOCKED = ("which has no place for another", "module is nn.ReLU() by default")

    def forward(self, x, act=F.relu, module=nn.ReLU(), cls=nn.ReLU):  # noqa: B008
        return cls()(act(module(self.first(x))))


class OptionalAct(Form):
    """A function as a default argument, by position and by keyword."""

    SITES = ("relu", "relu_1")

    def forward(self, x, act=F.relu, *, last=torch.relu):
        return last(self.second(act(self.first(x))))


class Static:
    """Functions that belong to a class which is no module."""

    @staticmethod
    def act(x):
        """Relu."""
        return F.relu(x)

    @classmethod
    def other(cls, x):
        """Relu."""
        return cls.act(x)


class StaticElsewhere(Form):
    """A static method of another class is a helper; a class method is bound to that class."""

    SITES = ("relu_1",)
    BLOCKED = ("it is inside Static.other",)

    def forward(self, x):
        return Static.other(self.second(Static.act(self.first(x))))


class PartialMethod(Form):
    """A partialmethod, of a function and with a function."""

    SITES = ("relu_1",)
    BLOCKED = ("kept as apply", "the function kept in the attribute rectified.func")

    def _apply_act(self, act, x):
        return act(x)

    def _rectify(self, x, scale):
        return F.relu(x) * scale

    apply = functools.partialmethod(_apply_act, F.relu)
    rectified = functools.partialmethod(_rectify, scale=2)

    def forward(self, x):
        return self.rectified(self.apply(self.first(x)))


class Helper:
    """An object that is no module, holds an activation and applies one."""

    def __init__(self):
        self.act = nn.ReLU()

    def run(self, x):
        """Relu, twice."""
        return F.relu(self.act(x) - 0.1)


@dataclasses.dataclass
class Callable:
    """A callable dataclass."""

    act: object = F.relu

    def __call__(self, x):
        return self.act(x)


class Objects(Form):
    """Helper objects in attributes."""

    BLOCKED = ("kept as helper.act", "attribute helper.run", "kept as called.act")

    def __init__(self):
        super().__init__()
        self.helper, self.called = Helper(), Callable()

    def forward(self, x):
        return self.called(self.helper.run(self.first(x)))


HELPER, BLOCK = Helper(), nn.Sequential(nn.Linear(6, 6), nn.ReLU())


class GlobalObjects(Form):
    """Helper objects and modules of the file, and objects made in the forward."""

    BLOCKED = ("inside BLOCK", "inside HELPER.act", "inside HELPER, an object", "the Callable that Callable() makes")

    def forward(self, x):
        return Callable()(BLOCK(HELPER.run(self.first(x))))


@functools.singledispatch
def dispatched(x):
    """Depends on the type."""
    return x


@dispatched.register
def _(x: torch.Tensor):
    return F.relu(x)


@functools.lru_cache(maxsize=2)
def cached(x):
    """Relu, remembered."""
    return F.relu(x)


class Wrappers(Form):
    """Functions in wrappers of functools."""

    BLOCKED = ("inside dispatched,", "inside dispatched.registry", "inside cached.__wrapped__")

    def forward(self, x):
        return dispatched(cached(self.first(x)))


class CachedProperty(Form):
    """A cached property, and one that gives an activation."""

    BLOCKED = ("", "torch.relu is passed on")

    @functools.cached_property
    def act(self):
        """The activation."""
        return F.relu

    @property
    def other(self):
        """The activation."""
        return torch.relu

    def forward(self, x):
        return self.other(self.act(self.first(x)))


class Unregistered(Form):
    """A block in a list: no submodule."""

    BLOCKED = ("blocks[0] is no submodule", "blocks[1] is no submodule")

    def __init__(self):
        super().__init__()
        self.blocks = [nn.Sequential(nn.Linear(6, 6), nn.ReLU()), Functional()]

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.first(x)


class Functional(nn.Module):
    """One call."""

    def forward(self, x):
        return F.relu(x)


# --- bound methods and the forward of an instance ---------------------------------------------------------------


class KeptMethod(Form):
    """A bound method in an attribute."""

    BLOCKED = ("keeps rectify as a bound method",)
    SITES = ("relu_1",)

    def __init__(self):
        super().__init__()
        self.run = self.rectify

    def rectify(self, x):
        """Relu."""
        return F.relu(x)

    def forward(self, x):
        return F.relu(self.second(self.run(self.first(x))))


class KeptElsewhere(Form):
    """A method of the parent in a child's attribute."""

    BLOCKED = ("keeps rectify as a bound method",)

    def __init__(self):
        super().__init__()
        self.first.act = self.rectify

    def rectify(self, x):
        """Relu."""
        return F.relu(x)

    def forward(self, x):
        return self.first.act(self.first(x))


class OwnForward(Form):
    """The instance's own forward: its class's, bound."""

    BLOCKED = ("keeps forward as a bound method",)

    def __init__(self):
        super().__init__()
        self.forward = self.forward

    def forward(self, x):
        return F.relu(self.first(x))


def other_forward(self, x):
    """Relu."""
    return torch.relu(self.second(x))


class MethodTypeForward(Form):
    """The instance's own forward: a function of the file, bound."""

    BLOCKED = ("kept in the attribute forward",)

    def __init__(self):
        super().__init__()
        self.forward = types.MethodType(other_forward, self)


class PartialForward(Form):
    """The instance's own forward: a partial."""

    BLOCKED = ("kept in the attribute forward.func",)

    def __init__(self):
        super().__init__()
        self.forward = functools.partial(other_forward, self)


class WrappedForward(Form):
    """The instance's own forward: a closure over the old one."""

    BLOCKED = ("kept in the attribute forward", "inside old", "keeps forward as a bound method")
    PICKLED = False

    def __init__(self):
        super().__init__()
        old = self.forward

        def forward(x):
            return F.relu(old(x))

        self.forward = forward

    def forward(self, x):
        return F.relu(self.first(x))


class OwnsReLU(Form):
    """A ReLU whose instance has another forward."""

    BLOCKED = ("kept in the attribute forward",)
    SITES = ("act.relu_1",)
    PICKLED = False

    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()
        self.act.forward = lambda x: torch.relu(x) * 2

    def forward(self, x):
        return self.act(self.first(x))


class Hooked(Form):
    """Hooks that apply an activation: a function, a bound method, and one on a layer."""

    BLOCKED = (
        "attribute _forward_hooks[",
        "keeps hook as a bound method",
        "attribute _forward_pre_hooks[",
        "attribute _forward_hooks[",
    )
    SITES = ("act",)

    def __init__(self):
        super().__init__()
        self.register_forward_hook(rectifying)
        self.first.register_forward_hook(self.hook)
        self.second.register_forward_pre_hook(functools.partial(pre_rectifying))
        self.act = nn.ReLU()
        self.act.register_forward_hook(rectifying)

    def hook(self, module, args, out):
        """Relu."""
        return F.relu(out)

    def forward(self, x):
        return self.second(self.act(self.first(x)))


def rectifying(module, args, out):
    """A forward hook."""
    return F.relu(out)


def pre_rectifying(module, args):
    """A forward pre-hook."""
    return (F.relu(args[0]),)


class OwnCall(Form):
    """`__call__` overridden."""

    SITES = ("relu",)

    def __call__(self, x):
        return F.relu(super().__call__(x))

    def forward(self, x):
        return self.first(x)


class Rectified(nn.Module):
    """A parametrisation that applies an activation."""

    def forward(self, w):
        return F.relu(w)


class Parametrised(Form):
    """An activation in a parametrisation, beside a spectrally normed layer."""

    SITES = ("relu", "first.parametrizations.weight.0.relu")
    PICKLED = False

    def __init__(self):
        super().__init__()
        nn.utils.parametrize.register_parametrization(self.first, "weight", Rectified())
        self.second = nn.utils.parametrizations.spectral_norm(self.second)

    def forward(self, x):
        return F.relu(self.second(self.first(x)))


class Cycle(Form):
    """References in a circle: weak ones, and a partial of a method."""

    SITES = ("relu",)
    PICKLED = False

    def __init__(self):
        super().__init__()
        self.me = weakref.ref(self)
        self.__dict__.update(parent=self, proxy=weakref.proxy(self))
        self.circle = [self]
        self.circle.append(self.circle)

    def forward(self, x):
        return F.relu(self.me().first(x))


class Mangled(Form):
    """Private names."""

    SITES = ("_Mangled__act", "relu")

    def __init__(self):
        super().__init__()
        self.__act, self.__inplace = nn.ReLU(), False

    def __rectify(self, x):
        return F.relu(x, inplace=self.__inplace)

    def forward(self, x):
        return self.__rectify(self.second(self.__act(self.first(x))))


class Recurrent(Form):
    """nn.RNN with relu: a part of its kernel."""

    BLOCKED = ("a part of the kernel of nn.RNN", "a part of the kernel of nn.RNNCell")

    def __init__(self):
        super().__init__()
        self.rnn, self.cell = nn.RNN(6, 6, nonlinearity="relu"), nn.RNNCell(6, 6, nonlinearity="relu")

    def forward(self, x):
        return self.cell(self.rnn(x)[0])


class Sub(nn.Module):
    """Reached through a method of another class that is made anew."""

    def forward(self, x):
        return torch.relu(x)


class MadeModule(Form):
    """A module of one's own made in the forward."""

    BLOCKED = ("inside the Sub that Sub() makes",)

    def forward(self, x):
        return Sub()(self.first(x))


def even(x, depth):
    """One of two helpers that call each other."""
    return odd(x, depth - 1) if depth else last(x)


def odd(x, depth):
    """The other."""
    return even(x, depth - 1)


def last(x):
    """Relu."""
    return F.relu(x)


class Mutual(Form):
    """Helpers that call each other."""

    SITES = ("relu",)

    def forward(self, x):
        return odd(self.first(x), 3) + even(x, 2)


class Text(Form):
    """Code in a text."""

    BLOCKED = ("it stands in a text that eval runs",)

    def forward(self, x):
        return eval("F.relu(x)", {"F": F, "x": self.first(x)})


def activated(act, forward=None):
    """A decorator that applies an activation to what a method returns."""
    if forward is None:
        return lambda forward: activated(act, forward)

    def wrapper(self, x):
        return act(forward(self, x))

    return wrapper


def activated_without_names(forward):
    """The same, for any arguments."""

    def wrapper(*args):
        return F.relu(forward(*args))

    return wrapper


class Described:
    """A descriptor around a method."""

    def __init__(self, method):
        self.method = method

    def __get__(self, instance, owner=None):
        return functools.partial(self.run, instance)

    def run(self, instance, x):
        """Relu."""
        return F.relu(self.method(instance, x))


class Wrapped(Form):
    """Decorators: one with an activation as its argument, and one that does not name the instance."""

    SITES = ("relu", "relu_2")
    BLOCKED = ("has no name for its instance", "has no name for its instance")
    PICKLED = False  # a function that a decorator hides has no name to be found by

    @activated(torch.relu)
    def inner(self, x):
        """Relu, twice."""
        return F.relu(self.first(x))

    @activated_without_names
    def outer(self, x):
        """Relu, twice."""
        return F.relu(self.second(x))

    def forward(self, x):
        return self.outer(self.inner(x))


class DescribedForward(Form):
    """A forward that is an object with `__get__`."""

    BLOCKED = ("the attribute forward.method", "the attribute forward.run")

    @Described
    def forward(self, x):
        """Relu."""
        return F.relu(self.first(x))


class Operators(Form):
    """Activations in the methods of operators."""

    SITES = ("relu", "relu_1")

    def __matmul__(self, x):
        return F.relu(self.first(x))

    def __getitem__(self, x):
        return F.relu(self.second(x))

    def forward(self, x):
        return self[self @ x]


class SuperReLU(nn.ReLU):
    """A ReLU with a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 2


class SubclassWithSuper(Form):
    """The forward of PyTorch's own class, come to by super()."""

    SITES = ("act.relu",)

    def __init__(self):
        super().__init__()
        self.act = SuperReLU()

    def forward(self, x):
        return self.act(self.first(x))


def named_act(x, name):
    """A function picked by a name that the caller gives."""
    return getattr(F, name)(x)


class NamedByCaller(Form):
    """Names handed to helpers and to methods."""

    BLOCKED = ("self.act picks it by its name", "name picks what is called")

    def __init__(self):
        super().__init__()
        self.act = "relu"

    def chosen(self):
        """The activation."""
        return getattr(F, self.act)

    def forward(self, x):
        return named_act(self.chosen()(self.first(x)), "relu")


class FromTheClass(Form):
    """A class attribute that is read from the class: another on the instance would not be seen."""

    BLOCKED = ("FromTheClass.forward may read acts from the class",)
    acts = {"relu": F.relu}  # noqa: RUF012

    def forward(self, x):
        return type(self).acts["relu"](self.first(x))


class Namespaces(Form):
    """Namespaces in an attribute and in a default argument."""

    BLOCKED = ("kept as cfg.act", "inside types.SimpleNamespace")

    def __init__(self):
        super().__init__()
        self.cfg = types.SimpleNamespace(act=F.relu)

    def forward(self, x, other=types.SimpleNamespace(act=F.relu)):  # noqa: B008
        return other.act(self.cfg.act(self.first(x)))


mapped = torch.func.vmap(F.relu)


class Transformed(Form):
    """torch.func.vmap of an activation."""

    BLOCKED = ("inside mapped.func",)

    def forward(self, x):
        return mapped(self.first(x))


class BoundMethod(Form):
    """A tensor's method taken before it is called."""

    BLOCKED = ("calls a bound method", "calls a bound method")

    def forward(self, x):
        act = self.first(x).relu
        return act().__getattribute__("relu")()


class Imported(Form):
    """A module imported at run time."""

    SITES = ("relu",)

    def forward(self, x):
        return importlib.import_module("torch.nn.functional").relu(self.first(x))


FORMS = [cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, Form) and cls is not Form]
