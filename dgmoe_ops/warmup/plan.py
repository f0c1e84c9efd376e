"""Which calls of the grouped GEMMs a warm-up makes: from layers and token counts alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..formats.gemm import GroupedGemmSpec
from ..formats.layouts import CONTIG_ALIGNMENT, Layout, expected_rows, gemm_rows
from ..formats.recipes import RECIPES, Recipe, scale_recipes
from ..weights.prepare import MoEWeights, padded_sizes

#: (first, last), both ends included
Span = tuple[int, int]
_PAIRS = (("w13", "w2"), ("w13_weight", "w2_weight"))
_SHAPES = "(experts, 2 * intermediate, hidden) and (experts, hidden, intermediate)"


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def fail(arg: str, must: str, got: object) -> None:
    raise ValueError(f"dgmoe_ops.warmup: {arg} must {must}, got {got}")


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer whose weights are not at hand.

    Attributes:
        experts: of this rank.
        hidden, intermediate: before any padding.
        top_k: experts a token.
        recipe: "bf16", "fp8_block", "mxfp8" or "mxfp4".
        num_experts: over all ranks. Default experts.
    """

    experts: int
    hidden: int
    intermediate: int
    top_k: int
    recipe: str = "fp8_block"
    num_experts: int | None = None


@dataclass(frozen=True)
class KernelCall:
    """One call of a grouped GEMM, by what a kernel is chosen by.

    Attributes:
        spec: its sizes and formats.
        recipe: "bf16", "fp8_block", "mxfp8" or "mxfp4".
        alignment: of the segments of a contiguous call, None for a masked one.
    """

    spec: GroupedGemmSpec
    recipe: str
    alignment: int | None

    @property
    def op(self) -> str:
        """Its name below torch.ops.dgmoe."""
        kind = "f8f8bf16" if RECIPES[self.recipe].quantized else "bf16"
        return self.spec.layout.op(f"grouped_gemm_nt_{kind}")

    @property
    def weight(self) -> tuple[int, int, int, str]:
        """What the weight is known by: experts, n, k and recipe."""
        return self.spec.experts, self.spec.n, self.spec.k, self.recipe

    @property
    def group(self) -> tuple:
        """What calls that may share a kernel have in common: it is compiled for all of it."""
        return self.op, *self.weight, self.alignment

    def facts(self) -> dict[str, object]:
        """The call as plain values; `expected_m` is None for a contiguous one."""
        spec = self.spec
        return {
            "op": self.op,
            "m": spec.m,
            "n": spec.n,
            "k": spec.k,
            "experts": spec.experts,
            "expected_m": spec.expected_m if spec.masked else None,
            "recipe": self.recipe,
            "alignment": self.alignment,
        }


@dataclass(frozen=True)
class Layer:
    """What planning knows of a layer; `tensors` are its own weights and scales, where it has
    them."""

    experts: int
    gemms: tuple[tuple[int, int], ...]  #: (n, k) of each GEMM
    top_k: int
    num_experts: int
    recipe: Recipe
    tensors: tuple[tuple[torch.Tensor, torch.Tensor | None], ...] = ()

    @property
    def sizes(self) -> tuple:
        return self.experts, self.gemms, self.top_k, self.num_experts, self.recipe.name

    def __str__(self) -> str:
        (n, k), _ = self.gemms
        return (
            f"{self.experts} experts, hidden {k}, intermediate {n // 2}, top-k {self.top_k},"
            f" {self.recipe.name}"
        )


# ---- layers ----


def _agree(arg: str, given, own):
    """The value that the argument or the layer names; both may, if they agree."""
    if given is not None and own is not None and given != own:
        fail(arg, f"be {own!r}, as the layer has it", repr(given))
    return own if given is None else given


def _count(arg: str, value: object, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        fail(arg, f"be an int of at least {least}", repr(value))
    return value


def _recipe(name: object) -> Recipe:
    if name not in RECIPES:
        fail("recipe", f"be one of {', '.join(RECIPES)}", repr(name))
    return RECIPES[name]


def _layer(experts, gemms, top_k, num_experts, recipe: Recipe, tensors=()) -> Layer:
    if top_k is None:
        fail("top_k", "be given where the layer does not name it", None)
    total = experts if num_experts is None else _count("num_experts", num_experts)
    if total < experts:
        fail("num_experts", f"be at least the local experts, {experts}", total)
    return Layer(experts, gemms, _count("top_k", top_k), total, recipe, tensors)


def _of_shape(shape: LayerShape, recipe, top_k, num_experts) -> Layer:
    for name in ("experts", "hidden", "intermediate"):
        _count(name, getattr(shape, name))
    chosen = _recipe(_agree("recipe", recipe, shape.recipe))
    k1, n2, inter = padded_sizes(chosen, shape.hidden, shape.intermediate)
    return _layer(
        shape.experts,
        ((2 * inter, k1), (n2, inter)),
        _agree("top_k", top_k, shape.top_k),
        _agree("num_experts", num_experts, shape.num_experts),
        chosen,
    )


def _has(recipe: Recipe, weight: torch.Tensor, scale: torch.Tensor | None) -> bool:
    """Whether a prepared weight and its scale, where that is at hand, can be of a recipe."""
    if recipe.weight_dtype != weight.dtype or scale is None or not recipe.quantized:
        return recipe.weight_dtype == weight.dtype
    packed = scale.dtype == torch.int32
    sizes = (*weight.shape[:2], recipe.columns_of(weight), packed)
    return tuple(scale.shape) == recipe.weight_scale_shape(*sizes) and packed >= recipe.mx


def _of_tensors(where: str, w13, w13_scale, w2, w2_scale, recipe, top_k, num_experts) -> Layer:
    shapes = tuple(w13.shape), tuple(w2.shape)
    if not w13.dim() == w2.dim() == 3 or w13.shape[0] != w2.shape[0] or 0 in shapes[0] + shapes[1]:
        fail(where, f"have weights {_SHAPES}", f"{shapes[0]} and {shapes[1]}")
    pairs = ((w13, w13_scale), (w2, w2_scale))
    # Without scales, and with those of very short rows, FP8 fits two: the first is meant.
    own = [r.name for r in RECIPES.values() if all(_has(r, *pair) for pair in pairs)]
    if not own:
        dtypes = ", ".join(dict.fromkeys(_text(r.weight_dtype) for r in RECIPES.values()))
        must = f"have weights as prepare_weights makes them, in one of {dtypes}, and their scales"
        got = [f"{_text(t.dtype)} {tuple(t.shape)}" for p in pairs for t in p if t is not None]
        fail(where, must, " and ".join(got))
    chosen = _recipe(recipe if recipe in own else _agree("recipe", recipe, own[0]))
    if w13.shape[1] != 2 * chosen.columns_of(w2):
        fail(where, f"have weights {_SHAPES}", f"{shapes[0]} and {shapes[1]}")
    whole = not chosen.quantized or (w13_scale is not None and w2_scale is not None)
    tensors = tuple((b.detach(), None if s is None else s.detach()) for b, s in pairs)
    gemms = tuple((b.shape[1], chosen.columns_of(b)) for b in (w13, w2))
    return _layer(w13.shape[0], gemms, top_k, num_experts, chosen, tensors if whole else ())


def _held(module: torch.nn.Module) -> Iterator[tuple[str, tuple]]:
    """(attribute, w13, w13_scale, w2, w2_scale, recipe) of every layer that a module itself holds;
    the recipe is None where only the tensors can tell it."""
    for name, value in vars(module).items():
        values = [value]
        if isinstance(value, dict) and not name.startswith("_"):
            values = list(value.values())
        elif isinstance(value, list | tuple):
            values = list(value)
        yield from ((name, (*w.tensors, w.recipe)) for w in values if isinstance(w, MoEWeights))
    for pair in _PAIRS:
        w13, w2 = (getattr(module, name, None) for name in pair)
        if isinstance(w13, torch.Tensor) and isinstance(w2, torch.Tensor):
            s13, s2 = (getattr(module, f"{name}_scale", None) for name in pair)
            yield pair[0], (w13, s13, w2, s2, None)


def _of_module(module: torch.nn.Module, recipe, top_k, num_experts) -> list[Layer]:
    found = []
    by_name = dict(module.named_modules())
    for name, part in by_name.items():
        for attribute, (*tensors, own) in _held(part):
            # The router's module often stands above the one that holds the experts.
            parents = [name.rsplit(".", depth)[0] for depth in range(name.count(".") + 1)]
            above = [by_name[parent] for parent in dict.fromkeys([*parents, ""])]

            def named(key: str, above=above) -> int | None:
                values = (getattr(holder, key, None) for holder in above)
                return next((v for v in values if type(v) is int), None)

            found.append(
                _of_tensors(
                    f"{name}.{attribute}".lstrip("."),
                    *tensors,
                    _agree("recipe", recipe, own),
                    named("top_k") if top_k is None else top_k,
                    named("num_experts") if num_experts is None else num_experts,
                )
            )
    if not found:
        fail("what", "hold MoEWeights or a pair of tensors w13 and w2", type(module).__name__)
    return found


def layers_of(what, recipe: str | None, top_k: int | None, num_experts: int | None) -> list[Layer]:
    """The layers that `what` names, those of equal sizes once."""
    facts = recipe, top_k, num_experts
    if isinstance(what, LayerShape):
        found = [_of_shape(what, *facts)]
    elif isinstance(what, MoEWeights):
        named = _agree("recipe", recipe, what.recipe)
        found = [_of_tensors("what", *what.tensors, named, top_k, num_experts)]
    elif isinstance(what, torch.nn.Module):
        found = _of_module(what, *facts)
    elif isinstance(what, list | tuple):
        found = [layer for one in what for layer in layers_of(one, *facts)]
    else:
        must = "be MoEWeights, a module, a LayerShape or a list of these"
        fail("what", must, type(what).__name__)
    # Of equal layers one that brings its weights, which then need not be allocated.
    once: dict[tuple, Layer] = {}
    for layer in found:
        if layer.sizes not in once or (layer.tensors and not once[layer.sizes].tensors):
            once[layer.sizes] = layer
    if not once:
        fail("what", "name at least one layer", what)
    return list(once.values())


# ---- token counts ----


def spans_of(tokens: Sequence[int] | range) -> list[Span]:
    """Token counts as spans: of a list each count, of a range or a pair everything between."""
    if isinstance(tokens, range) and len(tokens) and abs(tokens.step) == 1:
        spans = [(min(tokens), max(tokens))]
    elif isinstance(tokens, tuple) and len(tokens) == 2:
        spans = [tokens]
    elif isinstance(tokens, list | tuple | range):
        spans = [(count, count) for count in tokens]
    else:
        fail("tokens", "be a list, a range or a pair (first, last)", repr(tokens))
    for first, last in spans:
        if _count("tokens", last, 0) < _count("tokens", first, 0):
            fail("tokens", "be a pair (first, last) in order", repr(tokens))
    return spans


def halve_largest(spans: list[Span]) -> list[Span]:
    """Halve the largest count of the spans."""
    largest = max(last for _, last in spans)
    half = largest // 2
    return [(min(a, half), half) if b == largest else (a, b) for a, b in spans]


def _steps(value: Callable[[int], tuple], first: int, last: int) -> Iterator[tuple]:
    """Every value of a monotone function on a span, without asking at every count."""
    while first <= last:
        here = value(first)
        yield here
        step = 1
        while first + step <= last and value(first + step) == here:
            step *= 2
        low, high = first + step // 2, min(first + step, last + 1)
        while high - low > 1:  # the value still holds at low, and no longer at high
            middle = (low + high) // 2
            low, high = (middle, high) if value(middle) == here else (low, middle)
        first = high


# ---- calls ----


def layer_calls(
    layer: Layer, spans: Iterable[Span], layout: Layout, alignment: int
) -> list[KernelCall]:
    """The distinct calls of both GEMMs of a layer, for every token count of the spans."""
    hinted, recipe = layout.has_slabs, layer.recipe

    def rows(tokens: int) -> tuple[int, int]:
        m = gemm_rows(layout, tokens, layer.top_k, layer.experts, alignment)
        return m, expected_rows(tokens, layer.top_k, layer.num_experts) if hinted else 0

    # Neighbouring counts mostly make the same call, and a call is kept once. No other call is
    # dropped: the library may choose another tile at any of them.
    found = {pair: None for first, last in spans for pair in _steps(rows, first, last)}
    return [
        KernelCall(
            GroupedGemmSpec(
                layout,
                layer.experts,
                m,
                n,
                k,
                expected,
                *scale_recipes(recipe, None, k),
                recipe.values_per_element == 2,
            ),
            recipe.name,
            None if hinted else alignment,
        )
        for n, k in layer.gemms
        for m, expected in found
        if m > 0  # without rows nothing is called
    ]


def check_layouts(
    layouts: Iterable[Layout | str], alignment: int | None
) -> tuple[tuple[Layout, ...], int]:
    """The layouts and the alignment to plan with."""
    names = [layout.value for layout in Layout]
    given = (layouts,) if isinstance(layouts, str) else tuple(layouts)
    for layout in given:
        if layout not in names:
            fail("layouts", f"be of {', '.join(names)}", repr(layout))
    chosen = tuple(map(Layout, given))
    if alignment is None:
        return chosen, CONTIG_ALIGNMENT
    return chosen, _count("alignment", alignment)


def plan_warmup(
    what,
    *,
    tokens: Sequence[int] | range,
    recipe: str | None = None,
    top_k: int | None = None,
    num_experts: int | None = None,
    layouts: Iterable[Layout | str] | None = None,
    alignment: int | None = None,
) -> list[KernelCall]:
    """List the calls that `warmup` with these arguments makes, each once; needs no GPU.

    Every token count of `tokens` has its calls in the list: both GEMMs in each layout. Counts that
    make the same call share it; nothing else is left out. Without `layouts` both are listed;
    `warmup` then makes the calls of those that its device runs.

    Raises:
        ValueError: an argument has the wrong type, size or value.
    """
    chosen, aligned = check_layouts(tuple(Layout) if layouts is None else layouts, alignment)
    spans = spans_of(tokens)
    return list(
        dict.fromkeys(
            call
            for layer in layers_of(what, recipe, top_k, num_experts)
            for layout in chosen
            for call in layer_calls(layer, spans, layout, aligned)
        )
    )
