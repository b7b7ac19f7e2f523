"""Tiny language models of four kinds, their weights in one flat buffer.

The models are those of transformers, made from configs with random weights. One
buffer holds all weights, so that a fault, a norm or a cosine is one line; the
modules' parameters are views of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

VOCABULARY = 256
MAX_LENGTH = 128
NUM_EXPERTS = 4
CHOSEN_EXPERTS = 2
BALANCE = 0.02  # weight of the load-balancing loss
SLIDING_WINDOW = 24

#: Width and layers; 0.16, 0.46 and 1.95 million weights.
SIZES = {"tiny": (64, 2), "small": (96, 3), "large": (176, 4)}

_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=MAX_LENGTH,
    tie_word_embeddings=False,
    use_cache=False,
    attn_implementation="eager",
)


def _all_experts(self: Any, tokens_TD: Tensor, chosen_TK: Tensor, share_TK: Tensor) -> Tensor:
    """Every expert on every token, weighted: the same sum without data-dependent shapes."""
    share_TE = (_one_hot(chosen_TK) * share_TK[..., None]).sum(dim=1)
    gate, up = torch.einsum("td,eid->eti", tokens_TD, self.gate_up_proj).chunk(2, dim=-1)
    output_ETD = torch.einsum("eti,edi->etd", self.act_fn(gate) * up, self.down_proj)
    return torch.einsum("te,etd->td", share_TE, output_ETD)


ALL_EXPERTS_FUNCTIONS.register("every_expert", _all_experts)


def _one_hot(chosen: Tensor) -> Tensor:
    return (chosen[..., None] == torch.arange(NUM_EXPERTS)).float()


#: Architecture -> its config, its class and what it has beside the common shape.
_KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": SLIDING_WINDOW}),
    "mixtral": (
        MixtralConfig,
        MixtralForCausalLM,
        {
            "num_local_experts": NUM_EXPERTS,
            "num_experts_per_tok": CHOSEN_EXPERTS,
            "experts_implementation": "every_expert",
        },
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
}
ARCHITECTURES = tuple(_KINDS)


def build_module(architecture: str, seed: int, size: str = "tiny") -> nn.Module:
    """A model with random weights that follow from `seed`; the global state stays untouched."""
    width, layers = SIZES[size]
    config, kind, more = _KINDS[architecture]
    wide = width if architecture == "mixtral" else 4 * width
    shape = dict(hidden_size=width, intermediate_size=wide, num_hidden_layers=layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: nn.Module = kind(config(**_SHAPE, **shape, **more))
    if architecture == "mixtral":
        for layer in module.model.layers:  # type: ignore[union-attr]
            layer.mlp.gate.__class__ = _router_with_bias(type(layer.mlp.gate))
            layer.mlp.gate.bias = torch.zeros(NUM_EXPERTS)
    return module


def _router_with_bias(router: type[nn.Module]) -> type[nn.Module]:
    class BiasedRouter(router):  # type: ignore[misc, valid-type]
        """The same router, whose logits a fault can bias and the balancing loss can see."""

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = F.linear(hidden.reshape(-1, self.hidden_dim), self.weight) + self.bias
            self.last_logits = logits
            value, chosen = torch.topk(logits.softmax(dim=-1), self.top_k, dim=-1)
            return logits, value / value.sum(dim=-1, keepdim=True), chosen

    return BiasedRouter


class FlatModel:
    """A model whose weights are one vector, for sequences of up to `max_length` bytes.

    Attributes:
        weights_N: all weights; the module's parameters are views of it.
        decayed_N: 1 where weight decay acts (matrices), 0 elsewhere.
        between: of each parameter, whether it is a matrix between the embedding and the output.
    """

    def __init__(
        self, architecture: str, seed: int, size: str = "tiny", max_length: int = MAX_LENGTH
    ) -> None:
        self.architecture, self.max_length = architecture, max_length
        self.module = build_module(architecture, seed, size)
        self.module.requires_grad_(False)
        parameters = dict(self.module.named_parameters())
        self.names = list(parameters)
        self._shapes = {name: p.shape for name, p in parameters.items()}
        self._sizes = [p.numel() for p in parameters.values()]
        self.weights_N = torch.cat([p.data.flatten() for p in parameters.values()])
        for parameter, view in zip(parameters.values(), self.tensors(self.weights_N), strict=True):
            parameter.data = view
        self.decayed_N = torch.cat(
            [torch.full((p.numel(),), float(p.ndim > 1)) for p in parameters.values()]
        )
        self.between = [p.ndim > 1 and ".layers." in name for name, p in parameters.items()]
        self._gradients = vmap(grad_and_value(self.loss), in_dims=(None, 0, 0))

    def tensors(self, flat_N: Tensor) -> list[Tensor]:
        """A vector of all parameters as views, one a parameter."""
        parts = flat_N.split(self._sizes)
        return [part.view(s) for part, s in zip(parts, self._shapes.values(), strict=True)]

    def parts(self, flat_N: Tensor, *suffixes: str) -> list[Tensor]:
        """The views of those parameters whose names end on one of `suffixes`."""
        pairs = zip(self.names, self.tensors(flat_N), strict=True)
        return [view for name, view in pairs if name.endswith(suffixes)]

    def loss(self, weights_N: Tensor, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """The training loss: nats per token, plus the experts' balance for a mixture of experts."""
        named = dict(zip(self.names, self.tensors(weights_N), strict=True))
        logits = functional_call(self.module, named, (), self._inputs(tokens_BT)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels_BT.flatten())
        return loss + BALANCE * self._imbalance() if self.routers else loss

    @property
    def routers(self) -> list[Any]:
        """The routers of the layers; empty for a dense model."""
        if self.architecture != "mixtral":
            return []
        return [layer.mlp.gate for layer in self.module.model.layers]  # type: ignore[union-attr]

    def _imbalance(self) -> Tensor:
        """1 a layer where experts are used evenly (Switch Transformer, equation 4)."""
        total = torch.zeros(())
        for router in self.routers:
            chance = router.last_logits.softmax(dim=-1)
            used = _one_hot(chance.topk(CHOSEN_EXPERTS, dim=-1).indices).sum(dim=1)
            total = total + NUM_EXPERTS * (used.mean(dim=0) * chance.mean(dim=0)).sum()
        return total

    def gradients(self, tokens_WBT: Tensor, labels_WBT: Tensor) -> tuple[Tensor, Tensor]:
        """Each worker's own gradient, shape (workers, parameters), and loss, shape (workers,)."""
        return self._gradients(self.weights_N, tokens_WBT, labels_WBT)

    @torch.no_grad()
    def evaluate(self, tokens_BT: Tensor, labels_BT: Tensor) -> float:
        """Nats per token."""
        logits = self.module(**self._inputs(tokens_BT)).logits
        return float(F.cross_entropy(logits.flatten(0, 1), labels_BT.flatten()))

    def _inputs(self, tokens_BT: Tensor) -> dict[str, Any]:
        length = tokens_BT.shape[-1]
        # A mask of our own: the models build theirs with checks that vmap cannot follow.
        window = SLIDING_WINDOW if self.architecture == "mistral" else self.max_length
        seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
        return {
            "input_ids": tokens_BT,
            "attention_mask": torch.zeros(length, length).masked_fill(~seen, float("-inf"))[
                None, None
            ],
            "position_ids": torch.arange(length)[None],
        }

    @contextmanager
    def disturbed(
        self, half_scale: float | None, router_bias: tuple[int, float] | None
    ) -> Iterator[None]:
        """Forward passes in this context have arithmetic faults.

        With `half_scale` every layer hands on its output, times this, in half precision; beyond
        65504 it becomes infinite, as in a real fp16 run. `router_bias` is an expert and the bias of
        its logit.
        """
        scale = half_scale or 1.0
        expert, bias = router_bias or (0, 0.0)

        def through_half(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return (output * scale).half().float() / scale

        layers = self.module.model.layers if half_scale else []  # type: ignore[union-attr]
        handles = [layer.register_forward_hook(through_half) for layer in layers]  # type: ignore[union-attr]
        for router in self.routers:
            router.bias[expert] = bias
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for router in self.routers:
                router.bias.zero_()
