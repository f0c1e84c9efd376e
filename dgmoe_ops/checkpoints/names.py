"""How checkpoints name the tensors of experts: layouts as data, and telling one from names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NoReturn

from ..formats.weights import WeightFormat

_SHOWN = 6  # names that an error lists before it counts the rest
# As layouts write numbers; anything else is a name that no layout has.
_NUMBER = re.compile(r"^experts\.(0|[1-9][0-9]{0,17})\.")
_EXPERTS = "experts.{}"  # stands for every expert's number
ROUTED = "experts"  #: the group of the routed experts


@dataclass(frozen=True)
class Layout:
    """Names, forms and order of the tensors of a layer's experts.

    Attributes:
        name: what `load_moe_layer(layout=...)` takes.
        models: who has it.
        w13: stems of gate and up, or of one tensor that holds both. "{}" is the expert's number; a
            stem without it names a tensor of all experts.
        w2: stem of down.
        weight: what follows a stem in the names of values.
        forms: what weights and scales may be; dtypes and shapes decide.
        scale: what follows a stem in the names of scales, or None.
        bias: what follows a stem in the names of biases, or None.
        ignored: what follows a stem in names that are known and not read.
        transposed: values are (.., columns, rows).
        gate_up_interleave: rows of gate, then of up, in turn in a tensor that holds both;
            0: halves.
        blocks: values have a last dimension of the 16 bytes of a group.
    """

    name: str
    models: str
    w13: tuple[str, ...]
    w2: str
    weight: str
    forms: tuple[WeightFormat, ...]
    scale: str | None = None
    bias: str | None = None
    ignored: tuple[str, ...] = ()
    transposed: bool = False
    gate_up_interleave: int = 0
    blocks: bool = False

    @property
    def fused(self) -> bool:
        """Whether a tensor holds all experts."""
        return self.w2 == _FUSED[1]

    @property
    def numbered(self) -> bool:
        """Whether each expert has tensors of its own, with its number in their names."""
        return "{}" in self.w2

    def of_group(self, group: str) -> Layout:
        """The same names for one expert in a group without numbers."""
        w13 = tuple(stem.replace(_EXPERTS, group) for stem in self.w13)
        return replace(self, w13=w13, w2=self.w2.replace(_EXPERTS, group))

    @property
    def required(self) -> frozenset[str]:
        """The names that a layer has, "{}" for the number."""
        ends = (self.weight, self.scale, self.bias)
        return frozenset(
            stem + end for stem in (*self.w13, self.w2) for end in ends if end is not None
        )

    @property
    def known(self) -> frozenset[str]:
        """The names that a layer may have."""
        more = (stem + end for stem in (*self.w13, self.w2) for end in self.ignored)
        return self.required.union(more)


_PROJ = ("experts.{}.gate_proj", "experts.{}.up_proj"), "experts.{}.down_proj"
_W123 = ("experts.{}.w1", "experts.{}.w3"), "experts.{}.w2"
_FUSED = ("experts.gate_up_proj",), "experts.down_proj"
_STATIC = (".input_scale",)
_FLOAT, _BLOCK, _FP4 = (WeightFormat.FLOAT,), (WeightFormat.FP8_BLOCK,), (WeightFormat.MXFP4,)
_FP8 = (WeightFormat.FP8_TENSOR, WeightFormat.MXFP8)

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("qwen3_moe", "Qwen3-MoE, and DeepSeek in bf16", *_PROJ, ".weight", _FLOAT),
        Layout(
            "deepseek_v3", "DeepSeek-V3, Qwen3-MoE FP8",
            *_PROJ, ".weight", _BLOCK, ".weight_scale_inv",
        ),
        Layout(
            "deepseek_v4", "DeepSeek-V4",
            *_W123, ".weight", (WeightFormat.MXFP4, WeightFormat.FP8_BLOCK), ".scale",
        ),
        Layout("mixtral", "Mixtral", *_W123, ".weight", _FLOAT),
        Layout("minimax_m2", "MiniMax-M2", *_W123, ".weight", _BLOCK, ".weight_scale_inv"),
        Layout(
            "weight_scale", "compressed-tensors, ModelOpt: FP8 a tensor, MXFP8",
            *_PROJ, ".weight", _FP8, ".weight_scale", ignored=_STATIC,
        ),
        Layout(
            "weight_scale_w123", "the same with Mixtral's names",
            *_W123, ".weight", _FP8, ".weight_scale", ignored=_STATIC,
        ),
        Layout(
            "weight_packed", "compressed-tensors: MXFP4",
            *_PROJ, ".weight_packed", _FP4, ".weight_scale", ignored=_STATIC,
        ),
        Layout(
            "weight_packed_w123", "the same with Mixtral's names",
            *_W123, ".weight_packed", _FP4, ".weight_scale", ignored=_STATIC,
        ),
        Layout("fused", "transformers from version 5", *_FUSED, "", _FLOAT),
        Layout(
            "fused_scale_inv", "transformers from version 5: FP8 and FP4",
            *_FUSED, "",
            (WeightFormat.FP8_BLOCK, WeightFormat.FP8_TENSOR, WeightFormat.MXFP4),
            "_scale_inv",
            ignored=("_activation_scale",),
        ),
        Layout(
            "gpt_oss", "gpt-oss: MXFP4",
            *_FUSED, "_blocks", _FP4, "_scales", "_bias", gate_up_interleave=1, blocks=True,
        ),
        Layout(
            "gpt_oss_bf16", "gpt-oss, dequantised",
            *_FUSED, "", _FLOAT, None, "_bias", transposed=True, gate_up_interleave=1,
        ),
    )
}  # fmt: skip


def fail(arg: str, must: str, got: object) -> NoReturn:
    raise ValueError(f"dgmoe_ops.load_moe_layer: {arg} must {must}, got {got}")


def shortened(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def pattern_of(name: str) -> tuple[str, int | None]:
    """A name with "{}" for the expert's number, and that number, of one that has it."""
    number = _NUMBER.match(name)
    if number is None:
        return name, None
    return f"{_EXPERTS}.{name[number.end() :]}", int(number[1])


def below(prefix: str, group: str, names: Iterable[str]) -> list[str]:
    """The names of a group of experts below a prefix, without the prefix."""
    names = list(names)
    before = f"{prefix}." if prefix else ""
    found = [name[len(before) :] for name in names if name.startswith(f"{before}{group}.")]
    if not found:
        parts = (name.partition(f".{group}.") for name in names)
        have = shortened({start for start, middle, _ in parts if middle})
        got = f"{prefix!r}" + (f"; such tensors are below {have}" if have else "")
        fail("prefix", f"have tensors named {before}{group}...", got)
    return found


def _unknown(patterns: set[str], layouts: dict[str, Layout]) -> NoReturn:
    known = "; ".join(
        f"{layout.name} ({layout.models}): {', '.join(sorted(layout.required))}"
        for layout in layouts.values()
    )
    near = max(layouts.values(), key=lambda one: (len(one.required & patterns), -len(one.required)))
    lacks = near.required - patterns
    hint = f" ({near.name} lacks {shortened(lacks)})" if near.required & patterns else ""
    fail("the tensors", f"fit a layout, one of {known}", shortened(patterns) + hint)


def choose(prefix: str, group: str, names: list[str], layout: str | None) -> tuple[Layout, int]:
    """The layout of the names of a group, and the number of experts that they count.

    `layout` names it instead of telling it. Experts with tensors of their own count to the greatest
    number; a tensor that holds all experts counts 0, a group that is one expert 1.
    """
    split = [pattern_of(name) for name in names]
    patterns = {pattern for pattern, _ in split}
    experts = 1 + max((number for _, number in split if number is not None), default=-1)
    layouts = LAYOUTS
    if group != ROUTED:
        experts = 1
        layouts = {name: one.of_group(group) for name, one in LAYOUTS.items() if not one.fused}
    if layout is not None:
        if layout not in layouts:
            fail("layout", f"be one of {', '.join(layouts)}", repr(layout))
        chosen = layouts[layout]
        lacks = chosen.required - patterns
        if lacks:
            must = f"have {shortened(lacks)} below {prefix}"
            fail(f"layout {layout}", must, shortened(patterns))
    else:
        # A layout with scales has the names of the one without them, and more.
        fits = [one for one in layouts.values() if one.required <= patterns]
        if not fits:
            _unknown(patterns, layouts)
        chosen = max(fits, key=lambda one: len(one.required))
    extra = patterns - chosen.known
    if extra:
        named = [name for name in names if pattern_of(name)[0] in extra]
        where = f"the tensors below {f'{prefix}.' if prefix else ''}{group}"
        fail(where, f"be those of layout {chosen.name}", f"{shortened(named)} too")
    return chosen, experts
