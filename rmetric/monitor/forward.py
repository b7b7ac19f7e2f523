"""Probes of the forward pass: activations, attention logits, router load.

Hooks and interception exist while `measuring`, on the few steps that are looked
at; the rest of the training runs as if this were not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from math import inf, log2
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rmetric.audits.training import OwnHook

LOGITS_AT_ONCE = 2**25  # 128 MiB


class ForwardProbes:
    """Activation headroom, the largest attention logit and the router's load.

    Activations are those that go into and out of every linear layer. Attention logits are computed
    anew from the queries and keys of the first sequence of a batch, or read where the model
    computes them itself. A router is a module that returns the experts it chose, as those of
    transformers do.

    Not measured: logits in a fused attention kernel that torch does not know (flash-attn), in
    nn.MultiheadAttention and once torch.compile has compiled something, and everything in a
    compiled model. A measurement that fails is reported and not repeated.

    >>> model = nn.Linear(4, 2)
    >>> probes = ForwardProbes(model)
    >>> with probes.measuring():
    ...     _ = model(torch.ones(1, 4))
    >>> sorted(probes.read())
    ['activation_headroom']
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._armed: list[Any] = []  # hooks around the model's own forward passes
        self._entered: nn.Module | None = None
        self._attention = True
        self._measuring = ExitStack()  # hooks and interception of the pass under way
        self._routers = _routers(model)
        activations, load, self._intercept = (
            OwnHook(torch.no_grad()(measure), "a forward probe")
            for measure in (self._measure_activations, self._measure_load, self._measure_attention)
        )
        linear = (
            m for m in model.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"
        )
        self._hooks = [*((m, activations) for m in linear), *((r, load) for r in self._routers)]
        self._forget()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the forward passes inside; those of before are forgotten."""
        self._forget()
        self._start(self._model)
        try:
            yield
        finally:
            self._measuring.close()

    @property
    def armed(self) -> bool:
        return bool(self._armed)

    def arm(self, *, attention: bool = True) -> None:
        """Measure the model's own forward passes in training mode, until `remove`.

        To intercept `attention` makes a compiled part of the model be compiled anew.
        """
        self._attention = attention
        self._forget()
        # Entered and left around each pass: a mode that stayed on would be torn from
        # the caller's own `with torch.device(...)`.
        enter, leave = (OwnHook(call, "a forward probe") for call in (self._enter, self._leave))
        for module in chain(*entrances(self._model)):
            self._armed.append(module.register_forward_pre_hook(enter))
            self._armed.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        for handle in self._armed:
            handle.remove()
        self._armed, self._entered = [], None
        self._measuring.close()  # of a pass that an interrupt has ended, which calls no hook

    def _enter(self, module: nn.Module, *_: Any) -> None:
        # A pass inside a pass is one pass.
        if self._entered is None and module.training and torch.is_grad_enabled():
            self._entered = module
            self._start(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if module is self._entered:
            self._entered = None
            self._measuring.close()

    def _forget(self) -> None:
        self._largest: dict[torch.dtype, Tensor] = {}
        self._logits: list[Tensor] = []
        self._loads: list[Tensor] = []

    def _start(self, part: nn.Module) -> None:
        inside = set(part.modules())
        for module, hook in self._hooks:
            if module in inside:
                handle = module.register_forward_hook(hook)
                self._measuring.callback(handle.remove)
        if self._attention:
            self._measuring.enter_context(_AttentionMode(self._intercept))

    def _measure_attention(self, func: Any, args: Any, kwargs: Any) -> None:
        if func is F.scaled_dot_product_attention:
            self._logits.append(_largest_logit(*args, **kwargs))
        elif func is F.softmax and args and args[0].ndim == 4:
            self._logits.append(args[0].detach()[:1].float().amax())

    def _measure_activations(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        for value in (*inputs, output):
            if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
                # Not abs().amax(): that copies the logits of a whole vocabulary.
                largest = torch.stack(torch.aminmax(value.detach())).abs().amax().float()
                known = self._largest.get(value.dtype, largest)
                self._largest[value.dtype] = torch.maximum(known, largest)

    def _measure_load(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Largest share of an expert times their number, from the indices a router returns."""
        experts = self._routers[module]
        for value in output if isinstance(output, (tuple, list)) else ():
            if isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32):
                counts = torch.bincount(value.flatten(), minlength=experts).float()
                self._loads.append(counts.max() * experts / value.numel())
                return

    @torch.no_grad()
    def take(self) -> dict[str, Tensor]:
        """The measurements by name, still on the device; `forward_fields` decodes them."""
        found = {str(dtype): largest for dtype, largest in self._largest.items()}
        if self._logits:
            found["attention_logit_max"] = torch.stack(self._logits).max()
        if self._loads:
            found["router_load"] = torch.stack(self._loads).max()
        return found

    def read(self) -> dict[str, float]:
        """The measurements on the host; a key is absent if the model has no such part."""
        return forward_fields({name: float(value) for name, value in self.take().items()})


def forward_fields(values: Mapping[str, float]) -> dict[str, float]:
    """Fields of the record, from the values of `ForwardProbes.take` on the host."""
    fields = {n: values[n] for n in ("attention_logit_max", "router_load") if n in values}
    prefix, types = "torch.", [name for name in values if name.startswith("torch.")]
    if types:
        headrooms = [_headroom(values[n], getattr(torch, n.removeprefix(prefix))) for n in types]
        fields["activation_headroom"] = min(headrooms)
    return fields


def entrances(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Modules in which a pass may begin: the model, what it wraps, its parts; none compiled."""
    whole, parts = [model], list[nn.Module]()
    while not is_compiled(whole[-1]):
        parts = []
        for part in whole[-1].children():
            lists = isinstance(part, (nn.ModuleList, nn.ModuleDict))
            parts += part.children() if lists else [part]
        if len(parts) != 1:
            break
        whole.append(parts.pop())
    whole = [module for module in whole if not _compiled_in_place(module)]
    return whole, [part for part in parts if not _compiled_in_place(part)]


def is_compiled(module: nn.Module) -> bool:
    return _compiled_in_place(module) or hasattr(module, "_orig_mod")


def _compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _routers(model: nn.Module) -> dict[nn.Module, int]:
    """The routers of a model and the number of experts of each."""
    found = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("gate", "router"):
            experts = getattr(module, "num_experts", None)
            if experts is None and isinstance(module, nn.Linear):
                experts = module.out_features
            if isinstance(experts, int) and experts > 1:
                found[module] = experts
    return found


def _headroom(largest: float, dtype: torch.dtype) -> float:
    """Powers of two up to the largest number of a type."""
    if largest == 0.0:
        return inf
    if not largest < inf:
        return largest if largest != largest else -inf
    return log2(torch.finfo(dtype).max) - log2(largest)


class _AttentionMode(TorchFunctionMode):
    """Passes the calls of torch's own attention functions to `measure`."""

    def __init__(self, measure: Callable[..., None]) -> None:
        super().__init__()
        self._measure = measure

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention or func is F.softmax:
            self._measure(func, args, kwargs)
        return func(*args, **kwargs)


@torch.no_grad()
def _largest_logit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Largest logit of the first sequence, over pairs that may attend to each other; a scalar.

    Shapes: query (batch, heads, queries, size), key (batch, key heads, keys, size). A block of
    queries at a time, so that the memory stays linear in their number.
    """
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    query, key = query.detach()[:1].float() * factor, key.detach()[:1].float()
    if query.shape[-3] != key.shape[-3]:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    keys = torch.arange(key.shape[-2], device=query.device)
    if attn_mask is not None:
        first = attn_mask[:1] if attn_mask.ndim == query.ndim else attn_mask
        attn_mask = first.expand(*query.shape[:-1], len(keys))
    largest = query.new_full((), -inf)
    rows = max(1, LOGITS_AT_ONCE // max(1, query.shape[:-2].numel() * len(keys)))
    for start in range(0, query.shape[-2], rows):
        block = slice(start, start + rows)
        with torch.autocast(query.device.type, enabled=False):
            logits = query[..., block, :] @ key.transpose(-1, -2)
        if attn_mask is not None:
            mask = attn_mask[..., block, :]
            allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            logits = logits.masked_fill(~allowed, -inf)
        if is_causal:
            queries = torch.arange(start, start + logits.shape[-2], device=query.device)
            logits = logits.masked_fill(keys > queries[:, None], -inf)
        # amax keeps a nan.
        largest = torch.maximum(largest, logits.amax())
    return largest
