"""Checkpoints: the experts of a layer from safetensors files.

`names` says how checkpoints name and order tensors, `source` maps the files, `shapes` tells sizes
and forms from their headers, `experts` reads one expert at a time, `load` prepares them.
"""

from .load import load_moe_layer
from .names import LAYOUTS, Layout

__all__ = ["LAYOUTS", "Layout", "load_moe_layer"]
