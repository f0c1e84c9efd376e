"""dgmoe_ops: a Mixture-of-Experts layer on DeepGEMM's grouped GEMMs, as PyTorch custom ops."""

from . import _load, layouts, ops  # noqa: F401  (the libraries must be loaded before the ops register)
