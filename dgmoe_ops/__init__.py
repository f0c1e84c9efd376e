"""dgmoe_ops: a Mixture-of-Experts layer on DeepGEMM's grouped GEMMs, as PyTorch custom ops.

Importing registers `torch.ops.dgmoe.*`; it initialises no device and imports no GEMM library.
"""

from . import _load  # noqa: I001  (the compiled libraries must be loaded before the ops register)
from . import checkpoints, ops
from .backends import platforms
from .backends.deep_gemm import down_gemm_overlap
from .backends.scopes import contiguous_alignment, num_sms, pdl
from .checkpoints import load_moe_layer
from .formats import layouts, recipes
from .formats.recipes import infer_recipe, scale_recipes
from .layer import activations, routing
from .layer.block import moe_block, router_logits
from .layer.fused_moe import fused_moe, fused_moe_inline
from .warmup.run import LayerShape, plan_warmup, warmup
from .weights.export import export_biases, export_weights
from .weights.prepare import MoEWeights, prepare_weights

__version__ = "0.1.0"
LIBRARIES = _load.LIBRARIES

__all__ = [
    "LIBRARIES",
    "LayerShape",
    "MoEWeights",
    "activations",
    "checkpoints",
    "contiguous_alignment",
    "down_gemm_overlap",
    "export_biases",
    "export_weights",
    "fused_moe",
    "fused_moe_inline",
    "infer_recipe",
    "layouts",
    "load_moe_layer",
    "moe_block",
    "num_sms",
    "ops",
    "pdl",
    "plan_warmup",
    "platforms",
    "prepare_weights",
    "recipes",
    "router_logits",
    "routing",
    "scale_recipes",
    "warmup",
]
