"""Exact bytes of every tensor that a call allocates, stage by stage, from sizes alone.

The sizes are those of the allocations in `csrc/<room>/<op>.h`; the tests hold them against tensors
that the ops returned and against the allocator. The result counts, as without `out=`, and so does
the workspace of our own GEMMs on SM90. Left out: copies of inputs whose rows are not
aligned, and the workspaces of the row ranking on CUDA, of the GEMM library and of the CPU kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..backends import platforms
from ..backends.heuristics import gemm_plan
from ..formats.gemm import GroupedGemmSpec
from ..formats.layouts import (
    TMA_ELEMENTS,
    Layout,
    LayoutFacts,
    ScaleLayout,
    all_rows,
    ceil_div,
    expected_rows,
    gemm_rows,
    index_size,
    round_up,
    scale_sizes_and_strides,
    slabs,
)
from ..formats.recipes import Recipe, scale_recipes
from ..weights.prepare import padded_sizes

BF16, WORD = 2, 4  #: bytes


@dataclass(frozen=True)
class Call:
    """The sizes of one call of the layer.

    Attributes:
        tokens, hidden, intermediate, top_k: before any padding.
        experts: over all ranks.
        local_experts: on this rank.
        recipe: what the weights and activations are made of.
        packed: whether scales are packed UE8M0, as SM100 and SM120 take them; those of mxfp8 and
            mxfp4 are anyway.
        arch: what it runs on, as `platforms` names it; decides the workspaces of the GEMMs.
    """

    tokens: int
    experts: int
    local_experts: int
    hidden: int
    intermediate: int
    top_k: int
    recipe: Recipe
    packed: bool = False
    arch: int | str = "cpu"

    @property
    def padded_hidden(self) -> int:
        return self._padded[0]

    @property
    def out_columns(self) -> int:
        """Columns of GEMM2's result: rows of the prepared w2."""
        return self._padded[1]

    @property
    def padded_inter(self) -> int:
        return self._padded[2]

    @property
    def _padded(self) -> tuple[int, int, int]:
        return padded_sizes(self.recipe, self.hidden, self.intermediate)

    @property
    def value_bytes(self) -> int:
        """Of an activation; those of a weight are the recipe's `row_bytes`."""
        return self.recipe.activation_dtype.itemsize

    @property
    def packs(self) -> bool:
        return self.packed or self.recipe.mx

    @property
    def form(self) -> ScaleLayout:
        return ScaleLayout.PACKED_UE8M0 if self.packs else ScaleLayout.MN_MAJOR

    def facts(self, layout: str, memory_bytes: int | None) -> LayoutFacts:
        """What the layer would look at to choose a layout for this call."""
        return LayoutFacts(
            layout,
            self.tokens,
            self.top_k,
            self.local_experts,
            self.padded_hidden,
            self.padded_inter,
            self.recipe.quantized,
            memory_bytes,
            platforms.legal_layouts(
                self.arch, self.recipe.name, self.recipe.scale_layout_name(self.packed)
            ),
            platforms.arch_name(self.arch),
        )

    def gemm_rows(self, layout: Layout) -> int:
        """m of the GEMMs: rows of a slab, or of all segments."""
        return int(gemm_rows(layout, self.tokens, self.top_k, self.local_experts))

    def rows(self, layout: Layout) -> int:
        """Rows that a layout allocates, whatever the routing."""
        return all_rows(layout, self.local_experts, self.gemm_rows(layout))

    def scale_bytes(self, batch: int | None, rows: int, columns: int, form: ScaleLayout) -> int:
        """Bytes of the storage of activation scales; 0 where nothing is quantised."""
        if not self.recipe.quantized:
            return 0
        groups = ceil_div(columns, self.recipe.group_size)
        words = scale_sizes_and_strides(None, rows, groups, form)[0][1]
        # The slack of a column up to its 16 bytes is allocated too.
        leading = rows if form == ScaleLayout.ROW_MAJOR else round_up(rows, TMA_ELEMENTS)
        return (1 if batch is None else batch) * leading * words * WORD

    def gemm_workspace(self, layout: Layout, n: int, k: int) -> dict[str, int]:
        """Bytes of what a GEMM of ours allocates and drops, by name."""
        plan = gemm_plan(self.gemm_spec(layout, n, k), self.arch)
        return {"workspace": plan.workspace_bytes} if plan.workspace_bytes else {}

    def gemm_spec(self, layout: Layout, n: int, k: int) -> GroupedGemmSpec:
        """One of the call's two GEMMs."""
        expected = expected_rows(self.tokens, self.top_k, self.experts)
        return GroupedGemmSpec(
            layout,
            self.local_experts,
            self.gemm_rows(layout),
            n,
            k,
            expected if layout.has_slabs else 0,
            *scale_recipes(self.recipe, None, k),
            self.recipe.values_per_element == 2,
        )

    def weight_bytes_per_expert(self) -> tuple[int, int]:
        """Bytes of one expert's w13 and w2, scales included."""
        return tuple(
            n * self.recipe.row_bytes(k) + self._weight_scale_bytes(n, k)
            for n, k in (
                (2 * self.padded_inter, self.padded_hidden),
                (self.out_columns, self.padded_inter),
            )
        )

    def _weight_scale_bytes(self, n: int, k: int) -> int:
        if not self.recipe.quantized:
            return 0
        _, rows, columns = self.recipe.weight_scale_shape(1, n, k, self.packs)
        return WORD * columns * (round_up(rows, TMA_ELEMENTS) if self.packs else rows)


@dataclass(frozen=True)
class Stage:
    """What one stage allocates, and what is alive while it runs.

    Attributes:
        name: as in the table of stages.
        tensors: bytes of what it hands on, by name.
        scratch: bytes of what it allocates and drops, by name.
        live: bytes of the layer's tensors while it runs; inputs and weights not counted.
    """

    name: str
    tensors: dict[str, int]
    scratch: dict[str, int]
    live: int


def _operand(call: Call, layout: Layout, columns: int) -> tuple[int, int]:
    """Bytes of a GEMM's input in a layout, and of its scales."""
    batch, m = slabs(layout, call.local_experts), call.gemm_rows(layout)
    values = call.rows(layout) * columns * call.value_bytes
    return values, call.scale_bytes(batch, m, columns, call.form)


def _place_scratch(call: Call, layout: Layout) -> dict[str, int]:
    if layout == Layout.MASKED:  # one kernel counts, places and quantises
        return {}
    counters = {"counts, offsets": 2 * call.local_experts * WORD}
    if call.recipe.quantized:
        form = ScaleLayout.PACKED_UE8M0 if call.packs else ScaleLayout.ROW_MAJOR
        scale = call.scale_bytes(None, call.tokens, call.padded_hidden, form)
        return {"x": call.tokens * call.padded_hidden, "x_scale": scale, **counters}
    if call.padded_hidden != call.hidden:
        return {"x": call.tokens * call.padded_hidden * BF16, **counters}
    return counters


def stages(call: Call, layout: Layout) -> tuple[Stage, ...]:
    """List the stages of a call in a layout with the bytes that each allocates and keeps alive."""
    rows = call.rows(layout)
    x, x_scale = _operand(call, layout, call.padded_hidden)
    act, act_scale = _operand(call, layout, call.padded_inter)
    kept = {
        layout.index_name: WORD * index_size(layout, call.local_experts, call.gemm_rows(layout)),
        "src2dst": WORD * call.tokens * call.top_k,
    }
    scratch = _place_scratch(call, layout)
    gate_up = 2 * call.padded_inter * rows * BF16
    y = rows * call.out_columns * BF16
    out = call.tokens * call.hidden * BF16
    always = sum(kept.values())
    work1 = call.gemm_workspace(layout, 2 * call.padded_inter, call.padded_hidden)
    work2 = call.gemm_workspace(layout, call.out_columns, call.padded_inter)
    return (
        Stage(
            "place",
            {"rows": x, "scale": x_scale, **kept},
            scratch,
            x + x_scale + always + sum(scratch.values()),
        ),
        Stage(
            "gemm1",
            {"gate_up": gate_up},
            work1,
            x + x_scale + always + gate_up + sum(work1.values()),
        ),
        Stage(
            "activation",
            {"act": act, "act_scale": act_scale},
            {},
            always + gate_up + act + act_scale,
        ),
        Stage(
            "gemm2",
            {"y": y},
            work2,
            always + act + act_scale + y + sum(work2.values()),
        ),
        Stage("combine", {"out": out}, {}, always + y + out),
    )


def peak(call: Call, layout: Layout) -> int:
    """The most bytes that the layer's own tensors take at one time."""
    return max(stage.live for stage in stages(call, layout))
