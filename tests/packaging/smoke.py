"""Use an installed dgmoe_ops from outside its source: what CI runs on the built wheel.

python smoke.py SOURCE      SOURCE: the checkout, from which nothing may be imported
"""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import torch

import dgmoe_ops


def imports_come_from_the_installation(source: Path) -> str:
    package = Path(dgmoe_ops.__file__).resolve().parent
    assert source not in package.parents, f"dgmoe_ops is imported from the checkout: {package}"
    assert (package / "py.typed").exists(), "py.typed is missing"
    return str(package)


def every_module_imports() -> str:
    """All but the optional ones, whose own imports are missing here; none of the package's may
    be."""
    names = [
        module.name
        for module in pkgutil.walk_packages(dgmoe_ops.__path__, "dgmoe_ops.")
        if not module.name.endswith(("__main__", "._C", "._C_cuda"))
    ]
    absent = set()
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing = (error.name or "").split(".")[0]
            assert missing in ("triton", "matplotlib"), f"{name}: {error}"
            absent.add(missing)
    for wanted in ("backends.deep_gemm", "backends.triton", "checkpoints", "cli", "reference"):
        assert f"dgmoe_ops.{wanted}" in names, f"dgmoe_ops.{wanted} is not in the wheel"
    return f"{len(names)} modules; not installed: {', '.join(sorted(absent)) or 'nothing'}"


def the_layer_is_right() -> str:
    """The bf16 layer on the CPU against the same layer in plain float32 PyTorch."""
    torch.manual_seed(0)
    tokens, hidden, inter, experts, top_k = 9, 256, 128, 4, 2
    w13 = torch.randn(experts, 2 * inter, hidden) * hidden**-0.5
    w2 = torch.randn(experts, hidden, inter) * inter**-0.5
    x = torch.randn(tokens, hidden).bfloat16()
    weights, ids = torch.randn(tokens, experts).softmax(-1).topk(top_k)
    prepared = dgmoe_ops.prepare_weights(
        w13.bfloat16(), None, w2.bfloat16(), None, recipe="bf16", target="cpu"
    )
    y = torch.ops.dgmoe.fused_moe(x, weights, ids, *prepared.tensors, recipe=prepared.recipe)
    want = torch.zeros(tokens, hidden)
    for token in range(tokens):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up = (w13[expert].bfloat16().float() @ x[token].float()).chunk(2)
            act = torch.nn.functional.silu(gate) * up
            want[token] += weight * (w2[expert].bfloat16().float() @ act)
    error = ((y.float() - want).norm() / want.norm()).item()
    assert error < 0.01, f"the layer is off by {error:.3g}"
    return f"relative error {error:.2g}"


def doctor_says_that_the_layer_can_run() -> str:
    command = [sys.executable, "-m", "dgmoe_ops", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    source = Path(sys.argv[1]).resolve()
    print("installed:", imports_come_from_the_installation(source))
    print("imported:", every_module_imports())
    print("fused_moe:", the_layer_is_right())
    print("doctor:", doctor_says_that_the_layer_can_run())


if __name__ == "__main__":
    main()
