"""The checks of an op on tensors that only stand for others, as fake kernels get them.

The checks are those of the op itself: `plan_<op>` of its header, called through
`dgmoe::_check_<op>` on meta tensors. A symbolic size takes its hint, the size of the call that is
being traced, which adds no guard. A size that nothing is known of (an unbacked symbol) is tried
with two values: what is refused with the same words for both does not depend on it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

NAMESPACE = "dgmoe"
_UNKNOWN = (128, 384)  #: tried for unbacked symbols; multiples of every alignment
_DEVICE_OFFSET = 16  #: kStandInOffset of csrc/common/tensor.h
_Symbol = (torch.SymInt, torch.SymFloat, torch.SymBool)


class StandIns:
    """Meta tensors and plain numbers in place of the arguments of a call.

    A storage offset tells checks the devices of the call apart; meta devices have no index.
    """

    def __init__(self, unknown: int) -> None:
        self.unknown = unknown
        self.guessed = False  #: whether an argument depends on a size that nothing is known of
        self.devices: list[torch.device] = []

    def number(self, value):
        if not isinstance(value, _Symbol):
            return value
        node = value.node
        if node.has_hint():
            return node.hint
        self.guessed = True
        if not isinstance(value, torch.SymInt):
            return False if isinstance(value, torch.SymBool) else float(self.unknown)
        expression = node.expr
        return int(expression.xreplace(dict.fromkeys(expression.free_symbols, self.unknown)))

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        if value.device not in self.devices:
            self.devices.append(value.device)
        sizes = [self.number(size) for size in value.shape]
        strides = [self.number(stride) for stride in value.stride()]
        stand_in = torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
        index = self.devices.index(value.device)
        return stand_in.as_strided(sizes, strides, index * _DEVICE_OFFSET) if index else stand_in

    def __call__(self, value):
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, (list, tuple)):
            return [self.number(item) for item in value]
        return self.number(value)

    def rename(self, text: str) -> str:
        """The text with the devices of the call in place of their stand-ins."""
        return re.sub(r"\bmeta:(\d+)", lambda found: str(self.devices[int(found[1])]), text)


def contract_of(op: str) -> Callable[..., None]:
    """The checks of an op that C++ defines, as a function of its arguments by name."""
    check = getattr(getattr(torch.ops, NAMESPACE), f"_check_{op}").default
    names = {argument.name for argument in check._schema.arguments}
    buffers = names - {
        argument.name for argument in getattr(torch.ops.dgmoe, op).default._schema.arguments
    }
    absent = dict.fromkeys(buffers)

    def contract(**given) -> None:
        check(**(absent | given))

    return contract


def check_stand_ins(contract: Callable[..., None], given: dict[str, object]) -> None:
    """Refuse arguments by name that the contract refuses, whatever tensors they are.

    Raises:
        ValueError: with the words of the contract.
    """
    refusals = set()
    # Stand-ins are no business of the modes that trace the call, nor of autograd.
    with torch._C._DisableTorchDispatch(), torch._C._AutoDispatchBelowAutograd():
        for unknown in _UNKNOWN:
            stand_ins = StandIns(unknown)
            try:
                contract(**{arg: stand_ins(value) for arg, value in given.items()})
            except ValueError as error:
                refusals.add(stand_ins.rename(str(error)))
            else:
                return
            if not stand_ins.guessed:
                break
    if len(refusals) == 1:
        raise ValueError(refusals.pop())
