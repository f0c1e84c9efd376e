"""The Python examples of README.md and the guide run as they stand."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("safetensors")

from safetensors.torch import save_file  # noqa: E402

from docs.scripts.blocks import ROOT  # noqa: E402

EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
EXAMPLES = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(EXAMPLE.findall(page.read_text()))
]


def checkpoints(folder) -> None:
    """The checkpoints that the examples name, with small layers of random weights."""
    make = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16) * shape[-1] ** -0.5  # noqa: E731
    layer = {}
    for expert in range(16):
        stem = f"model.layers.0.mlp.experts.{expert}"
        layer[f"{stem}.gate_proj.weight"] = make(128, 256)
        layer[f"{stem}.up_proj.weight"] = make(128, 256)
        layer[f"{stem}.down_proj.weight"] = make(256, 128)
    (folder / "Qwen3-30B-A3B").mkdir()
    save_file(layer, folder / "Qwen3-30B-A3B" / "model.safetensors")
    stem = "model.layers.3.mlp.experts"
    layer = {}
    for name, rows, columns in (("gate_up_proj", 256, 128), ("down_proj", 128, 128)):
        shape = (32, rows, columns // 32)
        layer[f"{stem}.{name}_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8)
        layer[f"{stem}.{name}_scales"] = torch.randint(118, 122, shape, dtype=torch.uint8)
        layer[f"{stem}.{name}_bias"] = torch.randn(32, rows).bfloat16()
    (folder / "gpt-oss-20b").mkdir()
    save_file(layer, folder / "gpt-oss-20b" / "model.safetensors")


@pytest.mark.parametrize("code", EXAMPLES)
def test_examples_run(code: str, device, tmp_path, monkeypatch) -> None:
    checkpoints(tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code.replace('device="cuda"', f'device="{device.type}"'), names)
    if "y" in names:
        assert names["y"].dtype == torch.bfloat16 and names["y"].isfinite().all()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 6
