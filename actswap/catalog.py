"""The table of built-in activations. Each formula stands once: in `piecewise`, `smooth`, `gated` or `learnable`.

>>> sorted(CATALOG)[:3]
['celu', 'clipped_gelu', 'deconv_relu']
"""

from __future__ import annotations

from dataclasses import replace

from actswap.activation import Activation
from actswap.gated import GATED
from actswap.learnable import LEARNABLE
from actswap.piecewise import PIECEWISE
from actswap.smooth import SMOOTH
from actswap.targets import CALLS, MODULES

CATALOG: dict[str, Activation] = {
    definition.name: replace(definition, modules=MODULES.get(definition.name, ()), calls=CALLS.get(definition.name, ()))
    for definition in (*PIECEWISE, *SMOOTH, *GATED, *LEARNABLE)
}
"""Name to definition, for every built-in activation."""
