"""Run SmolLM2-135M through the MoE layer and measure what splitting and quantising it costs.

    python examples/demo.py                  # on CPU, three to four minutes
    python examples/demo.py --device cuda    # on a GPU

Each dense FFN becomes 12 experts, which every recipe runs in turn. Exits 1 where a bound fails: the
split in bf16 equals the dense FFN, and with all experts fp8_block and mxfp8 keep the perplexity
within 3 % of the dense model's, mxfp4 within 35 %, with searched exponents closer than without.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from smollm2_moe import checkpoint, stages, text, variants
from smollm2_moe.measure import measure
from smollm2_moe.moe import MoEFeedForward
from smollm2_moe.report import Check, Row, print_checks, results_table, stages_table
from smollm2_moe.split import Split, split_ffn
from smollm2_moe.variants import Variant

EXPERTS = 12
WINDOW = 512  # tokens of context; perplexity is measured window by window
CALIBRATION_WINDOWS = 8
BATCH = 1  # every batch is timed: the median wants several
PROMPT = "A library is a place where"
NEW_TOKENS = 12
BOUND_SPLIT = 0.02  # bf16 rounds the input, the weights, GEMM1's result, the product and the output

Advance = Callable[[int], object]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tokens", type=int, default=8 * WINDOW, help=f"to measure on, a multiple of {WINDOW}")
    add("--top-k", type=int, nargs="+", default=[10, 8], help=f"experts a token, of {EXPERTS}")
    add("--device", type=torch.device, default="cpu", help="cpu or cuda")
    add("--quick", action="store_true", help=f"{2 * WINDOW} tokens and one routed row")
    args = parser.parse_args()
    if args.quick:
        args.tokens, args.top_k = 2 * WINDOW, args.top_k[:1]
    if args.tokens <= 0 or args.tokens % WINDOW:
        parser.error(f"--tokens must be a positive multiple of {WINDOW}, got {args.tokens}")
    if not all(1 <= k <= EXPERTS for k in args.top_k):
        parser.error(f"--top-k must be 1 to {EXPERTS}, got {args.top_k}")
    return args


@torch.no_grad()
def ffn_inputs(model, windows: torch.Tensor, advance: Advance) -> list[torch.Tensor]:
    """Read the windows and return what each layer's FFN reads then: (tokens, hidden) a layer."""
    layers = model.model.layers
    seen: list[list[torch.Tensor]] = [[] for _ in layers]
    hooks = [
        layer.mlp.register_forward_pre_hook(
            lambda _, inputs, kept=kept: kept.append(inputs[0].flatten(0, 1))
        )
        for layer, kept in zip(layers, seen, strict=True)
    ]
    for ids in windows:
        model.model(ids[None], use_cache=False)
        advance(1)
    for hook in hooks:
        hook.remove()
    return [torch.cat(kept) for kept in seen]


@torch.no_grad()
def split_error(ffn, split: Split, x: torch.Tensor) -> float:
    """Largest difference of the layer, all experts in bf16, from the dense FFN, over the largest
    value of the dense one."""
    expected = ffn(x).float()
    got = MoEFeedForward(split.router, variants.prepare(split, variants.BF16), EXPERTS)(x).float()
    return ((got - expected).abs().max() / expected.abs().max()).item()


def split_model(
    ffns: list, inputs: list[torch.Tensor], advance: Advance
) -> tuple[list[Split], float]:
    """Split every FFN; return the splits and the largest `split_error`."""
    splits, worst = [], 0.0
    for ffn, x in zip(ffns, inputs, strict=True):
        weights = (ffn.gate_proj.weight, ffn.up_proj.weight, ffn.down_proj.weight)
        splits.append(split_ffn(*weights, x, EXPERTS))
        worst = max(worst, split_error(ffn, splits[-1], x[:WINDOW]))
        advance(1)
    return splits, worst


def use_experts(model, splits: list[Split], variant: Variant, advance: Advance) -> int:
    """Put MoE layers in place of the FFNs and return the bytes of their weights and scales."""
    for layer, split in zip(model.model.layers, splits, strict=True):
        layer.mlp = MoEFeedForward(split.router, variants.prepare(split, variant), EXPERTS)
        advance(1)
    return sum(layer.mlp.expert_bytes for layer in model.model.layers)


@torch.no_grad()
def run(args: argparse.Namespace, console: Console, progress: Progress) -> bool:
    def track(name: str, total: int) -> Advance:
        task = progress.add_task(name, total=total)
        return lambda steps: progress.advance(task, steps)

    device = args.device
    advance = track("load the model", 1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, tokenizer = checkpoint.load(device, dtype)
    advance(1)

    windows = text.token_windows(tokenizer, text.EVALUATION_MODULES, args.tokens, WINDOW).to(device)
    calibration = text.token_windows(
        tokenizer, text.CALIBRATION_MODULES, CALIBRATION_WINDOWS * WINDOW, WINDOW
    ).to(device)
    ffns = [layer.mlp for layer in model.model.layers]
    inputs = ffn_inputs(model, calibration, track("read the calibration text", len(calibration)))

    rows: list[Row] = []

    def add_row(name: str, experts: str, ffn_bytes: int) -> float:
        advance = track(f"measure {name}", len(windows))
        measured = measure(model, tokenizer, windows, BATCH, PROMPT, NEW_TOKENS, advance)
        rows.append(Row(name, experts, ffn_bytes, measured))
        return measured.perplexity

    dense_bytes = sum(p.numel() * p.element_size() for ffn in ffns for p in ffn.parameters())
    dense = add_row(f"dense {str(dtype).removeprefix('torch.')}", "", dense_bytes)
    advance = track(f"split the FFNs into {EXPERTS} experts", len(ffns))
    splits, worst = split_model(ffns, inputs, advance)

    def prepare(variant: Variant) -> int:
        return use_experts(model, splits, variant, track(f"prepare {variant.name}", len(splits)))

    perplexity: dict[Variant, float] = {}
    runnable = [v for v in variants.VARIANTS if variants.target_of(v, device)]
    for variant in runnable:
        ffn_bytes = prepare(variant)
        perplexity[variant] = add_row(variant.name, f"{EXPERTS} of {EXPERTS}", ffn_bytes)
    routed = next(v for v in runnable if v in (variants.FP8_FP32, variants.FP8_UE8M0))
    ffn_bytes = prepare(routed)
    for top_k in args.top_k:
        for layer in model.model.layers:
            layer.mlp.top_k = top_k
        add_row(routed.name, f"{top_k} of {EXPERTS}", ffn_bytes)
    prefill = stages.record(lambda: model(windows[:1]), device)
    decode = stages.record(lambda: model(windows[:1, :1]), device)

    progress.stop()
    console.print(results_table(rows, args.tokens, PROMPT))
    title = f"What ran the layers of the last row: {WINDOW} tokens"
    console.print(stages_table(title, prefill, device))
    console.print(stages_table("The same: one token", decode, device))
    what = "all experts in bf16 against the dense FFN, relative error"
    checks = [Check(what, worst, BOUND_SPLIT), *variants.checks(perplexity, dense)]
    return print_checks(console, checks)


def main() -> int:
    args = parse()
    console = Console(width=None if sys.stdout.isatty() else 140)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        return 0 if run(args, console, progress) else 1


if __name__ == "__main__":
    sys.exit(main())
