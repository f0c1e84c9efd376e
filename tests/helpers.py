"""What the op tests share: views of odd strides and alignment, bit comparison, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch

from dgmoe_ops.layer import stages
from dgmoe_ops.testing import compare
from dgmoe_ops.testing.samples import SAMPLES
from dgmoe_ops.testing.samples._make import with_strides

F8 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
BF16 = torch.bfloat16
#: whether this PyTorch has the headers that the libraries are built with
CAN_BUILD = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
ROOM_OPS = {
    "scale": ("align_scale", "pack_ue8m0", "unpack_ue8m0"),
    "route": ("hash_gate", "topk_gate"),
    "permute": (
        "ep_scatter",
        "moe_dispatch_index",
        "moe_ep_deepgemm_preprocess",
        "quant_group_fp8",
    ),
    "gemm": (
        "gemm_nt_bf16bf16f32",
        "gemm_nt_f8f8bf16",
        "gemm_nt_mxfp8_f8f8bf16",
        "grouped_gemm_nt_bf16_contig",
        "grouped_gemm_nt_bf16_masked",
        "grouped_gemm_nt_f8f8bf16_contig",
        "grouped_gemm_nt_f8f8bf16_masked",
        "tf32_hc_prenorm_gemm",
    ),
    "activation": (
        "silu_and_mul",
        "silu_and_mul_post_quant_contig",
        "silu_and_mul_post_quant_masked",
        "situ_and_mul",
        "situ_and_mul_post_quant_contig",
        "situ_and_mul_post_quant_masked",
    ),
    "combine": ("ep_gather", "post_reorder_deepgemm"),
    "weights": (
        "dequant_mxfp4_to_fp8",
        "quant_block_fp8",
        "quant_mxfp4",
        "quant_mxfp8",
        "requant_block_ue8m0",
    ),
}
OPS = tuple(name for names in ROOM_OPS.values() for name in names)


def op(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.dgmoe, name).default


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The values as integers of their width, so that NaN equals NaN and 0 differs from -0."""
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().cpu().contiguous()
    return flat if flat.dtype == torch.bool else flat.view(views[flat.element_size()])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def storage_words(tensor: torch.Tensor) -> list[int]:
    """The int32 words of the tensor's memory in memory order, strides ignored."""
    count = tensor.untyped_storage().nbytes() // 4
    words = torch.as_strided(tensor.view(torch.int32), (count,), (1,), 0).cpu()
    return [word & 0xFFFFFFFF for word in words.tolist()]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """An equal tensor that is dense in no dimension; bytes 0x7f stand between its elements."""
    sizes = [2 * size + 3 for size in tensor.shape]
    room = torch.full((*sizes, tensor.element_size()), 0x7F, dtype=torch.uint8)
    room = room.to(tensor.device).view(tensor.dtype).squeeze(-1)
    view = room[tuple(slice(1, 1 + 2 * size, 2) for size in tensor.shape)]
    view.copy_(tensor)
    return view


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """An equal contiguous tensor whose memory starts one element past a 16-byte boundary."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    view = room[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def beside(tensor: torch.Tensor, like: torch.Tensor, shared: int):
    """Views of one storage, like both tensors, the first of equal values: their extents share up
    to `shared` times 16 bytes, or only touch."""
    begin = -(-tensor.nbytes // 16) * 16
    begin -= 16 * min(shared, begin // 16)
    room = torch.zeros(begin + tensor.nbytes + like.nbytes, dtype=torch.uint8, device=like.device)
    view = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    view.copy_(tensor)
    return view, room[begin : begin + like.nbytes].view(like.dtype).view(like.shape)


def mn_major(scale: torch.Tensor) -> torch.Tensor:
    """An equal tensor whose second-to-last dimension is dense, padded to 16 bytes."""
    return with_strides(scale, "tma")


def to_f8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().clamp(-448, 448).to(F8)


def random_f8(shape: tuple[int, ...], device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return to_f8(torch.randn(shape, generator=generator) * 16).to(device)


def random_bf16(shape: tuple[int, ...], device: torch.device, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().to(device)


def int32(values: list, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@contextmanager
def refused(name: str, arg: str):
    """Expect the op's own refusal: ValueError, `dgmoe::<op>: <arg> must ..., got ...`."""
    with pytest.raises(ValueError, match=rf"dgmoe::{name}: {re.escape(arg)} must .+, got "):
        yield


def check_random(name: str, draw: Callable, device: torch.device) -> None:
    """Hold the op against its oracle on arguments that hypothesis draws."""
    args, kwargs = SAMPLES[name].random(draw, device)
    compare.check(name, args, kwargs)


def samples(name: str, device: torch.device) -> list[tuple[tuple, dict]]:
    """The ordinary call and the hard ones."""
    return [SAMPLES[name].tiny(device), *SAMPLES[name].edge(device)]


def check_padding_reaches_no_result(
    call: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], x: torch.Tensor, valid: torch.Tensor
) -> None:
    """NaN in the rows of x that are not `valid` changes no bit of the valid rows of `call(x)`."""
    before = call(x)
    x[~valid.to(x.device)] = float("nan")
    for one, other in zip(before, call(x), strict=True):
        assert torch.equal(bits(one)[valid], bits(other)[valid])


def check_views_do_not_matter(
    call: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], x: torch.Tensor, valid: torch.Tensor
) -> None:
    """Equal tensors of other strides and alignment give the same bits of the valid rows."""
    expected = call(x)
    turned = x.transpose(0, 1).contiguous().transpose(0, 1)
    for view in (strided(x), misaligned(x), turned):
        for one, other in zip(call(view), expected, strict=True):
            assert torch.equal(bits(one)[valid], bits(other)[valid])


def replace_gemms(monkeypatch, made: Callable[[str, Callable], Callable]) -> None:
    """Let the layer call `made(name, op)` in place of each of its grouped GEMMs."""
    replaced = {
        layout: ops._replace(
            gemm_bf16=made(layout.op("grouped_gemm_nt_bf16"), ops.gemm_bf16),
            gemm_fp8=made(layout.op("grouped_gemm_nt_f8f8bf16"), ops.gemm_fp8),
        )
        for layout, ops in stages.OPS.items()
    }
    monkeypatch.setattr(stages, "OPS", replaced)
