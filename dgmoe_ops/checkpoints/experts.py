"""The experts of a layer in a checkpoint, checked as a whole and then read one at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..formats.layouts import ceil_div
from ..formats.weights import WeightFormat
from ..weights.convert import Halves, halves_of, row_of_half
from .names import fail
from .shapes import Matrix, check_bias, check_scale, check_weight
from .source import Files

_ALL = slice(None)


@dataclass(frozen=True)
class Cut:
    """The part of a layer that is read.

    Attributes:
        start, stop: experts.
        low, high: of the intermediate size.
        inter: the whole intermediate size.
    """

    start: int
    stop: int
    low: int
    high: int
    inter: int

    def steps(self, unit: int) -> tuple[int, int]:
        """Low and high in steps of a unit, the last of which may be short."""
        return self.low // unit, ceil_div(self.high, unit)


class Experts:
    """The `Source` (see `_convert`) of w13, or of w2, in a checkpoint."""

    whole = None

    def __init__(
        self,
        files: Files,
        prefix: str,
        stems: tuple[str, ...],
        matrix: Matrix,
        cut: Cut,
        device: torch.device,
        like: str,
    ) -> None:
        """Check what will be read; sizes came from the tensor `like`.

        Raises:
            ValueError: a dtype or shape is not what it must be, or the part of the intermediate
                size does not take whole scales.
        """
        self._files, self._prefix, self._stems = files, prefix, stems
        self._matrix, self._cut, self._layout = matrix, cut, matrix.layout
        self._is_w2 = stems == (matrix.layout.w2,)
        self._halves = 1 if self._is_w2 else 2
        self.form, self.device = matrix.form, device
        self.experts = cut.stop - cut.start
        self._check(like)

    def _names(self, end: str, expert: int) -> list[str]:
        return [self._prefix + stem.format(expert) + end for stem in self._stems]

    def _check(self, like: str) -> None:
        layout, matrix, cut = self._layout, self._matrix, self._cut
        for expert in (0,) if layout.fused else range(cut.start, cut.stop):
            weights = self._names(layout.weight, expert)
            for weight in weights:
                check_weight(self._files, weight, matrix, like)
            if layout.scale is not None:
                for scale, weight in zip(self._names(layout.scale, expert), weights, strict=True):
                    check_scale(self._files, scale, matrix, weight)
            if layout.bias is not None:
                check_bias(self._files, *self._names(layout.bias, expert), matrix, *weights)
        unit = matrix.scale_units[1 if self._is_w2 else 0]
        if layout.scale is None or matrix.form is WeightFormat.FP8_TENSOR or unit == 1:
            return
        if any(side % unit and side != cut.inter for side in (cut.low, cut.high)):
            must = f"be cut into whole groups of {unit}, which share scales,"
            must += f" along the intermediate size of {cut.inter}"
            got = f"a part from {cut.low} to {cut.high}"
            fail(self._names(layout.scale, cut.start)[0], must, got)

    def _read(self, name: str, expert: int, rows: slice, columns: slice, end: str) -> torch.Tensor:
        lead = (expert,) if self._layout.fused else ()
        if self._layout.transposed and end == self._layout.weight:
            return self._files.read(name, *lead, columns, rows).t()
        return self._files.read(name, *lead, rows, columns)

    def _matrices(self, end: str, expert: int, row_unit: int, column_unit: int) -> Halves:
        """The halves of an expert's values or scales, where the file is mapped."""
        names = self._names(end, expert)
        if self._is_w2:
            columns = slice(*self._cut.steps(column_unit))
            return (self._read(names[0], expert, _ALL, columns, end),)
        if self._layout.gate_up_interleave:
            both = slice(2 * self._cut.low, 2 * self._cut.high)
            rows = self._read(names[0], expert, both, _ALL, end)
            return halves_of(rows, 2, self._layout.gate_up_interleave)
        low, high = self._cut.steps(row_unit)
        if len(names) == 2:
            return tuple(self._read(one, expert, slice(low, high), _ALL, end) for one in names)
        up = ceil_div(self._cut.inter, row_unit)
        starts = (0, up)
        return tuple(
            self._read(names[0], expert, slice(at + low, at + high), _ALL, end) for at in starts
        )

    def weight(self, expert: int) -> Halves:
        at = expert + self._cut.start
        halves = self._matrices(self._layout.weight, at, 1, self._matrix.values_per_element)
        if self._layout.blocks:
            halves = tuple(half.flatten(-2) for half in halves)
        return tuple(half.to(self.device) for half in halves)

    def scale(self, expert: int) -> Halves | None:
        end, at = self._layout.scale, expert + self._cut.start
        if end is None:
            return None
        if self.form is WeightFormat.FP8_TENSOR:
            read = [self._files.read(name) for name in self._names(end, at)]
            flat = [(one[at] if self._layout.fused else one).reshape(-1) for one in read]
            halves = torch.cat(flat).expand(self._halves).unbind()
        else:
            halves = self._matrices(end, at, *self._matrix.scale_units)
        wide = (half.float() if half.dtype == torch.bfloat16 else half for half in halves)
        return tuple(half.to(self.device) for half in wide)

    def scale_place(self, expert: int, half: int, at: tuple[int, ...]) -> tuple[str, tuple]:
        """The tensor of an element of the scales, and the index in it, as the file has it."""
        expert += self._cut.start
        names = self._names(self._layout.scale or "", expert)
        name = f"dgmoe_ops.load_moe_layer: {names[half if len(names) == 2 else 0]}"
        lead = (expert,) if self._layout.fused else ()
        if self.form is WeightFormat.FP8_TENSOR:
            return name, lead
        row, column = at
        row_unit, column_unit = self._matrix.scale_units
        if self._is_w2:
            return name, (*lead, row, column + self._cut.steps(column_unit)[0])
        if self._layout.gate_up_interleave:
            place = row_of_half(half, row, 0, self._layout.gate_up_interleave)
            return name, (*lead, 2 * self._cut.low + place, column)
        row += self._cut.steps(row_unit)[0]
        if len(names) == 1:
            row += half * ceil_div(self._cut.inter, row_unit)
        return name, (*lead, row, column)

    def bias(self) -> torch.Tensor | None:
        """The biases of all experts that are read; those of w13 stand as its rows do."""
        if self._layout.bias is None:
            return None
        (name,) = self._names(self._layout.bias, 0)
        columns = _ALL if self._is_w2 else slice(2 * self._cut.low, 2 * self._cut.high)
        part = self._files.read(name, slice(self._cut.start, self._cut.stop), columns)
        return part.to(self.device, copy=True)
