"""Write docs/activations.md and its pictures from the definitions: `python docs/generate.py`.

A test fails when the page is not what the definitions give.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actswap import plot
from actswap.activation import Activation, Parameter, State
from actswap.catalog import CATALOG

HERE = Path(__file__).resolve().parent
PAGE, IMAGES = HERE / "activations.md", HERE / "images"
PROBES = (-20.0, -8.0, -1.0, -0.1, 0.0, 0.1, 1.0, 8.0, 20.0)
"""Values that a parameter is given, to see what depends on it."""

HEAD = """\
# Activations

Generated from the definitions by `python docs/generate.py`; do not edit.

In formulas `a b` is a product, `^` a power, `a if c else b` a choice; what stands after a semicolon explains the names.
The names of activations are functions too, `gelu'` is a derivative. A test evaluates every formula and every derivative
and compares them with the code, at kinks too.

*Saved* is what a training forward keeps for its backward; the first is the default, `save="..."` chooses another. Where
a state has no bound beside it, the gradient has the same bits as the default's; eps is the spacing of the dtype's
numbers at 1, and a bound holds at the default parameters.

In the pictures the value is the solid line, the derivative the dashed one. Circles mark kinks; a dot is the
derivative there.

"""


def number(value: float) -> str:
    """A number as in mathematics, without digits that nobody reads."""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{value:.6g}"


def depends(activation: Activation, fact: Callable[[dict[str, Any]], Any]) -> str:
    """The parameters that a fact follows, as words: those of which some other value changes it."""
    defaults, names = activation.defaults, []
    for parameter in activation.parameters:
        others = [{**defaults, parameter.name: value} for value in PROBES if value in parameter.domain]
        allowed = [other for other in others if activation.requires is None or activation.requires[0](other)]
        if not parameter.mode and any(fact(other) != fact(defaults) for other in allowed):
            names.append(f"`{parameter.name}`")
    return f" at the defaults; follows {', '.join(names)}" if names else ""


def span(activation: Activation) -> str:
    """The range of values, in words."""
    ends = activation.low(activation.defaults), activation.high(activation.defaults)
    follows = depends(activation, lambda params: (activation.low(params), activation.high(params)))
    rises = "never decreases" if activation.monotonic else "not monotonic"
    return f"{number(ends[0])} to {number(ends[1])}{follows}; {rises}"


def kinks(activation: Activation) -> str:
    """Where the derivative jumps, in words."""
    points = activation.kinks(activation.defaults)
    listed = ", ".join(f"x = {number(kink)}" for kink in points) or "none"
    return listed + depends(activation, activation.kinks)


def saved(activation: Activation) -> str:
    """The states that can be saved, the default first."""
    if not activation.states:
        return "nothing"

    def words(key: str, state: State) -> str:
        limits = [f"needs {state.needs}"] if state.needs else []
        limits += [f"derivative within {state.bound:g} eps"] if state.bound else []
        return key + (f" ({'; '.join(limits)})" if limits else "")

    order = sorted(activation.states, key=lambda key: key != activation.save)
    text = ", or ".join(words(key, activation.states[key]) for key in order)
    return text + (f"; in place the {activation.save_}" if activation.save_ is not None else "")


def parameter_row(parameter: Parameter) -> str:
    """One row of the table of parameters."""
    kind = "trained, one value or one per channel" if parameter.learnable else "constant"
    if parameter.mode:
        return f"| `{parameter.name}` | {parameter.default} | True or False | follows the module's mode |"
    return f"| `{parameter.name}` | {number(parameter.default)} | {parameter.domain!r} | {kind} |"


def code(text: str) -> str:
    """Text as code inside of a table."""
    return "`" + text.replace("|", "\\|") + "`"


def section(activation: Activation, digest: str) -> str:
    """Everything about one activation."""
    name, takes = activation.name, "".join(f", {p.name}" for p in activation.parameters)
    rows = {
        "formula": code(activation.formula),
        "backward of g, not the derivative" if activation.surrogate else "derivative": code(activation.slope),
        "aliases": ", ".join(f"`{alias}`" for alias in activation.aliases) or "none",
        "range": span(activation),
        "kinks": kinks(activation),
        "saved": saved(activation),
        "PyTorch": "has this op: same values, same gradients, bit for bit" if activation.native else "has no such op",
        "source": activation.source,
    }
    lines = [f"## {name}", "", f"![Value and derivative of {name}](images/{name}.svg)", f"<!-- numbers: {digest} -->"]
    lines += ["", f"`actswap.functional.{name}(x{takes})`, `actswap.nn.{activation.class_name}`"]
    lines += ["", "| | |", "|---|---|", *(f"| {key} | {text} |" for key, text in rows.items()), ""]
    if activation.parameters:
        lines += ["| parameter | default | domain | |", "|---|---|---|---|"]
        lines += [*map(parameter_row, activation.parameters), ""]
    return "\n".join(lines)


def curves() -> dict[str, plot.Curve]:
    """What is plotted of every activation, by name."""
    return {name: plot.curve(name) for name in sorted(CATALOG)}


def page(drawn: dict[str, plot.Curve]) -> str:
    """The whole page."""
    links = " · ".join(f"[{name}](#{name})" for name in drawn)
    overview = f"{links}\n\n![All activations](images/overview.svg)\n"
    return HEAD + "\n".join([overview, *(section(CATALOG[name], it.digest) for name, it in drawn.items())])


def main() -> None:
    """Write the page and its pictures."""
    drawn = curves()
    PAGE.write_text(page(drawn), encoding="utf-8")
    IMAGES.mkdir(exist_ok=True)
    for old in IMAGES.glob("*.svg"):
        old.unlink()
    for name, it in drawn.items():
        plot.save(plot.figure(it), IMAGES / f"{name}.svg", it.digest)
    plot.save(plot.sheet([*drawn.values()]), IMAGES / "overview.svg", " ".join(it.digest for it in drawn.values()))


if __name__ == "__main__":
    main()
