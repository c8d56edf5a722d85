"""Pictures of activations: value and derivative of one or several in one figure, kinks marked.

Needs matplotlib (`pip install "actswap[plot]"`), which is imported only when something is drawn. No window is opened
and no global setting of matplotlib is changed; the same numbers give the same file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from actswap import autograd
from actswap.activation import Activation
from actswap.registry import get

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPAN, FARTHEST, STEP = 5.0, 12.0, 1 / 16
"""Plotted is [-SPAN, SPAN], and every kink up to FARTHEST, at multiples of STEP, which binary numbers have."""
UNDATED: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None, "Creator": None}, ".png": {"Software": None}, ".pdf": {"CreationDate": None},
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """What is plotted of an activation.

    Args:
        activation: the definition.
        params: every parameter's value.
        x: the points, float64, with NaN between the pieces that kinks make.
        value: f at these points.
        slope: what the backward makes of a gradient of 1 there: the derivative, unless it is a surrogate's.
        kinks: x, f and slope at each kink within the points.
    """

    activation: Activation
    params: dict[str, Any]
    x: Tensor
    value: Tensor
    slope: Tensor
    kinks: Tensor

    @property
    def label(self) -> str:
        """The name, with the parameters that are not the defaults."""
        given = [f"{name}={v:g}" for name, v in self.params.items() if v != self.activation.defaults[name]]
        return self.activation.name + (f"({', '.join(given)})" if given else "")

    @property
    def digest(self) -> str:
        """A short hash of the numbers to four decimals, the same on every machine."""
        numbers = torch.cat([self.x, self.value, self.slope, self.kinks.flatten()])
        # the irrational offset keeps tidy values off the edges, where the last bit would decide
        cells = (numbers * 1e4 + 1 / math.pi).floor().nan_to_num(nan=1e9)
        return hashlib.sha256(",".join(f"{cell:.0f}" for cell in cells.tolist()).encode()).hexdigest()[:12]


def curve(activation: str | Activation, **params: Any) -> Curve:
    """The points of an activation's value and derivative, as plotted.

    Args:
        activation: a name or definition.
        params: its parameters; numbers, also for trained ones.

    Raises:
        UnknownActivationError, ParameterError: there is no such activation, or it does not take these parameters.

    >>> bent = curve("relu6")
    >>> bent.kinks.tolist()
    [[0.0, 0.0, 0.0], [6.0, 6.0, 0.0]]
    >>> bent.x[0].item(), bent.x[-1].item()
    (-5.0, 7.0)
    """
    activation = get(activation)
    bound = activation.bind(params)
    kinks = sorted({kink for kink in activation.kinks(bound) if abs(kink) <= FARTHEST})
    low, high = min([-SPAN, *(math.floor(kink) - 1 for kink in kinks)]), max([SPAN, *(kink + 1 for kink in kinks)])
    even = torch.arange(math.floor(low / STEP), math.ceil(high / STEP) + 1, dtype=torch.float64) * STEP
    ends, gap, near = [-math.inf, *kinks, math.inf], torch.tensor([math.nan], dtype=torch.float64), 1e-9
    pieces = []
    for left, right in pairwise(ends):
        inside = even[(even > left + near) & (even < right - near)]
        edges = [torch.tensor([end], dtype=torch.float64) for end in (left + near, right - near) if math.isfinite(end)]
        pieces += [torch.cat([inside, *edges]).sort().values, gap]
    x, at = torch.cat(pieces[:-1]), torch.tensor(kinks, dtype=torch.float64)
    return Curve(activation, bound, x, *_run(activation, x, bound), torch.stack([at, *_run(activation, at, bound)], 1))


def _run(activation: Activation, x: Tensor, params: dict[str, Any]) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    with torch.enable_grad():
        y = autograd.apply(activation, leaf, params)
        (slope,) = torch.autograd.grad(y.sum(), leaf)
    gap = x.isnan()
    return y.detach().masked_fill(gap, math.nan), slope.masked_fill(gap, math.nan)


def figure(*items: str | Activation | Curve) -> Figure:
    """One picture of these activations: values as lines, derivatives dashed, kinks as circles and dots.

    The dot of a kink on the derivative is the value that the backward has there.

    Args:
        items: names, definitions, or curves with parameters of their own.

    Raises:
        ImportError: matplotlib is not installed.

    >>> drawn = figure("softplus", curve("softplus", beta=5.0))
    >>> [text.get_text() for text in drawn.axes[0].get_legend().get_texts()]
    ['softplus', 'softplus(beta=5)', 'derivative']
    """
    made = _figure((4.2, 2.8))
    axes, curves = made.subplots(), [it if isinstance(it, Curve) else curve(it) for it in items]
    draw(axes, curves)
    for it, (color, _) in zip(curves, _colors(curves), strict=True):
        axes.plot([], [], color, label=it.label)
    axes.plot([], [], "C1" if len(curves) == 1 else "gray", linestyle="--", label="derivative")
    axes.legend(fontsize=8)
    return made


def sheet(curves: Sequence[Curve], columns: int = 6) -> Figure:
    """All of these, each in a small picture with its name.

    >>> len(sheet([curve("relu"), curve("silu")]).axes)
    2
    """
    rows = math.ceil(len(curves) / columns)
    made = _figure((columns * 1.7, rows * 1.5))
    places = made.subplots(rows, columns, squeeze=False).flatten()
    for axes, it in zip(places, curves, strict=False):
        draw(axes, [it])
        axes.set_title(it.label, fontsize=8, pad=3)
        axes.tick_params(labelsize=6, length=2, pad=1)
    for axes in places[len(curves) :]:
        axes.remove()
    return made


def draw(axes: Axes, curves: Sequence[Curve]) -> None:
    """Curves and their derivatives; the scale is no higher than wide, so that steep ones do not flatten the rest."""
    axes.axhline(0, color="lightgray", linewidth=0.6, zorder=0)
    axes.axvline(0, color="lightgray", linewidth=0.6, zorder=0)
    for it, (color, slope_color) in zip(curves, _colors(curves), strict=True):
        axes.plot(it.x.tolist(), it.value.tolist(), color, linewidth=1.6)
        axes.plot(it.x.tolist(), it.slope.tolist(), slope_color, linewidth=1.2, linestyle="--")
        for x, value, slope in it.kinks.tolist():
            axes.plot([x], [value], "o", color=color, markersize=4, markerfacecolor="white")
            axes.plot([x], [slope], "o", color=slope_color, markersize=2.5)
    left, right = min(it.x[0].item() for it in curves), max(it.x[-1].item() for it in curves)
    heights = torch.cat([line for it in curves for line in (it.value, it.slope)])
    heights = heights[heights.isfinite()].clamp(left, right)
    room = 0.06 * (heights.max() - heights.min()).item() + 0.02
    axes.set_xlim(left, right)
    axes.set_ylim(heights.min().item() - room, heights.max().item() + room)


def _colors(curves: Sequence[Curve]) -> list[tuple[str, str]]:
    """Of each value and derivative: two colours for one activation, one for each of several."""
    return [("C0", "C1")] if len(curves) == 1 else [(f"C{index}", f"C{index}") for index in range(len(curves))]


def save(made: Figure, path: str | Path, description: str = "") -> None:
    """Write a figure so that the same numbers give the same bytes: no dates, no random identifiers.

    Args:
        made: the figure.
        path: its suffix says the format: `.svg`, `.png`, `.pdf`.
        description: kept in the file, where the format has a place for it.
    """
    import matplotlib

    suffix = Path(path).suffix.lower()
    about = {"Description": description} if description and suffix in (".svg", ".png") else {}
    with matplotlib.rc_context({"svg.hashsalt": "actswap", "svg.fonttype": "none"}):
        made.savefig(path, dpi=150, metadata={**UNDATED.get(suffix, {}), **about})


def _figure(size: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install 'actswap[plot]'") from error
    return Figure(figsize=size, layout="constrained")
