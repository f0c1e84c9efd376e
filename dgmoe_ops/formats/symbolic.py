"""Comparisons of sizes that a trace has as symbols, without a guard.

A guard on the number of tokens would split one graph into several, and a size that is known only
when the graph runs cannot be guarded on at all.
"""

from __future__ import annotations

import torch


def always(condition) -> bool:
    """Whether a comparison holds for every value that its sizes can have: of ints itself."""
    if not torch.compiler.is_compiling() and isinstance(condition, bool):
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def same_size(a, b) -> bool:
    """Whether two sizes are the same. What only the run can tell becomes an assertion of the
    graph."""
    equal = a == b
    if not torch.compiler.is_compiling() and isinstance(equal, bool):
        return equal
    from torch.fx.experimental.symbolic_shapes import guard_or_true, statically_known_true

    if statically_known_true(equal):
        return True
    if not guard_or_true(equal):
        return False
    torch._check(equal)
    return True
