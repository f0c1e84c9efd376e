"""Perplexity and time a token of a causal language model."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_REPEATS = 3  # a busy machine stalls single runs by far more than the rows differ


@dataclass(frozen=True)
class Measurement:
    """One row of the demo's first table; times are milliseconds a token, medians of repeats."""

    perplexity: float
    prefill_ms: float
    generate_ms: float
    text: str


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def perplexity(
    model, windows: torch.Tensor, batch: int, advance: Callable[[int], object]
) -> tuple[float, float]:
    """Return the perplexity of the windows, each read on its own, and the milliseconds a token.

    The time is the median over the batches.
    """
    loss, predicted, times = 0.0, 0, []
    for ids in windows.split(batch):
        start = _now(model.device)
        logits = model(ids).logits
        times.append((_now(model.device) - start) / ids.numel())
        scores = logits[:, :-1].flatten(0, 1).float()
        targets = ids[:, 1:].flatten()
        loss += torch.nn.functional.cross_entropy(scores, targets, reduction="sum").item()
        predicted += targets.numel()
        advance(len(ids))
    return math.exp(loss / predicted), 1e3 * statistics.median(times)


@torch.no_grad()
def generate(model, tokenizer, prompt: str, new_tokens: int) -> tuple[str, float]:
    """Return the greedy continuation of the prompt and the milliseconds a new token."""
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    start = _now(model.device)
    ids = model.generate(
        **inputs, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens
    )
    seconds = _now(model.device) - start
    text = tokenizer.decode(ids[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return " ".join(text.split()), 1e3 * seconds / new_tokens


def measure(
    model,
    tokenizer,
    windows: torch.Tensor,
    batch: int,
    prompt: str,
    new_tokens: int,
    advance: Callable[[int], object],
) -> Measurement:
    """Run both measurements."""
    # An untimed run first: first calls choose and compile kernels.
    generate(model, tokenizer, prompt, 2)
    runs = [generate(model, tokenizer, prompt, new_tokens) for _ in range(_REPEATS)]
    text, generate_ms = runs[0][0], statistics.median(ms for _, ms in runs)
    value, prefill_ms = perplexity(model, windows, batch, advance)
    return Measurement(value, prefill_ms, generate_ms, text)
