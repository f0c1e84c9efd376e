"""`DGMOE_SANITY_CHECK=1` looks at every index tensor of every op."""

from __future__ import annotations

import re

import pytest
import torch
from helpers import BF16, OPS, int32, op, random_bf16

from dgmoe_ops.testing.samples import SAMPLES

#: integers that index nothing: packed scales, four exponent bytes a word
SCALES = {"a_scale", "b_scale", "x_scale", "packed"}
#: which op takes which index tensors; a new one must be looked at, too
INDICES = {
    "topk_gate": {"num_tokens", "expert_map"},
    "hash_gate": {"token_ids", "table", "num_tokens", "expert_map"},
    "moe_dispatch_index": {"topk_ids"},
    "moe_ep_deepgemm_preprocess": {"topk_ids"},
    "ep_scatter": {"topk_ids"},
    "grouped_gemm_nt_bf16_contig": {"m_indices"},
    "grouped_gemm_nt_bf16_masked": {"masked_m"},
    "grouped_gemm_nt_f8f8bf16_contig": {"m_indices"},
    "grouped_gemm_nt_f8f8bf16_masked": {"masked_m"},
    "silu_and_mul": {"masked_m", "m_indices"},
    "silu_and_mul_post_quant_contig": {"m_indices"},
    "silu_and_mul_post_quant_masked": {"masked_m"},
    "situ_and_mul": {"masked_m", "m_indices"},
    "situ_and_mul_post_quant_contig": {"m_indices"},
    "situ_and_mul_post_quant_masked": {"masked_m"},
    "ep_gather": {"topk_ids", "output_index"},
    "post_reorder_deepgemm": {"src2dst", "topk_ids"},
}
CASES = [(name, arg) for name, args in INDICES.items() for arg in sorted(args)]


@pytest.fixture
def sane(monkeypatch):
    monkeypatch.setenv("DGMOE_SANITY_CHECK", "1")


def named_arguments(name: str, device: torch.device) -> list[dict]:
    """The arguments of the samples of an op by name."""
    names = [argument.name for argument in op(name)._schema.arguments]
    made = [SAMPLES[name].tiny(device), *SAMPLES[name].edge(device)]
    return [{**dict(zip(names, args, strict=False)), **kwargs} for args, kwargs in made]


def is_index(arg: str, value: object) -> bool:
    integers = (torch.int32, torch.int64)
    return isinstance(value, torch.Tensor) and value.dtype in integers and arg not in SCALES


def test_the_list_is_whole() -> None:
    found = {}
    for name in OPS:
        calls = named_arguments(name, torch.device("cpu"))
        found[name] = {arg for one in calls for arg, value in one.items() if is_index(arg, value)}
    assert {name: args for name, args in found.items() if args} == INDICES


def wrong_values(name: str, arg: str, arguments: dict) -> list[int]:
    """What the values of an index tensor must not be."""
    if arg == "topk_ids":  # any other is an expert of some rank
        return [-2]
    if arg == "expert_map":  # any negative one ends the replicas
        return [2**30] if arguments["num_counts"] else []
    if arg in ("masked_m", "num_tokens", "token_ids", "table"):
        return [-1, 2**30]
    bounded = not name.startswith("si") or arguments.get("bias") is not None
    return [-2, 2**30] if bounded else [-2]


def place_of(arg: str, arguments: dict) -> tuple[int, ...]:
    """Where the wrong value is planted: at the end, but where a token finds it."""
    value = arguments[arg]
    if arg == "table":
        return int(arguments["token_ids"][0]), value.shape[1] - 1
    return tuple(size - 1 for size in value.shape)


def is_clean(name: str, arguments: dict) -> bool:
    """Whether the sanity mode finds nothing: samples also hold what ops tolerate outside it."""
    try:
        op(name)(**arguments)
    except (ValueError, RuntimeError) as error:  # a library on CUDA may refuse the sizes
        return re.search(r" must (hold|be rows of the table)", str(error)) is None
    return True


@pytest.mark.parametrize(("name", "arg"), CASES)
def test_a_wrong_value_is_named(device, sane, name: str, arg: str) -> None:
    planted = set()
    for arguments in named_arguments(name, device):
        value = arguments.get(arg)
        if value is None or value.numel() == 0 or not is_clean(name, arguments):
            continue
        if arg == "token_ids" and arguments["num_tokens"] is not None:
            continue  # rows of padding are not looked at
        if arg == "table" and arguments["token_ids"].numel() == 0:
            continue
        for wrong in wrong_values(name, arg, arguments):
            at = place_of(arg, arguments)
            bad = value.clone()
            bad[at] = wrong
            got = f"got {wrong} at {list(at)}" if at else f"got {wrong}"
            match = rf"dgmoe::{name}: {arg} must .*, {re.escape(got)}$"
            with pytest.raises(ValueError, match=match):
                op(name)(**{**arguments, arg: bad})
            planted.add(wrong)
    assert planted


def test_the_first_of_several_is_named(device, sane) -> None:
    y, weights = torch.zeros(8, 16, dtype=BF16, device=device), torch.ones(40, 2, device=device)
    src2dst = torch.zeros(40, 2, dtype=torch.int64, device=device)
    src2dst[3:, 1] = 8
    src2dst[20:] = -9
    match = r"src2dst must hold rows of y below 8, or -1, got 8 at \[3, 1\]$"
    with pytest.raises(ValueError, match=match):
        torch.ops.dgmoe.post_reorder_deepgemm(y, src2dst, weights)
    with pytest.raises(ValueError, match=match):  # whatever the strides
        torch.ops.dgmoe.post_reorder_deepgemm(y, src2dst.t().contiguous().t(), weights)


@pytest.mark.parametrize("name", ["silu", "situ"])
def test_padding_comes_after_the_rows_of_an_expert(device, sane, name: str) -> None:
    """Otherwise the scales of padding rows in front of them would not be written."""
    quant = getattr(torch.ops.dgmoe, f"{name}_and_mul_post_quant_contig")
    betas = {"beta": 4.0, "linear_beta": 25.0} if name == "situ" else {}
    x = random_bf16((16, 16), device)
    m_indices = int32([0, 0, -1, -1, -1, -1, -1, -1, 2, 2, 2, -1, 1, -1, -1, -1], device)
    quant(x, m_indices, alignment=4, **betas)
    match = "m_indices must hold experts in front of the padding in each block of 8 rows,"
    with pytest.raises(ValueError, match=re.escape(f"{match} got 1 at [12] after -1")):
        quant(x, m_indices, alignment=8, **betas)


def test_off_by_default(device, monkeypatch) -> None:
    monkeypatch.delenv("DGMOE_SANITY_CHECK", raising=False)
    y, weights = torch.zeros(8, 16, dtype=BF16, device=device), torch.ones(1, 1, device=device)
    out = torch.ops.dgmoe.post_reorder_deepgemm(y, int32([[99]], device), weights)
    assert (out == 0).all()


def test_a_capture_looks_at_nothing(device, sane) -> None:
    if device.type != "cuda":
        pytest.skip("graphs are captured on CUDA")
    y, weights = torch.zeros(8, 16, dtype=BF16, device=device), torch.ones(1, 1, device=device)
    src2dst = int32([[99]], device)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = torch.ops.dgmoe.post_reorder_deepgemm(y, src2dst, weights)
    graph.replay()
    assert (out == 0).all()
