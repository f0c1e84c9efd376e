"""The argument checks of `router_logits` and `moe_block`. All of them run before the first op."""

from __future__ import annotations

from typing import NoReturn

import torch

from ..weights.prepare import MoEWeights

_ID_DTYPES = (torch.int32, torch.int64)
_GATE_DTYPES = (torch.bfloat16, torch.float32)
_BIAS_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BlockCheck:
    """Checks with the name of the function that makes them.

    Tensors stand on the device of hidden_states.
    """

    def __init__(self, function: str) -> None:
        self._function = function
        self._device: torch.device | None = None

    def fail(self, arg: str, must: str, got: object) -> NoReturn:
        raise ValueError(f"dgmoe_ops.{self._function}: {arg} must {must}, got {got}")

    def tensor(
        self,
        arg: str,
        tensor: object,
        dtypes: tuple[torch.dtype, ...],
        shape: tuple[int | str, ...],
    ) -> None:
        """Check a tensor; a size that is a word may be anything."""
        if not isinstance(tensor, torch.Tensor):
            self.fail(arg, "be a tensor", repr(tensor))
        if tensor.dtype not in dtypes:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            self.fail(arg, f"be {names}", str(tensor.dtype).removeprefix("torch."))
        fits = tensor.dim() == len(shape) and all(
            isinstance(size, str) or size == got
            for size, got in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            sizes = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
            self.fail(arg, f"have shape ({sizes})", tuple(tensor.shape))
        if self._device is None:
            self._device = tensor.device
        elif tensor.device != self._device:
            self.fail(arg, f"be on the device of hidden_states ({self._device})", tensor.device)

    def router(
        self,
        hidden_states: torch.Tensor,
        gate_weight: torch.Tensor,
        gate_bias: torch.Tensor | None,
    ) -> None:
        self.tensor("hidden_states", hidden_states, (torch.bfloat16,), ("tokens", "hidden"))
        hidden = hidden_states.shape[1]
        self.tensor("gate_weight", gate_weight, _GATE_DTYPES, ("experts", hidden))
        if gate_bias is not None:
            self.tensor("gate_bias", gate_bias, _BIAS_DTYPES, (gate_weight.shape[0],))

    def choice(
        self,
        experts: int,
        num_fused_shared: int,
        bias: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
        expert_map: torch.Tensor | None,
    ) -> None:
        """Check what the choice of experts takes besides logits."""
        if bias is not None:
            self.tensor("bias", bias, (torch.float32,), (experts,))
        if num_tokens is not None:
            shape = tuple(["any"] * num_tokens.dim()) if torch.is_tensor(num_tokens) else ()
            self.tensor("num_tokens", num_tokens, _ID_DTYPES, shape)
            if num_tokens.numel() != 1:
                self.fail("num_tokens", "hold one integer", tuple(num_tokens.shape))
        if expert_map is not None:
            replicated = torch.is_tensor(expert_map) and expert_map.dim() == 2
            shape = (experts + num_fused_shared, *(["replicas"] if replicated else []))
            self.tensor("expert_map", expert_map, (torch.int32,), shape)

    def hashing(
        self,
        tokens: int,
        top_k: int,
        token_ids: torch.Tensor | None,
        hash_table: torch.Tensor | None,
        unused: dict[str, tuple[object, object]],
    ) -> None:
        """Check routing by token id; `unused` are arguments that it has no use for, as (value,
        default)."""
        if (token_ids is None) != (hash_table is None):
            self.fail("hash_table", "be given together with token_ids", "one of the two")
        if hash_table is None:
            return
        self.tensor("token_ids", token_ids, _ID_DTYPES, (tokens,))
        self.tensor("hash_table", hash_table, _ID_DTYPES, ("vocabulary", "top_k"))
        if hash_table.shape[1] != top_k:
            self.fail("hash_table", f"have {top_k} columns, top_k", tuple(hash_table.shape))
        for arg, (value, default) in unused.items():
            if value is not default and (torch.is_tensor(value) or value != default):
                got = tuple(value.shape) if torch.is_tensor(value) else value
                self.fail(arg, f"be {default} with hash_table", got)

    def weights(self, arg: str, weights: object, hidden: int) -> None:
        if not isinstance(weights, MoEWeights):
            self.fail(arg, "be MoEWeights, from prepare_weights or load_moe_layer", repr(weights))
        if weights.hidden_size != hidden:
            must = f"have the hidden size of hidden_states, {hidden}"
            self.fail(arg, must, weights.hidden_size)
        if weights.w13.device != self._device:
            must = f"be on the device of hidden_states ({self._device})"
            self.fail(arg, must, weights.w13.device)

    def shared(self, shared: object, shared_gate: torch.Tensor | None, hidden: int) -> None:
        if shared is not None:
            self.weights("shared", shared, hidden)
        if shared_gate is None:
            return
        if shared is None:
            self.fail("shared_gate", "be None without shared experts", tuple(shared_gate.shape))
        self.tensor("shared_gate", shared_gate, _GATE_DTYPES, (1, hidden))
