"""Check and time configurations of the Triton grouped GEMM on a GPU, beside DeepGEMM's fp8_block.

    python -m benchmarks.tune_triton [--seconds 150] [--shapes qwen,deepseek] [--json FILE]

Prints, a case a line: recipe, layout, shape, n, k, T, the best configuration with its time, GB/s of
what it must move and TFLOP/s, the runners-up, and DeepGEMM's time on the same product.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from .mx_products import (
    indices_of,
    pack,
    random_e4m3,
    random_scale,
    reference,
    routing,
    wrong,
)
from .timing import graph_us

SHAPES = {"qwen": (128, 8, 2048, 768), "deepseek": (256, 8, 7168, 2048)}  # experts, top-k, H, I
TOKENS = (1, 8, 32, 128, 2048, 8192)

DECODE = [(16, 64, 3, 4), (16, 64, 5, 4), (16, 128, 3, 4), (16, 128, 5, 4), (16, 128, 4, 8)]
MIDDLE = [(32, 128, 4, 4), (64, 128, 3, 4), (64, 128, 4, 8)]
LARGE = [(128, 64, 3, 4), (128, 128, 3, 8), (128, 256, 3, 8)]


def candidates(fp4: bool, rows: float) -> list[tuple[int, int, int, int]]:
    """By rows an expert."""
    if rows <= 4:
        return DECODE
    if rows <= 16:
        return DECODE[2:] + MIDDLE[:2]
    found = [c for c in MIDDLE[1:] + LARGE if fp4 or c[:2] != (128, 256)]
    return found if rows <= 128 else found[1:]


def spec_of(product, m: int = 0):
    """A product (masked, fp4, experts, n, k, columns that share a scale of a) as a spec."""
    from dgmoe_ops.formats.gemm import GroupedGemmSpec
    from dgmoe_ops.formats.layout import Layout

    masked, fp4, experts, n, k, columns = product
    layout = Layout.MASKED if masked else Layout.CONTIG
    return GroupedGemmSpec(layout, experts, m, n, k, 0, (1, columns), (1, 32), fp4)


def _compile(job) -> str:
    product, config = job
    from dgmoe_ops.backends.triton import compiled as package

    try:
        package.compile_kernel(spec_of(product), package.Config(*config))
    except Exception as error:
        return f"{product} {config}: {type(error).__name__}: {str(error)[:300]}"
    return ""


# ---- runs ----


class Runner:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        from dgmoe_ops.backends.triton import compiled

        self.package = compiled
        properties = torch.cuda.get_device_properties(device)
        self.sms = properties.multi_processor_count
        self.kernels: dict = {}

    def most(self, compiled) -> int:
        return self.sms * self.package.resident(compiled, self.device.index)

    def call(self, product, config, a, a_scale, b, b_scale, info, d):
        package = self.package
        config = package.Config(*config)
        compiled = self.kernels.get((product, config))
        if compiled is None:
            compiled = self.kernels[product, config] = package.compile_kernel(
                spec_of(product), config
            )
        spec = spec_of(product, a.shape[-2])
        grid = (package.programs(spec, config, self.most(compiled)), 1, 1)
        launch = compiled[grid]
        if spec.fp4:
            b = b.view(torch.uint8)
        args = package.arguments(spec, a, a_scale, b, b_scale, info, d)
        return lambda: launch(*args, stream=torch.cuda.current_stream().cuda_stream)


CHECK = (4, 192, 512)  # experts, n, k
COUNTS = [(3, 0, 130, 17), (0, 0, 0, 1), (128, 16, 1, 64), (0, 257, 0, 0), (0, 0, 0, 0)]


def check(runner: Runner, configs, device) -> list:
    """Every configuration on ragged rows, with far and NaN exponents in an expert each."""
    good = []
    experts, n, k = CHECK
    for fp4 in (True, False):
        for a_columns in (128, 32) if not fp4 else (128,):
            b = (
                torch.randint(-128, 128, (experts, n, k // 2), dtype=torch.int8, device=device)
                if fp4
                else random_e4m3((experts, n, k), device)
            )
            near = torch.randint(118, 128, (experts, n, k // 32), device=device)
            near[0, 5, 3], near[2, 70, 0] = 0, 255
            near[3, 100:] = torch.randint(60, 190, (n - 100, k // 32), device=device)
            b_scale = pack(near.to(torch.uint8))
            for masked in (True, False):
                product = (masked, fp4, experts, n, k, a_columns)
                m = 512 if masked else 1024
                lead = (experts, m) if masked else (m,)
                a = random_e4m3((*lead, k), device)
                scale = torch.randint(118, 132, (*lead, k // a_columns), device=device)
                scale[..., 2, 0] = 255
                scale[..., 1, 1] = 0
                a_scale = pack(scale.to(torch.uint8))
                ragged = []
                for counts in COUNTS:
                    counts = torch.tensor(counts, dtype=torch.int32)
                    info = (counts if masked else indices_of(counts, m)).to(device)
                    used = [e for e in range(experts) if counts[e]]
                    ragged.append((info, reference(product, a, a_scale, b, b_scale, info, used)))
                for config in configs[fp4]:
                    worst = 0.0
                    for info, found in ragged:
                        d = torch.full((*lead, n), 3e38, dtype=torch.bfloat16, device=device)
                        try:
                            runner.call(product, config, a, a_scale, b, b_scale, info, d)()
                            torch.cuda.synchronize()
                        except Exception as error:
                            print("FAIL", product, config, str(error)[:200], flush=True)
                            worst = float("inf")
                            break
                        worst = max(worst, wrong(product, d, found))
                        if masked:
                            rows = torch.arange(m, device=device)[None] >= info[:, None]
                            if not bool((d[rows] == d.new_tensor(3e38)).all()):
                                worst = float("inf")
                                print("WROTE PADDING", product, config, flush=True)
                    if worst <= 1:
                        good.append((product[:2], config))
                    else:
                        print(f"WRONG {product} {config}: {worst:.3g} of allowed", flush=True)
    return good


def deep_gemm_call(product, a, b, info, d, expected_m):
    import dgmoe_ops  # noqa: F401  registers the ops

    masked, _, experts, n, k, _ = product
    device = a.device
    m = a.shape[-2]
    lead = (experts,) if masked else ()
    scale = torch.rand(*lead, k // 128, -(-m // 4) * 4, device=device)
    a_scale = scale.transpose(-1, -2)[..., :m, :]
    b_scale = torch.rand(experts, n // 128, k // 128, device=device)
    if masked:
        run = torch.ops.dgmoe.grouped_gemm_nt_f8f8bf16_masked.out
        return lambda i: run(a, a_scale, b, b_scale, i, expected_m, out=d)
    run = torch.ops.dgmoe.grouped_gemm_nt_f8f8bf16_contig.out
    return lambda i: run(a, a_scale, b, b_scale, i, out=d)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--shapes", default="qwen,deepseek")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--recipes", default="mxfp4,mxfp8")
    parser.add_argument("--layouts", default="masked,contig")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--no-deep-gemm", action="store_true")
    parser.add_argument("--deep-gemm-seconds", type=float, default=40)
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    parser.add_argument("--json")
    options = parser.parse_args()
    begin = time.perf_counter()
    tokens = [int(t) for t in options.tokens.split(",")]
    layouts = [x == "masked" for x in options.layouts.split(",")]
    recipes = [x == "mxfp4" for x in options.recipes.split(",")]

    cases = []
    for name in options.shapes.split(","):
        experts, top_k, hidden, inter = SHAPES[name]
        for n, k in ((2 * inter, hidden), (hidden, inter)):
            for fp4 in recipes:
                for masked in layouts:
                    for t in tokens:
                        product = (masked, fp4, experts, n, k, 128 if fp4 else 32)
                        found = candidates(fp4, t * top_k / experts)
                        cases.append((name, t, top_k, product, found))
    configs = {fp4: [] for fp4 in (True, False)}
    jobs = {}
    for _, _, _, product, found in cases:
        for config in found:
            jobs[product, config] = None
            if config not in configs[product[1]]:
                configs[product[1]].append(config)
    experts, n, k = CHECK
    first = {}
    for fp4 in recipes:
        for a_columns in (128, 32) if not fp4 else (128,):
            for masked in (True, False):
                for config in configs[fp4]:
                    first[(masked, fp4, experts, n, k, a_columns), config] = None
    jobs = sorted([*first, *jobs], key=lambda job: -job[1][0] * job[1][1])  # the slow ones first
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        for text in pool.map(_compile, jobs, chunksize=1):
            if text:
                print("COMPILE", text, flush=True)
    print(f"{len(jobs)} kernels in {time.perf_counter() - begin:.1f} s", flush=True)
    if options.compile_only:
        return

    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    runner = Runner(device)
    good = set(check(runner, configs, device))
    print(f"checked {len(good)} after {time.perf_counter() - begin:.1f} s", flush=True)
    results = []
    weights: dict = {}
    bases: dict = {}
    spent = 0.0  # on DeepGEMM, which compiles
    for name, t, top_k, product, found in cases:
        masked, fp4, experts, n, k, a_columns = product
        if options.seconds - (time.perf_counter() - begin) < 5:
            print("out of time", flush=True)
            break
        key = (name, n, fp4)
        if key not in weights:
            weights.clear()
            torch.cuda.empty_cache()
            shape = (experts, n, k // 2 if fp4 else k)
            b = random_e4m3(shape, device)
            weights[key] = b, random_scale((experts,), n, k // 32, device)
        b, b_scale = weights[key]
        b_bytes = n * k // 2 if fp4 else n * k
        m = -(-t // 256) * 256
        rows = t * top_k
        if not masked:
            used = min(rows, experts)
            m = 128 * (used + (rows - used) // 128)
        lead = (experts, m) if masked else (m,)
        a = random_e4m3((*lead, k), device)
        a_scale = random_scale(lead[:-1], m, k // a_columns, device)
        d = torch.empty(*lead, n, dtype=torch.bfloat16, device=device)
        calls = max(1, min(16, (256 << 20) // (min(rows, experts) * b_bytes)))
        if t == 1:
            calls = experts // top_k
        counts = [routing(t, experts, top_k, i, i * top_k) for i in range(calls)]
        infos = [(c if masked else indices_of(c, m)).to(device) for c in counts]
        moved = sum(int((c > 0).sum()) for c in counts) / calls * (b_bytes + n * k // 32)
        moved += rows * (k + 2 * n)
        flops = 2 * rows * n * k
        look = [int(e) for e in counts[0].topk(2).indices] + [int(counts[0].nonzero()[-1])]
        right = reference(product, a, a_scale, b, b_scale, infos[0], set(look))
        times = []
        for config in found:
            if (product[:2], config) not in good:
                continue
            try:
                run = [runner.call(product, config, a, a_scale, b, b_scale, i, d) for i in infos]
                run[0]()
                torch.cuda.synchronize()
                worst = wrong(product, d, right)
                if worst > 1:
                    print(f"WRONG {product} {config}: {worst:.3g} of allowed", flush=True)
                    continue
                times.append((graph_us(run, device, 3), config))
            except Exception as error:
                print("FAIL", product, config, str(error)[:200], flush=True)
        del right
        times.sort()
        base = bases.get((name, n, masked, t))
        if (
            base is None
            and not options.no_deep_gemm
            and options.seconds - (time.perf_counter() - begin) > 15
            and spent < options.deep_gemm_seconds
        ):
            since = time.perf_counter()
            try:
                b8 = b if not fp4 else random_e4m3((experts, n, k), device)
                call = deep_gemm_call(product, a, b8, infos[0], d, max(1, -(-rows // experts)))
                base = graph_us([partial(call, i) for i in infos], device, 3)
                bases[name, n, masked, t] = base
                del b8, call
            except Exception as error:
                print("DeepGEMM:", str(error)[:200], flush=True)
                options.no_deep_gemm = "dgmoe_ops" in str(error)
            spent += time.perf_counter() - since
        recipe, layout = "mxfp4" if fp4 else "mxfp8", "masked" if masked else "contig"
        text = f"{recipe} {layout} {name} n={n} k={k} T={t}: "
        if times:
            best, config = times[0]
            text += f"{best:.1f} us {config} {moved / best / 1e3:.0f} GB/s"
            text += f" {flops / best / 1e6:.0f} TFLOP/s"
            text += "; " + ", ".join(f"{c} {u:.1f}" for u, c in times[1:])
        if base:
            text += f"; fp8_block {base:.1f} us"
            if times:
                text += f", ratio {times[0][0] / base:.2f}"
        print(text, flush=True)
        results.append(
            {
                "recipe": "mxfp4" if fp4 else "mxfp8",
                "masked": masked,
                "shape": name,
                "n": n,
                "k": k,
                "tokens": t,
                "times": times,
                "fp8_block": base,
                "moved": moved,
                "flops": flops,
            }
        )
        del a, a_scale, d, infos
        torch.cuda.empty_cache()
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1))
    print(f"{time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
