"""prepare_weights of quantised checkpoints and export_weights: every conversion, to the bit."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from helpers import E8M0, F8, bits, same_bits
from torch.utils._python_dispatch import TorchDispatchMode

import dgmoe_ops
from dgmoe_ops import export_weights, prepare_weights

SHAPES = [(2, 256, 128), (3, 200, 72), (1, 576, 130), (2, 64, 32)]
PACKED = ("cpu", "sm90", "sm100", "sm120")
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def spread(shape: tuple[int, ...], low: int = 110, width: int = 7) -> torch.Tensor:
    """Exponent bytes; a scale differs from its neighbours, experts and blocks from each other."""
    e, n, g = (torch.arange(size) for size in shape)
    inside = (n.view(-1, 1) * 5 + g % 4 * 3) % (width + 1)
    block = e.view(-1, 1, 1) * 3 + (n // 128).view(-1, 1) * 7 + g // 4
    return (low + inside + block % 23).to(torch.uint8)


def blocks(shape: tuple[int, ...], low: int = 90) -> torch.Tensor:
    """Exponent bytes, no two alike in one expert."""
    count = shape[1] * shape[2]
    return (
        torch.stack([(low + e + torch.arange(count)) for e in range(shape[0])]).view(shape).byte()
    )


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def mxfp4(experts: int, hidden: int, inter: int):
    w13 = torch.arange(experts * inter * hidden).view(experts, 2 * inter, hidden // 2)
    w2 = torch.arange(experts * hidden * inter // 2).view(experts, hidden, inter // 2) * 7
    return (
        w13.to(torch.uint8).view(torch.int8),
        spread((experts, 2 * inter, ceil(hidden, 32))),
        w2.to(torch.uint8).view(torch.int8),
        spread((experts, hidden, ceil(inter, 32)), 100),
    )


def random_f8(shape, seed: int) -> torch.Tensor:
    code = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).byte()
    return torch.where(code % 128 == 127, code - 1, code).view(F8)


def mxfp8(experts: int, hidden: int, inter: int):
    return (
        random_f8((experts, 2 * inter, hidden), 1),
        spread((experts, 2 * inter, ceil(hidden, 32))),
        random_f8((experts, hidden, inter), 2),
        spread((experts, hidden, ceil(inter, 32)), 100),
    )


def fp8_block(experts: int, hidden: int, inter: int):
    """With power-of-two scales."""
    return (
        random_f8((experts, 2 * inter, hidden), 1),
        blocks((experts, 2 * ceil(inter, 128), ceil(hidden, 128))),
        random_f8((experts, hidden, inter), 2),
        blocks((experts, ceil(hidden, 128), ceil(inter, 128)), 120),
    )


def as_float(byte: torch.Tensor) -> torch.Tensor:
    return byte.view(E8M0).float()


def same_weights(a, b) -> bool:
    return all(
        x is y or (same_bits(x, y) and x.stride() == y.stride())
        for x, y in zip(a.tensors, b.tensors, strict=True)
    )


def values4(code: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
    pairs = code.view(torch.uint8).long()
    table = torch.tensor([*VALUES, *(-v for v in VALUES)], dtype=torch.float64)
    dense = table[torch.stack((pairs % 16, pairs // 16), -1).flatten(-2)]
    return dense * as_float(byte).double().repeat_interleave(32, -1)[..., : dense.shape[-1]]


def block_values(q: torch.Tensor, scale: torch.Tensor, halves: int) -> torch.Tensor:
    experts, n, k = q.shape
    rows = scale.repeat_interleave(128, 1).view(experts, halves, -1, scale.shape[-1])
    rows = rows[:, :, : n // halves].reshape(experts, n, -1)
    return q.float().double() * rows.double().repeat_interleave(128, -1)[..., :k]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", PACKED)
@pytest.mark.parametrize(("recipe", "make"), [("mxfp4", mxfp4), ("mxfp8", mxfp8)])
def test_mx_checkpoints_come_back_to_the_bit(shape, target, recipe, make) -> None:
    if (recipe, target) == ("mxfp8", "sm120"):
        pytest.skip("nobody runs it there")
    checkpoint = make(*shape)
    prepared = prepare_weights(*checkpoint, recipe, target)
    experts, hidden, inter = shape
    n, columns = prepared.w13.shape[1], ceil(hidden, 128) * 128
    assert n == 2 * ceil(inter, 128) * 128
    assert prepared.w13.shape[2] == columns // (2 if recipe == "mxfp4" else 1)
    assert prepared.w13_scale.shape == (experts, n, columns // 128)
    assert prepared.w13_scale.stride() == (n * columns // 128, 1, n)
    for found, given in zip(export_weights(prepared), checkpoint, strict=True):
        assert same_bits(found, given)
    again = prepare_weights(*export_weights(prepared), recipe, target)
    assert same_weights(again, prepared)
    assert prepare_weights(prepared, recipe=recipe, target=target) is prepared


@pytest.mark.parametrize(("recipe", "make"), [("mxfp4", mxfp4), ("mxfp8", mxfp8)])
def test_every_kind_of_scale_and_every_byte(recipe, make) -> None:
    w13, byte13, w2, byte2 = make(2, 256, 128)
    byte13 = (torch.arange(byte13.numel()) % 255).to(torch.uint8).view_as(byte13)
    whole = prepare_weights(w13, byte13, w2, byte2, recipe, "sm100")
    assert same_bits(export_weights(whole)[1], byte13)
    for kind in (lambda b: b.view(E8M0), as_float):
        other = prepare_weights(w13, kind(byte13), w2, kind(byte2), recipe, "sm100")
        assert same_weights(other, whole)


def test_packed_words_hold_the_bytes_in_order() -> None:
    prepared = prepare_weights(*mxfp8(2, 200, 72), "mxfp8", "sm100")
    byte = spread((2, 144, 7))
    word = prepared.w13_scale.long() & 0xFFFFFFFF
    assert int(word[1, 5, 1]) >> 24 == 127  # padding
    for group in range(7):
        found = word[:, :, group // 4] >> 8 * (group % 4) & 255
        assert torch.equal(found[:, :72], byte[:, :72, group].long())
        assert torch.equal(found[:, 128:200], byte[:, 72:, group].long())
        assert (found[:, 72:128] == 127).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", ["cpu", "sm90", "sm100", "sm120"])
def test_mxfp4_to_block_fp8_is_exact(shape, target) -> None:
    checkpoint = mxfp4(*shape)
    prepared = prepare_weights(*checkpoint, "fp8_block", target)
    packed = target in ("sm100", "sm120")
    assert prepared.w13_scale.dtype == (torch.int32 if packed else torch.float32)
    w13, s13, w2, s2 = export_weights(prepared)
    assert torch.equal(block_values(w13, s13, 2), values4(*checkpoint[:2]))
    assert torch.equal(block_values(w2, s2, 1), values4(*checkpoint[2:]))
    assert same_weights(prepare_weights(w13, s13, w2, s2, "fp8_block", target), prepared)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("target", ["cpu", "sm90", "sm100", "sm120"])
@pytest.mark.parametrize("kind", ["float", "uint8", "e8m0"])
def test_power_of_two_blocks_come_back_to_the_bit(shape, target, kind) -> None:
    w13, byte13, w2, byte2 = fp8_block(*shape)
    change = {"float": as_float, "uint8": lambda b: b, "e8m0": lambda b: b.view(E8M0)}[kind]
    prepared = prepare_weights(w13, change(byte13), w2, change(byte2), "fp8_block", target)
    found = export_weights(prepared)
    for one, other in zip(found, (w13, as_float(byte13), w2, as_float(byte2)), strict=True):
        assert same_bits(one, other)
    assert same_weights(prepare_weights(*found, "fp8_block", target), prepared)


def test_every_row_of_a_block_has_its_scale() -> None:
    w13, byte13, w2, byte2 = fp8_block(2, 576, 72)
    prepared = prepare_weights(w13, byte13, w2, byte2, "fp8_block", "sm100")
    assert prepared.w13_scale.shape == (2, 256, 2) and prepared.w2_scale.shape == (2, 576, 1)
    found = dgmoe_ops.ops.unpack_ue8m0(prepared.w13_scale, 5)
    assert torch.equal(found, as_float(byte13).repeat_interleave(128, 1))
    found = dgmoe_ops.ops.unpack_ue8m0(prepared.w2_scale, 1)
    assert torch.equal(found, as_float(byte2).repeat_interleave(128, 1)[:, :576])


def test_a_bar_moves_once_for_each_expert(monkeypatch) -> None:
    moved = []

    @contextlib.contextmanager
    def steps(total, text, wanted):
        moved.append((total, wanted))
        yield lambda: moved.append(1)

    monkeypatch.setattr(dgmoe_ops._progress, "steps", steps)
    prepare_weights(*mxfp8(3, 64, 32), "mxfp8", "cpu", progress=False)
    assert moved == [(6, False), *[1] * 6]


def test_other_blocks_are_requantised_only_where_the_target_wants_it() -> None:
    w13, byte13, w2, byte2 = fp8_block(2, 256, 128)
    s13, s2 = as_float(byte13) * 1.3, as_float(byte2) * 0.7
    s13[0, 1, 0] = 0.25
    plain = prepare_weights(w13, s13, w2, s2, "fp8_block", "sm90")
    assert plain.w13 is not w13 and plain.w13.data_ptr() == w13.data_ptr()
    assert same_bits(plain.w13_scale, s13) and same_bits(plain.w2, w2)
    packed = prepare_weights(w13, s13, w2, s2, "fp8_block", "sm100")
    found, scale = export_weights(packed)[:2]
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert same_bits(found[0, 128:, :128], w13[0, 128:, :128]) and float(scale[0, 1, 0]) == 0.25
    error = (block_values(found, scale, 2) - block_values(w13, s13, 2)).abs()
    bound = block_values(w13, s13, 2).abs() * 2.0**-4
    assert (error <= bound + as_float(byte13).max().double() * 2.0**-8).all() and error.any()
    for e in range(2):
        q, byte = dgmoe_ops.ops.requant_block_ue8m0(w13[e], s13[e])
        assert same_bits(found[e], q) and same_bits(scale[e], as_float(byte))


@pytest.mark.parametrize("target", ["sm90", "sm100"])
@pytest.mark.parametrize("shape13", [(), (2,), (2, 1), (2, 2)])
def test_per_tensor_scales_become_blocks(target, shape13) -> None:
    w13, _, w2, _ = fp8_block(2, 200, 160)
    count = torch.Size(shape13).numel()
    s13 = torch.tensor([0.5, 0.25, 2.0, 4.0])[:count].view(shape13)
    prepared = prepare_weights(w13, s13, w2, torch.tensor([1.0, 8.0]), "fp8_block", target)
    found13, scale13, found2, scale2 = export_weights(prepared)
    assert same_bits(found13, w13) and same_bits(found2, w2)
    per = {0: [[0.5] * 2] * 2, 1: [[0.5] * 2, [0.25] * 2], 2: [[0.5, 0.25], [2.0, 4.0]]}
    wanted = torch.tensor(per[1 if shape13 == (2, 1) else len(shape13)])
    assert torch.equal(scale13, wanted.repeat_interleave(2, 1)[..., None].expand(2, 4, 2))
    assert torch.equal(scale2, torch.tensor([1.0, 8.0]).view(2, 1, 1).expand(2, 2, 2))


def test_a_per_tensor_scale_that_is_no_power_of_two() -> None:
    w13, _, w2, _ = fp8_block(1, 128, 128)
    s13, s2 = torch.tensor([[0.0117, 0.5]]), torch.tensor([0.3])
    kept = prepare_weights(w13, s13, w2, s2, "fp8_block", "sm90")
    assert same_bits(kept.w13, w13) and kept.w13_scale.flatten().tolist() == s13.flatten().tolist()
    packed = prepare_weights(w13, s13, w2, s2, "fp8_block", "sm100")
    found, scale, _, _ = export_weights(packed)
    assert same_bits(found[:, 128:], w13[:, 128:]) and float(scale[0, 1, 0]) == 0.5
    q, byte = dgmoe_ops.ops.requant_block_ue8m0(w13[0, :128], s13[:, :1])
    assert same_bits(found[0, :128], q) and float(scale[0, 0, 0]) == float(as_float(byte))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", ["bf16", "fp8_block", "mxfp8", "mxfp4"])
def test_floats(recipe, dtype) -> None:
    g = torch.Generator().manual_seed(3)
    w13 = torch.randn(2, 2 * 72, 200, generator=g).to(dtype)
    w2 = torch.randn(2, 200, 72, generator=g).to(dtype)
    prepared = prepare_weights(w13, None, w2, None, recipe, "sm100")
    found = export_weights(prepared)
    assert same_weights(prepare_weights(*found, recipe, "sm100"), prepared)
    if recipe == "bf16":
        assert same_bits(found[0], w13.bfloat16()) and same_bits(found[2], w2.bfloat16())
    elif recipe != "fp8_block":
        for search in (False, True) if recipe == "mxfp4" else (False,):
            kwargs = {"search": search} if recipe == "mxfp4" else {}
            found = export_weights(prepare_weights(w13, None, w2, None, recipe, "cpu", **kwargs))
            wanted = getattr(dgmoe_ops.ops, f"quant_{recipe}")(w13, **kwargs)
            assert same_bits(found[0], wanted[0]) and same_bits(found[1], wanted[1])


def test_an_odd_hidden_size_takes_one_column_more() -> None:
    w13, w2 = torch.randn(1, 8, 33), torch.randn(1, 33, 4)
    prepared = prepare_weights(w13, None, w2, None, "mxfp4", "cpu")
    assert prepared.w13.shape == (1, 256, 64) and prepared.w2.shape == (1, 40, 64)
    assert export_weights(prepared)[0].shape == (1, 8, 17)


def test_packed_tensors_again() -> None:
    for recipe, make in (("mxfp4", mxfp4), ("mxfp8", mxfp8), ("fp8_block", fp8_block)):
        once = prepare_weights(*make(2, 256, 256), recipe, "sm100")
        other = "cpu" if recipe == "mxfp8" else "sm120"
        assert same_weights(prepare_weights(*once.tensors, recipe, other), once)
    with pytest.raises(ValueError, match="w13 must be prepared for recipe fp8_block and target sm"):
        prepare_weights(*once.tensors, "fp8_block", "sm90")
    w13, s13, w2, s2 = once.tensors
    with pytest.raises(ValueError, match="w2_scale must be packed UE8M0 int32, as the other"):
        prepare_weights(w13, s13, w2, torch.ones(2, 2, 2), "fp8_block", "sm100")
    with pytest.raises(ValueError, match="w2_scale must have strides .*MN-major, got"):
        prepare_weights(
            w13, s13, w2, s2.clone(memory_format=torch.contiguous_format), "fp8_block", "sm100"
        )


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "mxfp4"])
def test_no_experts(recipe) -> None:
    w13 = torch.zeros(0, 64, 32)
    prepared = prepare_weights(w13, None, torch.zeros(0, 32, 32), None, recipe, "sm100")
    assert prepared.w13.shape[0] == prepared.w13_scale.shape[0] == 0
    assert export_weights(prepared)[0].shape[:2] == (0, 64)


class Largest(TorchDispatchMode):
    """The sizes in bytes of everything that is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.is_view or func._schema.is_mutable:
            return out
        outs = out if isinstance(out, tuple) else (out,)
        self.sizes += [t.untyped_storage().nbytes() for t in outs if isinstance(t, torch.Tensor)]
        return out


@pytest.mark.parametrize(
    ("make", "recipe", "target"),
    [
        (mxfp4, "mxfp4", "sm100"),
        (mxfp4, "fp8_block", "sm90"),
        (mxfp8, "mxfp8", "sm100"),
        (fp8_block, "fp8_block", "sm100"),
        (None, "mxfp4", "sm100"),
        (None, "fp8_block", "sm100"),
    ],
)
def test_beyond_the_result_it_takes_one_expert(make, recipe, target) -> None:
    experts, hidden, inter = 24, 200, 72
    if make is None:
        w13, w2 = torch.randn(experts, 2 * inter, hidden), torch.randn(experts, hidden, inter)
        args = (w13, None, w2, None)
    else:
        args = make(experts, hidden, inter)
    with Largest() as seen:
        prepared = prepare_weights(*args, recipe, target)
    results = {t.untyped_storage().nbytes() for t in prepared.tensors}
    one = 2 * 128 * 256 * 4  # a padded w13 of one expert in float32
    assert max(seen.sizes) in results
    assert max(size for size in seen.sizes if size not in results) <= one


@pytest.mark.parametrize(
    ("make", "recipe", "target", "spoil", "says"),
    [
        (mxfp8, "mxfp8", "sm120", {}, "target must be one of cpu, sm90, sm100 for recipe mxfp8"),
        (mxfp8, "mxfp4", "cpu", {}, "w13 must be one of .*int8.*, got float8_e4m3fn"),
        (mxfp4, "bf16", "cpu", {}, "w13 must be one of bfloat16, float32, got int8"),
        (
            mxfp8,
            "fp8_block",
            "cpu",
            {},
            r"w13_scale must be .*\(2, 2, 2\).*, got uint8 .*8",
        ),
        (
            mxfp4,
            "mxfp4",
            "cpu",
            {1: 3.0},
            r"w13_scale must hold powers of two.*3.0 at \[1, 2, 3\]",
        ),
        (mxfp4, "mxfp4", "cpu", {1: -1.0}, "w13_scale must hold powers of two.*got -1.0"),
        (mxfp4, "mxfp4", "cpu", {1: 2.0**-128}, "w13_scale must hold powers of two.*got 2.9"),
        (mxfp8, "mxfp8", "cpu", {3: float("inf")}, "w2_scale must hold powers of two.*got inf"),
        (mxfp4, "fp8_block", "cpu", {3: 0.3}, "w2_scale must hold powers of two.*got 0.3"),
    ],
)
def test_bad_input(make, recipe, target, spoil, says) -> None:
    arguments = list(make(2, 256, 128))
    for i, value in spoil.items():
        arguments[i] = as_float(arguments[i])
        arguments[i][1, 2, 3] = value
    with pytest.raises(ValueError, match=says):
        prepare_weights(*arguments, recipe, target)


BAD_FLOATS = (float("nan"), float("inf"), -1.0, 0.0, -0.0)


def per_tensor(experts: int, hidden: int, inter: int, shape: tuple[int, ...]):
    w13, _, w2, _ = fp8_block(experts, hidden, inter)
    return w13, torch.full(shape, 0.3), w2, torch.full((experts,), 0.3)


@pytest.mark.parametrize("value", [*BAD_FLOATS, 255])
@pytest.mark.parametrize(
    ("make", "recipe"),
    [
        (mxfp4, "mxfp4"),
        (mxfp8, "mxfp8"),
        (mxfp4, "fp8_block"),
        (fp8_block, "fp8_block"),
    ],
)
@pytest.mark.parametrize("target", ["cpu", "sm100"])
def test_what_is_no_scale_is_named(make, recipe, target, value) -> None:
    """Each kind of scale of each weight, whether it is converted or shared; byte 0 is 2^-127."""
    for arg, i, at in (("w13", 1, (1, 1, 1)), ("w2", 3, (1, 0, 0))):
        given = list(make(2, 256, 128))
        given[1][0, 0, 0] = given[3][0, 0, 0] = 0 if make is not fp8_block else 1
        if value == 255:
            kinds = [given[i], given[i].view(E8M0)]
            given[i][at] = value
        else:
            kinds = [as_float(given[i])]
            kinds[0][at] = value
        for kind in kinds:
            given[i] = kind
            with pytest.raises(ValueError) as caught:
                prepare_weights(*given, recipe, target)
            says = str(caught.value)
            assert says.startswith(f"dgmoe_ops.prepare_weights: {arg}_scale must hold "), says
            assert says.endswith(f", got {value} at {list(at)}"), says


@pytest.mark.parametrize("value", BAD_FLOATS)
@pytest.mark.parametrize("shape", [(), (2,), (2, 1), (2, 2)])
@pytest.mark.parametrize("target", ["cpu", "sm100"])
def test_what_is_no_scale_of_a_tensor_is_named(target, shape, value) -> None:
    given = per_tensor(2, 256, 128, shape)
    at = tuple(size - 1 for size in shape)
    given[1][at] = value
    place = f" at {list(at)}" if at else ""
    match = rf"w13_scale must hold positive and finite scales, got {value}{re.escape(place)}$"
    with pytest.raises(ValueError, match=match):
        prepare_weights(*given, "fp8_block", target)


@pytest.mark.parametrize("interleave", [1, 8])
def test_rows_in_turns_are_named_as_they_stand(interleave: int) -> None:
    for row in (0, 5, 63, 200):
        w13, s13, w2, s2 = mxfp8(2, 256, 128)
        s13[1, row, 2] = 255
        with pytest.raises(ValueError, match=rf"w13_scale .*, got 255 at \[1, {row}, 2\]$"):
            prepare_weights(w13, s13, w2, s2, "mxfp8", "sm100", gate_up_interleave=interleave)


def test_prepared_words_hold_no_nan() -> None:
    made = prepare_weights(*mxfp8(2, 256, 128), "mxfp8", "sm100")
    made.w2_scale[1, 3, 0] = 0x7F7FFF7F
    with pytest.raises(ValueError, match=r"w2_scale must hold no .*255.*the word at \[1, 3, 0\]"):
        prepare_weights(*made.tensors, "mxfp8", "sm100")


def test_wrong_grids_and_devices_name_both_sides() -> None:
    w13, s13, w2, s2 = mxfp4(2, 256, 128)
    says = r"w2_scale must be .*\(2, 256, 4\), for int8 w2 \(2, 256, 64\), got uint8 \(2, 256, 3\)"
    with pytest.raises(ValueError, match=says):
        prepare_weights(w13, s13, w2, s2[..., :3], "mxfp4")
    says = r"w2 must have shape \(2, 256, 64\), as w13 is \(2, 256, 128\), got \(2, 256, 32\)"
    with pytest.raises(ValueError, match=says):
        prepare_weights(w13, s13, w2[..., :32], s2, "mxfp4")
    with pytest.raises(
        ValueError, match=r"w2_scale must be on the device of w13 \(cpu\), got meta"
    ):
        prepare_weights(w13, s13, w2, s2.to("meta"), "mxfp4")
    prepared = prepare_weights(w13, s13, w2, s2, "mxfp4", "sm100")
    with pytest.raises(ValueError, match="recipe mxfp8 and target sm100, got mxfp4, sm100"):
        prepare_weights(prepared, recipe="mxfp8", target="sm100")
    assert bits(prepared.w13).shape == (2, 256, 128)
