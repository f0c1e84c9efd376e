"""Row counts, paddings and scale strides of the MoE layouts, for ints and SymInts alike.

The same formulas stand in `csrc/common/layout.h`; the contract test holds the two together through
fake and real ops.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from .. import config
from .layout import LAYOUT_ARGUMENTS as LAYOUT_ARGUMENTS
from .layout import Layout
from .symbolic import always

TILE_ROWS = 128  #: rows of the tile within which a GEMM may read past an expert's valid rows
SLAB_ROWS = 256  #: an expert's slab grows in these steps
CONTIG_ALIGNMENT = 128  #: rows to which a segment of the contiguous layout is padded
TMA_ELEMENTS = 4  #: fp32 or int32 elements in the 16 bytes that TMA aligns a leading dimension to
GROUPS_PER_WORD = 4  #: UE8M0 bytes in an int32
WEIGHT_BLOCK = 128
MX_GROUP = 32  #: columns of a row that share a scale in MXFP8 and MXFP4 weights


class ScaleLayout(enum.IntEnum):
    """How a scale tensor stands in memory."""

    ROW_MAJOR = 0  #: float32 (.., mn, groups), contiguous: exchange between ranks
    MN_MAJOR = 1  #: float32 (.., mn, groups), strides (1, round_up(mn, 4)): SM90
    #: int32 (.., mn, ceil(groups / 4)), four exponent bytes a word, MN-major: SM100, SM120
    PACKED_UE8M0 = 2


def ceil_div(a, b):
    return (a + b - 1) // b


def round_up(a, b):
    return ceil_div(a, b) * b


def slab_rows(tokens):
    """Rows an expert's slab has for `tokens` tokens: no expert can get more rows than there are
    tokens."""
    return round_up(tokens, SLAB_ROWS)


def contig_rows(assignments, experts, alignment=CONTIG_ALIGNMENT):
    """The most rows that any routing of `assignments` over `experts` needs, each segment padded to
    `alignment`."""
    if experts == 0:
        return 0
    smaller = min if torch.compiler.is_dynamo_compiling() else torch.sym_min
    used = smaller(assignments, experts)
    return alignment * (used + (assignments - used) // alignment)


def gemm_rows(layout: Layout, tokens, top_k: int, experts: int, alignment=CONTIG_ALIGNMENT):
    """m of the grouped GEMMs for `tokens` tokens on `experts` local experts: the rows of one
    expert's slab, or of all segments, each padded to `alignment`."""
    if layout.has_slabs:
        return slab_rows(tokens)
    return contig_rows(tokens * top_k, experts, alignment)


def slabs(layout: Layout, experts: int) -> int | None:
    """The leading size of what the GEMMs read and write: the experts, or None where there is no
    such dimension."""
    return experts if layout.has_slabs else None


def all_rows(layout: Layout, experts: int, m):
    """Rows of all experts, where the GEMMs have `m`."""
    return experts * m if layout.has_slabs else m


def index_size(layout: Layout, experts: int, m):
    """Elements of the tensor `layout.index_name`: one an expert, or one a row."""
    return experts if layout.has_slabs else m


def expected_rows(tokens, top_k: int, num_experts: int):
    """Rows an expert has under even routing: the hint that DeepGEMM picks its tile by. At least
    1."""
    # Dynamo of 2.10 takes sym_max of plain ints for a graph node; it turns max of SymInts into one.
    larger = max if torch.compiler.is_dynamo_compiling() else torch.sym_max
    return larger(1, ceil_div(tokens * top_k, max(1, num_experts)))


def scale_sizes_and_strides(batch, mn, groups, form: int):
    """Sizes and strides of the scales of `mn` rows in `groups` groups; `batch` None makes two
    dimensions."""
    columns = ceil_div(groups, GROUPS_PER_WORD) if form == ScaleLayout.PACKED_UE8M0 else groups
    leading = round_up(mn, TMA_ELEMENTS)
    if form == ScaleLayout.ROW_MAJOR:
        strides, batch_stride = (columns, 1), mn * columns
    else:
        strides, batch_stride = (1, leading), leading * columns
    if batch is None:
        return (mn, columns), strides
    return (batch, mn, columns), (batch_stride, *strides)


def masked_bytes(tokens, experts: int, hidden: int, inter: int, quantized: bool):
    """Peak bytes of the masked layout: one GEMM's input and output, for the larger of the two GEMMs
    and the step between.

    `hidden` and `inter` are the padded sizes that the weights have. A GEMM's own workspace, which
    sm90_mx_medium_m and sm90_mx_large_m need, does not count: the same sizes choose the same
    layout on every device. `python -m dgmoe_ops plan` counts it.
    """
    value, scale = (1, 4) if quantized else (2, 0)
    gate_up = 2 * inter * 2
    x = hidden * value + (hidden + WEIGHT_BLOCK - 1) // WEIGHT_BLOCK * scale
    act = inter * value + (inter + WEIGHT_BLOCK - 1) // WEIGHT_BLOCK * scale
    return experts * slab_rows(tokens) * max(x + gate_up, gate_up + act, act + hidden * 2)


class LayoutFacts(NamedTuple):
    """What the choice of a layout looks at: nothing that graph capture would change.

    `tokens` may be symbolic. What is compared with it then must hold for its whole range.
    """

    argument: str  #: `layout=` of the call
    tokens: int
    top_k: int
    experts: int  #: of this rank
    hidden: int  #: padded, as the weights have it
    inter: int  #: padded
    quantized: bool
    memory_bytes: int | None  #: of the device; None where a slab buys nothing (CPU)
    #: what the device runs of this recipe and these scales, as `platforms.legal_layouts` has it
    legal: tuple[Layout, ...] = tuple(Layout)
    platform: str = "the device"  #: for people to read

    @property
    def slab_bytes(self) -> int:
        _, tokens, _, experts, hidden, inter, quantized, *_ = self
        return masked_bytes(tokens, experts, hidden, inter, quantized)

    @property
    def budget_bytes(self) -> int:
        return int(self.memory_bytes * config.masked_memory_fraction())


class LayoutLink(NamedTuple):
    """One link of the chain of the choice, in words."""

    name: str
    layout: Layout | None  #: what it decided, None where it passed the choice on
    says: str


class LayoutExplanation(NamedTuple):
    """A choice and the links that led to it."""

    layout: Layout
    decided_by: str
    links: tuple[LayoutLink, ...]


def _decide(facts: LayoutFacts) -> tuple[str, Layout]:
    """The link of the chain that decides, by its name in `_SAYS`, and the layout."""
    argument, tokens, top_k, experts, hidden, inter, quantized, memory_bytes, legal, _ = facts
    if argument != "auto":
        return "argument", Layout(argument)
    override = config.layout_override()
    if override is not None:
        return "DGMOE_LAYOUT", override
    if len(legal) == 1:
        return "platform", legal[0]
    if memory_bytes is None:
        return "device", Layout.CONTIG
    # With so few rows a masked GEMM spends its time walking empty experts.
    if always(tokens * top_k * 8 <= experts):
        return "rows against experts", Layout.CONTIG
    # Where the slab fits, masked wins: it pads no expert to the alignment.
    # Not the properties of `facts`: Dynamo of 2.10 does not follow those of a NamedTuple.
    slab = masked_bytes(tokens, experts, hidden, inter, quantized)
    fits = always(slab <= int(memory_bytes * config.masked_memory_fraction()))
    return "slab against budget", Layout.MASKED if fits else Layout.CONTIG


def _say_platform(facts: LayoutFacts) -> str:
    if not facts.legal:
        return f"{facts.platform} runs it in no layout"
    return f"{facts.platform} runs it in {' and '.join(facts.legal)}"


def _say_device(facts: LayoutFacts) -> str:
    if facts.memory_bytes is None:
        return "the device is a CPU, where a slab buys nothing"
    return f"the device has {facts.memory_bytes:,} bytes"


def _say_rows(facts: LayoutFacts) -> str:
    few = facts.experts // 8
    return (
        f"{facts.tokens * facts.top_k} rows for {facts.experts} experts; up to an eighth of the"
        f" experts ({few}) is contig"
    )


def _say_memory(facts: LayoutFacts) -> str:
    return (
        f"the slab's estimate is {facts.slab_bytes:,} bytes; the budget is {facts.budget_bytes:,}"
        f" ({config.masked_memory_fraction():g} of the device's memory)"
    )


_SAYS: dict[str, Callable[[LayoutFacts], str]] = {
    "argument": lambda facts: f'layout="{facts.argument}"',
    "DGMOE_LAYOUT": lambda facts: str(config.layout_override() or "unset or auto"),
    "platform": _say_platform,
    "device": _say_device,
    "rows against experts": _say_rows,
    "slab against budget": _say_memory,
}


def _legal_choice(facts: LayoutFacts) -> Layout:
    decided_by, layout = _decide(facts)
    legal, platform = facts[-2:]
    if legal and layout not in legal:
        arg = "layout" if decided_by == "argument" else decided_by
        names = " or ".join([name.value for name in legal])
        raise ValueError(
            f"dgmoe_ops.layouts: {arg} must be {names} on {platform}, got {layout.value}"
        )
    return layout


@functools.lru_cache(maxsize=4096)
def _decided(facts: LayoutFacts, override: Layout | None, fraction: float) -> Layout:
    """The choice for facts and settings that are plain numbers."""
    return _legal_choice(facts)


def choose_layout(facts: LayoutFacts) -> Layout:
    """Choose between the masked and the contiguous layout from static facts alone.

    The same facts choose the same layout in every call, captured or traced. Where `tokens` is
    symbolic, one choice serves its whole range and no guard is set: masked where the slab of the
    most tokens fits the budget, as under `torch._dynamo.mark_dynamic(x, 0, max=512)` or
    `torch.export.Dim("tokens", max=512)`; contig, which fits in any case, where the range has no
    end.

    Raises:
        ValueError: a `DGMOE_*` variable that the choice reads has no legal value, or the argument
            or `DGMOE_LAYOUT` names a layout that does not run on the device.
    """
    if torch.compiler.is_compiling() or type(facts.tokens) is not int:
        return _legal_choice(facts)
    return _decided(facts, config.layout_override(), config.masked_memory_fraction())


def explain_layout(facts: LayoutFacts) -> LayoutExplanation:
    """Explain what `choose_layout` chooses: each link of the chain in words, up to the one that
    decided.

    The links: the argument, `DGMOE_LAYOUT`, the platform where it runs one layout only, the device
    (a CPU takes contig), rows against experts (contig for very few), the slab against the memory
    budget. A layout that was named and does not run there is explained, too; `choose_layout` and
    the layer refuse it.

    Raises:
        ValueError: a `DGMOE_*` variable that the choice reads has no legal value.
    """
    decided_by, layout = _decide(facts)
    links: list[LayoutLink] = []
    decided = False
    for name, say in _SAYS.items():
        here = name == decided_by
        links.append(
            LayoutLink(name, layout if here else None, "not reached" if decided else say(facts))
        )
        decided = decided or here
    return LayoutExplanation(layout, decided_by, tuple(links))
