"""actswap swaps activations in networks that already exist.

>>> import actswap, torch
>>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
>>> model = actswap.replace(model, "relu", "softplus")
>>> model[1]
Softplus(beta=1.0, threshold=20.0, save='output')
>>> model = actswap.restore(model)
>>> model[1]
ReLU()
"""

from actswap import functional, nn
from actswap.activation import Activation
from actswap.checking import check
from actswap.ejection import eject
from actswap.equivalence import validate
from actswap.errors import (
    ActswapError,
    BlockedSiteError,
    EjectWarning,
    EquivalenceError,
    ModeError,
    NoSiteError,
    NoSiteWarning,
    ParameterError,
    RecipeError,
    RegistrationError,
    RestoreError,
    RoleWarning,
    TargetError,
    UnknownActivationError,
    UnsupportedModelError,
    WeightsWarning,
)
from actswap.finding import find
from actswap.memory import memory
from actswap.plan import Swap
from actswap.recipes import Recipe, recipe
from actswap.registry import get, names, register
from actswap.replacement import per_site
from actswap.report import Line, Report
from actswap.sites import Site, Sites
from actswap.swap import diff, history, parameters, replace, restore, swapped

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "ActswapError",
    "BlockedSiteError",
    "EjectWarning",
    "EquivalenceError",
    "Line",
    "ModeError",
    "NoSiteError",
    "NoSiteWarning",
    "ParameterError",
    "Recipe",
    "RecipeError",
    "RegistrationError",
    "Report",
    "RestoreError",
    "RoleWarning",
    "Site",
    "Sites",
    "Swap",
    "TargetError",
    "UnknownActivationError",
    "UnsupportedModelError",
    "WeightsWarning",
    "check",
    "diff",
    "eject",
    "find",
    "functional",
    "get",
    "history",
    "memory",
    "names",
    "nn",
    "parameters",
    "per_site",
    "recipe",
    "register",
    "replace",
    "restore",
    "swapped",
    "validate",
]
