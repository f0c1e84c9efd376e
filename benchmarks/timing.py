"""How times are taken: graph replays and host clocks on a GPU, `torch.utils.benchmark` on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.utils.benchmark

Calls = Sequence[Callable[[], object]]


def _cpu_us(calls: Calls) -> float:
    def every() -> None:
        for call in calls:
            call()

    timer = torch.utils.benchmark.Timer("every()", globals={"every": every})
    return timer.blocked_autorange(min_run_time=0.02).median * 1e6 / len(calls)


def graph_us(calls: Calls, device: torch.device, repeats: int = 7) -> float:
    """Measure the microseconds of one call: the median of replays of a graph that holds all of
    `calls`.

    The calls should work on different inputs, so that none finds its data in a cache that the call
    before it filled. On a CPU there are no graphs and the calls run one after the other.
    """
    if device.type == "cpu":
        return _cpu_us(calls)
    # Just-in-time compilation and allocator growth belong in front of the capture.
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return median(times[1:])


def eager_us(calls: Calls, device: torch.device, count: int = 16) -> float:
    """Measure the microseconds of one call by a host clock, launches included, the device drained
    at the end: the median of five rounds, since other work on the host disturbs single ones.
    """
    if device.type == "cpu":
        return _cpu_us(calls)
    for call in calls:
        call()
    torch.cuda.synchronize()
    rounds = []
    for _ in range(5):
        begin = time.perf_counter()
        for i in range(count):
            calls[i % len(calls)]()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - begin) * 1e6 / count)
    return median(rounds)


def copy_rate(device: torch.device) -> float:
    """Measure the bytes a second of a large copy on the device, counted as bytes read plus bytes
    written.
    """
    size = (1 << 30) if device.type == "cuda" else (16 << 20)
    source = torch.randint(0, 255, (size,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    if device.type == "cpu":
        return 2 * size / (graph_us([lambda: target.copy_(source)], device) * 1e-6)
    # Plain copies: as nodes of a graph they are slower.
    rates = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(4):
            target.copy_(source)
        end.record()
        end.synchronize()
        rates.append(4 * 2 * size / (start.elapsed_time(end) * 1e-3))
    return median(rates)


def release(device: torch.device) -> None:
    """Return cached memory: graphs keep pools of their own, which a large slab would not fit
    beside.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
