"""Scalar arithmetic of the oracles, each from its definition: fma, e4m3, UE8M0, exp, tanh."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

INF_BITS = 0x7F800000
NAN_BITS = 0x7FC00000
E4M3_NAN = 0x7F


def on_cpu(function: Callable) -> Callable:
    """Run an oracle on CPU copies of its tensors; return outputs, strides kept, to their device."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
        device = tensors[0].device

        def home(value):
            return value.detach().cpu() if isinstance(value, torch.Tensor) else value

        result = function(*map(home, args), **{k: home(v) for k, v in kwargs.items()})
        if isinstance(result, tuple):
            return tuple(_to_device(tensor, device) for tensor in result)
        return _to_device(result, device)

    return run


def _to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Tensor.to drops the gaps between columns of an aligned scale, so the whole storage moves.
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    flat = tensor.as_strided((count,), (1,), 0).to(device)
    return flat.as_strided(tensor.shape, tensor.stride())


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def float_bits(x: torch.Tensor) -> torch.Tensor:
    """Return the bits of fp32 values as int64 in [0, 2^32)."""
    return x.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def wrap_int32(bits: torch.Tensor) -> torch.Tensor:
    """Return int64 words in [0, 2^32) as int32 of the same bits."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)


def bits_float(bits: torch.Tensor) -> torch.Tensor:
    return wrap_int32(bits).view(torch.float32)


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return fp32 `a * b + c` with a single rounding.

    The product of two fp32 values is exact in float64. The sum is rounded to odd there, which makes
    the rounding to fp32 that follows the only one that counts (Boldo and Melquiond, 2008).
    """
    product = a.double() * b.double()
    addend = c.double().expand_as(product)
    total = product + addend
    other = total - product
    error = (product - (total - other)) + (addend - other)
    bits = total.view(torch.int64)
    nudge = torch.isfinite(total) & (error != 0) & (bits % 2 == 0)
    outward = (error > 0) == (total > 0)
    odd = torch.where(outward, bits + 1, bits - 1)
    return torch.where(nudge, odd, bits).view(torch.float64).float()


def _f32(literal: str) -> torch.Tensor:
    return torch.tensor(float.fromhex(literal), dtype=torch.float32)


def exp(x: torch.Tensor) -> torch.Tensor:
    """Return the library's fp32 e^x: x = n ln2 + r, a polynomial in r, then 2^n in two steps."""
    clamped = x.clamp(-104.0, 89.0)
    magic = torch.tensor(12582912.0)
    shifted = fma(clamped, _f32("0x1.715476p+0"), magic)
    n = shifted - magic
    r = fma(n, _f32("-0x1.62e400p-1"), clamped)
    r = fma(n, _f32("-0x1.7f7d1cp-20"), r)
    p = _f32("0x1.6a23ccp-10")
    for coefficient in ("0x1.123a20p-7", "0x1.5558f2p-5", "0x1.555492p-3", "0x1.fffffcp-2"):
        p = fma(p, r, _f32(coefficient))
    p = fma(p * r, r, r) + torch.tensor(1.0)
    steps = n.nan_to_num(0.0).to(torch.int64)
    half = steps >> 1
    return p * bits_float((half + 127) << 23) * bits_float((steps - half + 127) << 23)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Return the library's fp32 tanh: x + x^3 p(x^2) near zero, 1 - 2 / (e^2|x| + 1) beyond."""
    magnitude = x.abs()
    square = magnitude * magnitude
    p = _f32("-0x1.9b3070p-8")
    for coefficient in ("0x1.593d10p-6", "-0x1.b9287cp-5", "0x1.110d26p-3", "-0x1.55554ap-2"):
        p = fma(p, square, _f32(coefficient))
    near = fma(p * square, magnitude, magnitude)
    one, two = torch.ones_like(x), torch.full_like(x, 2.0)
    far = one - two / (exp(magnitude + magnitude) + one)
    return torch.copysign(torch.where(magnitude < 0.55, near, far), x)


def gate(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(z) as one quotient."""
    return x / (torch.ones_like(z) + exp(-z))


@functools.lru_cache(maxsize=1)
def _e4m3_values() -> torch.Tensor:
    """Return the 127 finite magnitudes of e4m3fn in ascending code order, float64."""
    values = [
        code * 2.0**-9 if code < 8 else (1 + code % 8 / 8) * 2.0 ** (code // 8 - 7)
        for code in range(127)
    ]
    return torch.tensor(values, dtype=torch.float64)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return e4m3 bytes of fp32 values: nearest, ties to the even code, saturating; NaN is 0x7f."""
    values = _e4m3_values()
    between = (values[1:] + values[:-1]) / 2
    magnitude = x.double().abs().nan_to_num(0.0, posinf=1e300)
    below = torch.searchsorted(between, magnitude.contiguous(), right=False)
    upto = torch.searchsorted(between, magnitude.contiguous(), right=True)
    code = torch.where(below % 2 == 0, below, upto)  # they differ only at a tie
    code = torch.where(torch.signbit(x), code + 0x80, code)
    return torch.where(torch.isnan(x), E4M3_NAN, code).to(torch.uint8)


def decode_e4m3(q: torch.Tensor) -> torch.Tensor:
    """Return float64 values of float8_e4m3fn or of its bytes."""
    code = q.view(torch.uint8).long()
    magnitude = torch.cat([_e4m3_values(), torch.tensor([float("nan")], dtype=torch.float64)])
    return torch.where(code >= 0x80, -1.0, 1.0).double() * magnitude[code % 0x80]


def encode_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """Return 127 plus the exponent of the least power of two not below x, in [1, 254].

    A zero of either sign is 1; 255 where x is infinite, NaN or negative.
    """
    mantissa, exponent = torch.frexp(x.double())
    ceiling = torch.where(mantissa == 0.5, exponent - 1, exponent)
    byte = torch.where(x == 0, 1, (ceiling.long() + 127).clamp(1, 254))
    return torch.where(torch.isfinite(x) & (x >= 0), byte, 255)


def decode_ue8m0(byte: torch.Tensor) -> torch.Tensor:
    """Return fp32 2^(byte - 127); byte 255 is NaN."""
    byte = byte.long()
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return bits_float(torch.where(byte == 255, NAN_BITS, bits))


#: e2m1 values by code; bit 3 is the sign
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def decode_e2m1(code: torch.Tensor) -> torch.Tensor:
    """Return fp32 values of e2m1 codes."""
    return torch.tensor(E2M1)[code.long()]


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return e2m1 codes (int64) of finite fp32 values: nearest, ties to even, saturating."""
    distance = (x.double().abs().unsqueeze(-1) - torch.tensor(E2M1[:8]).double()).abs()
    nearest = distance == distance.amin(-1, keepdim=True)
    # Of two at the same distance, the even one; above 6 the last is the only nearest.
    rank = torch.tensor([0, 5, 1, 6, 2, 7, 3, 8])
    code = torch.where(nearest, rank, 9).argmin(-1)
    return torch.where(torch.signbit(x), code + 8, code)
