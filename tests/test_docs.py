"""The page of activations: its formulas are true, it is what the definitions give, and its pictures show them."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path

import oracle
import pytest
import torch

from actswap import autograd, plot
from actswap.catalog import CATALOG
from actswap.errors import ParameterError, UnknownActivationError

DOCS = Path(__file__).resolve().parent.parent / "docs"
EVERY = [pytest.param(a, id=a.name) for a in CATALOG.values()]
POINTS = [-11.25, -6.1, -4.4, -2.9, -2.1, -1.3, -0.77, -0.41, -0.1, -1e-3, 0.0, 1e-3, 0.13, 0.44, 0.81, 1.7, 2.6, 3.9,
          5.8, 9.4, 18.9]  # fmt: skip
FUNCTIONS = {
    **{name: getattr(math, name) for name in ("exp", "log", "sqrt", "sin", "cos", "tanh", "erf")},
    "max": max, "min": min, "abs": abs, "gelu'": lambda x: evaluate(CATALOG["gelu"].slope, x=x),
    **{name: lambda x, name=name: evaluate(CATALOG[name].formula, **CATALOG[name].defaults, x=x)
       for name in ("sigmoid", "softplus", "gelu")},
}  # fmt: skip
TOKEN = re.compile(r"\s*(\d[\d.]*|[a-z_]+'?|[<>]=?|[-+*/^(),])")
WORDS = {"if", "else"}


def translate(text: str, functions: dict) -> str:
    """Mathematics as Python: `a b` and `a (b)` become products, `^` becomes `**`, functions become `F["name"]`."""
    text, out, position = re.sub(r"\|([^|]*)\|", r"abs(\1)", text), [], 0
    ended = called = False  # whether a factor ended here; whether it is a function's name
    while position < len(text):
        match = TOKEN.match(text, position)
        assert match, f"no mathematics: {text[position:]!r} in {text!r}"
        token, position = match[1], match.end()
        factor = token not in WORDS and (token == "(" or token[0].isalnum() or token[0] == "_")
        if factor and ended and not (called and token == "("):
            out.append("*")
        called = token in functions and text[position:].startswith("(")
        ended = token == ")" or (factor and token != "(")
        out.append(f"F[{token!r}]" if called else f"({token})" if token[0].isalnum() and ended else token)
        out[-1] = "**" if token == "^" else out[-1]
    return " ".join(out)


def evaluate(text: str, explained: str = "", **names: float) -> float:
    """The value of a line of mathematics; names explained after the semicolon of `explained` hold here too."""
    expression, *explanations = text.split("; ")
    for part in [*explained.split("; ")[1:], *explanations]:
        for definition in re.split(r", (?=[a-z]+ = )", part):
            name, equals, value = definition.partition(" = ")
            if equals:  # else it is a remark
                names[name] = evaluate(value, **names)
    return eval(translate(expression, FUNCTIONS), {"__builtins__": {}, "F": FUNCTIONS, "pi": math.pi}, names)


def settings(activation):
    return [p for p in map(activation.bind, [{}, *oracle.AWKWARD.get(activation.name, [])]) if not p.get("training")]


def points(activation, params):
    kinks = [kink for kink in activation.kinks(params) if math.isfinite(kink)]
    sides = [kink + side for kink in kinks for side in (-0.01, 0.01)]
    if activation.name == "clipped_gelu":  # it meets its bounds between two numbers
        kinks = []
    return sorted({*POINTS, *kinks, *sides})


def close(got, want, x, relative=1e-9):
    return math.isclose(got, want, rel_tol=relative, abs_tol=1e-12 * max(1.0, abs(x)))


def test_the_evaluator_knows_the_notation():
    assert translate("scale x if x > 0 else 2 f(x)^2 (x + 1)", {"f": 1}) == (
        "(scale) * (x) if (x) > (0) else (2) * F['f'] ( (x) ) ** (2) * ( (x) + (1) )"
    )
    assert evaluate("-x^2 / 2", x=3.0) == -4.5
    assert evaluate("|x| max(x, 0)", x=2.0) == 4.0
    assert evaluate("max(x, max)", x=2.0, max=3.0) == 3.0
    assert evaluate("a (x + 1); a = 2 b, b = 1; in words", "; b = 3", x=1.0) == 12.0
    assert evaluate("1 / 2 x", x=4.0) == 2.0, "a product takes its turn from the left"
    with pytest.raises(AssertionError, match="no mathematics"):
        evaluate("x ? 1", x=1.0)
    with pytest.raises(NameError, match="unheard"):
        evaluate("x unheard", x=1.0)


@pytest.mark.parametrize("activation", EVERY)
def test_formulas_are_true(activation):
    for params in settings(activation):
        for x in points(activation, params):
            want = activation.forward(torch.tensor([x], dtype=torch.float64), *params.values()).item()
            assert close(evaluate(activation.formula, **params, x=x), want, x), (x, params)


@pytest.mark.parametrize("activation", EVERY)
def test_derivatives_are_true_at_kinks_too(activation):
    """Compared with the backward itself; a surrogate's for both signs of the gradient from above."""
    relative = 1e-6 if activation.name in ("celu", "hardsigmoid") else 1e-9  # ATen's kernels have float32 constants
    for params in settings(activation):
        for x in points(activation, params):
            for g in (1.0, -2.0):
                leaf = torch.tensor([x], dtype=torch.float64, requires_grad=True)
                autograd.apply(activation, leaf, params).backward(torch.tensor([g], dtype=torch.float64))
                got = evaluate(activation.slope, activation.formula, **params, x=x, g=g)
                assert close(got if activation.surrogate else g * got, leaf.grad.item(), x, relative), (x, params)


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawn(generate):
    return generate.curves()


def test_the_page_is_what_the_definitions_give(generate, drawn):
    said = "docs/activations.md is stale: run python docs/generate.py"
    assert (DOCS / "activations.md").read_text(encoding="utf-8") == generate.page(drawn), said


def test_the_pictures_show_the_numbers_of_the_page(drawn):
    page = (DOCS / "activations.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\((images/.*?\.svg)\)", page))
    assert linked == {f"images/{path.name}" for path in (DOCS / "images").iterdir()}
    assert linked == {f"images/{name}.svg" for name in [*CATALOG, "overview"]}
    overview = (DOCS / "images" / "overview.svg").read_text(encoding="utf-8")
    for name, it in drawn.items():
        picture = (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8")
        assert f"![Value and derivative of {name}](images/{name}.svg)\n<!-- numbers: {it.digest} -->" in page
        assert it.digest in picture and it.digest in overview, "run python docs/generate.py"


def test_links_in_the_page_have_targets():
    page = (DOCS / "activations.md").read_text(encoding="utf-8")
    assert re.findall(r"\]\(#(.*?)\)", page) == re.findall(r"^## (.*)$", page, re.MULTILINE) == sorted(CATALOG)


def test_every_fact_of_a_definition_is_on_the_page(generate, drawn):
    for name, activation in CATALOG.items():
        section = generate.section(activation, drawn[name].digest)
        facts = [activation.source, *activation.aliases, *activation.names, *activation.states]
        facts += [activation.formula.replace("|", "\\|"), activation.slope.replace("|", "\\|")]
        facts += [repr(p.domain) for p in activation.parameters if not p.mode]
        facts += [state.needs for state in activation.states.values()]
        assert [fact for fact in facts if fact not in section] == []
        rows = [line for line in section.splitlines() if line.startswith("| ")]
        assert all(len(re.findall(r"(?<!\\)\|", row)) in (3, 5) for row in rows), "a bar splits a cell"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("softplus", "| kinks | x = 20 at the defaults; follows `beta`, `threshold` |"),
        ("clipped_gelu", "| range | -0.169971 to 10 at the defaults; follows `min`, `max`; not monotonic |"),
        ("relu6", "| range | 0 to 6; never decreases |"),
        ("leaky_relu", "| range | -∞ to ∞ at the defaults; follows `negative_slope`; never decreases |"),
        ("silu", "| kinks | none |"),
        ("relu", "| saved | output, or input |"),
        ("hardtanh", "| saved | input, or output (needs bounds that bfloat16 has) |"),
        ("leaky_relu", "| saved | input, or output (needs negative_slope > 0); in place the output |"),
        ("softplus", "| saved | input, or output (needs threshold >= 17; derivative within 0.85 eps) |"),
        ("identity", "| saved | nothing |"),
        ("softplus", "| `beta` | 1 | > 0 | constant |"),
        ("rrelu", "| `training` | False | True or False | follows the module's mode |"),
        ("guided_relu", "| backward of g, not the derivative | `max(g, 0) if x > 0 else 0` |"),
        ("silu", "`swish`"),
    ],
)
def test_the_words_of_the_page(generate, name, words):
    assert words in generate.section(CATALOG[name], "")


def test_a_digest_follows_what_is_plotted_and_no_last_bits(drawn):
    same = {}
    for name, it in drawn.items():
        same.setdefault(it.digest, set()).add(name)
    assert sorted(sorted(names) for names in same.values() if len(names) > 1) == [
        ["celu", "elu"], ["guided_relu", "relu", "threshold"], ["silu", "swish_beta"], ["squared_relu", "star_relu"],
    ]  # fmt: skip
    it = drawn["hardswish"]
    shaken = {"value": it.value * (1 + 1e-14), "slope": it.slope * (1 - 1e-14)}
    assert plot.Curve(**{**vars(it), **shaken}).digest == it.digest
    for other in ({"value": it.value + 2e-4}, {"slope": -it.slope}, {"x": it.x + 1}, {"kinks": it.kinks + 1}):
        assert plot.Curve(**{**vars(it), **other}).digest != it.digest


@pytest.mark.parametrize("activation", EVERY)
def test_curves_go_up_to_kinks_and_never_across(activation, drawn):
    it = drawn[activation.name]
    inside = [kink for kink in activation.kinks(it.params) if abs(kink) <= 12]
    assert it.kinks[:, 0].tolist() == sorted(inside)
    assert int(it.x.isnan().sum()) == len(inside)
    assert torch.equal(it.x.isnan(), it.value.isnan()) and torch.equal(it.x.isnan(), it.slope.isnan())
    numbers = it.x[~it.x.isnan()]
    assert bool((numbers.diff() > 0).all()) and numbers[0] <= -5 and numbers[-1] >= 5
    for kink in inside:
        assert not (it.x == kink).any() and ((it.x - kink).abs() < 1e-8).sum() == 2
    steps = it.value.diff().abs()
    assert steps[~steps.isnan()].max() < 1.0, "no jump is drawn as a line"


def test_curves_take_parameters_names_and_aliases():
    assert plot.curve("swish").label == "silu"
    assert plot.curve("softplus", beta=5.0).label == "softplus(beta=5)"
    assert plot.curve("prelu", weight=0.5).slope[0] == 0.5
    assert plot.curve("softplus", beta=5.0).kinks[0, 0] == 4.0
    with pytest.raises(UnknownActivationError):
        plot.curve("softpluss")
    with pytest.raises(ParameterError):
        plot.curve("softplus", beta=-1.0)
    with torch.no_grad():
        assert plot.curve("silu").digest == plot.curve("silu").digest


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_the_same_numbers_give_the_same_file(tmp_path, suffix):
    files = [tmp_path / f"{index}.{suffix}" for index in (0, 1)]
    for file in files:
        plot.save(plot.figure("hardswish", "silu", plot.curve("softplus", beta=5.0)), file, "some words")
    assert files[0].read_bytes() == files[1].read_bytes()
    assert b"some words" in files[0].read_bytes() or suffix == "pdf"


def test_a_picture_has_every_curve_and_its_kinks_marked():
    pytest.importorskip("matplotlib")
    axes = plot.figure("hardswish", "relu6").axes[0]
    lines = [line for line in axes.lines if len(line.get_xdata()) > 2]
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-", "--"]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert len(dots) == 8
    assert sorted({float(dot.get_xdata()[0]) for dot in dots}) == [-3.0, 0.0, 3.0, 6.0]
    assert axes.get_xlim() == (-5.0, 7.0)
    steep = plot.figure("square").axes[0]
    assert steep.get_ylim()[1] < 6


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert len(plot.curve("relu").x) > 100
    with pytest.raises(ImportError, match=r"pip install 'actswap\[plot\]'"):
        plot.figure("relu")
