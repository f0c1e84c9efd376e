"""English that every Python ships: the prose in the docstrings of its standard library.

The text depends on the Python version alone, so two runs on one Python measure the same tokens.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

# Disjoint, so that the router is fitted on other text than the perplexity is measured on.
CALIBRATION_MODULES = (
    "asyncio.base_events",
    "asyncio.tasks",
    "collections",
    "concurrent.futures._base",
    "configparser",
    "email.header",
    "email.message",
    "ftplib",
    "functools",
    "heapq",
    "http.client",
    "http.cookiejar",
    "importlib.abc",
    "ipaddress",
    "multiprocessing.managers",
    "optparse",
    "os",
    "pickletools",
    "pydoc",
    "random",
    "smtplib",
    "ssl",
    "subprocess",
    "tempfile",
    "trace",
    "traceback",
    "turtle",
    "unittest.mock",
)
EVALUATION_MODULES = (
    "argparse",
    "asyncio.events",
    "asyncio.streams",
    "codecs",
    "contextlib",
    "dataclasses",
    "difflib",
    "fileinput",
    "fractions",
    "gettext",
    "imaplib",
    "inspect",
    "logging",
    "logging.handlers",
    "mailbox",
    "numbers",
    "selectors",
    "shutil",
    "socketserver",
    "statistics",
    "string",
    "tarfile",
    "textwrap",
    "threading",
    "typing",
    "unittest.case",
    "urllib.request",
    "uuid",
    "weakref",
    "zipfile",
)
_SHORTEST = 80
_PLAIN = frozenset(" ,.;:'-")


def is_prose(paragraph: str) -> bool:
    """Say whether a paragraph of a docstring reads as English, not as code, a list or a table."""
    lines = paragraph.splitlines()
    if any(line.startswith((" ", "\t", ">>>", "-", "*", "@")) for line in lines):
        return False
    plain = sum(char.isalpha() or char in _PLAIN or char == "\n" for char in paragraph)
    whole = len(paragraph) >= _SHORTEST and paragraph[0].isupper() and paragraph[-1] == "."
    return whole and plain >= 0.97 * len(paragraph)


def _docstrings(module: str) -> Iterator[str]:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, documented) and (text := ast.get_docstring(node, clean=False)):
            yield inspect.cleandoc(text)


def stdlib_prose(modules: Sequence[str]) -> str:
    """Join the prose paragraphs of the modules' docstrings, each once, in the sources' order."""
    paragraphs: dict[str, None] = {}
    for module in modules:
        for text in _docstrings(module):
            for paragraph in text.split("\n\n"):
                if is_prose(paragraph := paragraph.strip("\n")):
                    paragraphs[" ".join(paragraph.split())] = None
    return "\n\n".join(paragraphs)


def token_windows(tokenizer, modules: Sequence[str], tokens: int, window: int) -> torch.Tensor:
    """Tokenise the modules' prose into exactly `tokens` tokens, cut into windows.

    Returns:
        (tokens / window, window) int64.

    Raises:
        ValueError: `tokens` is no multiple of `window`, or the modules have less text.
    """
    ids = tokenizer(stdlib_prose(modules), return_tensors="pt", verbose=False).input_ids[0]
    if tokens % window or tokens <= 0:
        raise ValueError(f"tokens must be a positive multiple of {window}, got {tokens}")
    if len(ids) < tokens:
        most = len(ids) // window * window
        raise ValueError(f"tokens must be at most {most} on this Python, got {tokens}")
    return ids[:tokens].view(-1, window)
