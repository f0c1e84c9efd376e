"""Checkpoints for tests: the tensors of a layer named, ordered and written as models have them.

Layers are w13 (experts, 2 * intermediate, ..) with gate rows, then up rows, its scales, w2 and its
scales, as `prepare_weights` takes them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from helpers import E8M0, F8

PREFIX = "model.layers.3.mlp"
PROJ = ("gate_proj", "up_proj", "down_proj")
W123 = ("w1", "w3", "w2")
ENDS = {  # layout: names of the three projections, ends of values and scales
    "qwen3_moe": (PROJ, ".weight", None),
    "deepseek_v3": (PROJ, ".weight", ".weight_scale_inv"),
    "deepseek_v4": (W123, ".weight", ".scale"),
    "mixtral": (W123, ".weight", None),
    "minimax_m2": (W123, ".weight", ".weight_scale_inv"),
    "weight_scale": (PROJ, ".weight", ".weight_scale"),
    "weight_scale_w123": (W123, ".weight", ".weight_scale"),
    "weight_packed": (PROJ, ".weight_packed", ".weight_scale"),
    "weight_packed_w123": (W123, ".weight_packed", ".weight_scale"),
    "fused": (None, "", None),
    "fused_scale_inv": (None, "", "_scale_inv"),
    "gpt_oss": (None, "_blocks", "_scales"),
    "gpt_oss_bf16": (None, "", None),
}


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def coded(shape: tuple[int, int, int], low: int, width: int = 100) -> torch.Tensor:
    """Exponent bytes of which no two neighbours in any direction are alike."""
    e, n, g = (torch.arange(size) for size in shape)
    return (low + (e.view(-1, 1, 1) * 41 + n.view(-1, 1) * 7 + g * 3) % width).to(torch.uint8)


def random_f8(shape, seed: int) -> torch.Tensor:
    code = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed)).byte()
    return torch.where(code % 128 == 127, code - 1, code).view(F8)


def layer(form: str, experts: int, hidden: int, inter: int):
    """A layer whose scales tell their place."""
    g = torch.Generator().manual_seed(hidden + inter)
    shapes = (experts, 2 * inter, hidden), (experts, hidden, inter)
    if form == "bf16":
        w13, w2 = (torch.randn(shape, generator=g).bfloat16() for shape in shapes)
        return w13, None, w2, None
    if form == "mxfp4":
        w13, w2 = (
            torch.randint(0, 256, (*shape[:2], shape[2] // 2), generator=g).byte().view(torch.int8)
            for shape in shapes
        )
    else:
        w13, w2 = (random_f8(shape, i) for i, shape in enumerate(shapes))
    if form == "fp8_block":
        s13 = coded((experts, 2 * ceil(inter, 128), ceil(hidden, 128)), 90, 61)
        s2 = coded((experts, ceil(hidden, 128), ceil(inter, 128)), 90, 61)
        odd = torch.tensor(1.3)  # no power of two
        return w13, s13.view(E8M0).float() * odd, w2, s2.view(E8M0).float() * odd
    if form == "fp8_tensor":
        s13 = coded((experts, 2, 1), 100).view(E8M0).float()[..., 0] * 1.7
        return w13, s13, w2, coded((experts, 1, 1), 110).view(E8M0).float()[:, 0, 0] * 1.1
    s13 = coded((experts, 2 * inter, ceil(hidden, 32)), 60, 131)
    return w13, s13, w2, coded((experts, hidden, ceil(inter, 32)), 70, 127)


def interleaved(rows: torch.Tensor, dim: int = 1, chunk: int = 1) -> torch.Tensor:
    """Halves along a dimension to chunks of both in turn."""
    half = rows.shape[dim] // 2
    gate, up = torch.arange(half), torch.arange(half, 2 * half)
    order = torch.stack((gate.view(-1, chunk), up.view(-1, chunk)), 1).flatten()
    return rows.index_select(dim, order.to(rows.device))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """1-byte dtypes as bytes, which all of torch's functions take."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def named(layout: str, w13, s13, w2, s2, bias=None, prefix: str = PREFIX) -> dict:
    """The tensors of a layer by the names of a layout."""
    projections, end, scale_end = ENDS[layout]
    found: dict[str, torch.Tensor] = {}
    at = f"{prefix}.experts" if prefix else "experts"
    if projections is None:
        for stem, weight, scale in (("gate_up_proj", w13, s13), ("down_proj", w2, s2)):
            both = stem == "gate_up_proj"
            if layout.startswith("gpt_oss") and both:
                weight = interleaved(_bytes(weight)).view(weight.dtype)
                scale = None if scale is None else interleaved(scale)
            if layout == "gpt_oss":
                weight = weight.view(torch.uint8).unflatten(-1, (-1, 16))
            if layout == "gpt_oss_bf16":
                weight = weight.transpose(1, 2)
            found[f"{at}.{stem}{end}"] = weight
            if scale is not None:
                found[f"{at}.{stem}{scale_end}"] = scale
            if bias is not None:
                found[f"{at}.{stem}_bias"] = interleaved(bias[0]) if both else bias[1]
        return found
    for e in range(w13.shape[0]):
        weights = (*w13[e].chunk(2), w2[e])
        scales = (None,) * 3 if s13 is None else (*s13[e].chunk(2), s2[e])
        for stem, weight, scale in zip(projections, weights, scales, strict=True):
            found[f"{at}.{e}.{stem}{end}"] = weight.clone()
            if scale is not None:
                found[f"{at}.{e}.{stem}{scale_end}"] = scale.clone()
    return found


def write(folder: Path, tensors: dict[str, torch.Tensor], shards: int = 1) -> Path:
    """One file, or a folder of shards, which are no layers, with an index."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder / "model.safetensors"
    index = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for i, name in enumerate(tensors) if i % shards == shard}
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder
