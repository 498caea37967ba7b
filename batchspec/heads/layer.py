"""The decoder layer of a head in training: the forward pass of `batchspec.model.blocks` over differentiable operations.

B rows, L positions (padded at the end), H hidden, NH / KVH heads of D numbers. Parameters have the names of published
checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchspec.heads.attend import Keys, attend
from batchspec.heads.fused import RoPE, SwiGLU
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.blocks.base import GroupedSpec, ProductSpec, projections
from batchspec.model.blocks.forward import GroupedProduct, Product
from batchspec.model.blocks.layer import LayerSpec

Angles = tuple[Tensor, Tensor]
"""cos and sin [L, D], the first half of sin negated"""


@dataclass(frozen=True, slots=True)
class Step:
    """A draft step, computed for all positions at once."""

    count: int
    """Number of draft steps in total."""
    rows: int
    angles: Angles
    """Those of this step's positions."""


class Norm(nn.Module):
    """RMSNorm, computed in fp32 or fp64."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self.weight, self.eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(x.dtype)


class Layer(nn.Module):
    """A decoder layer of this shape; its parameters are named as in a checkpoint, relative to the layer."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec, eps = spec, spec.attention.eps
        for block in spec.blocks:
            for vector in block.vectors:
                _place(self, vector.name.removesuffix(".weight"), Norm(vector.shape[0], eps))
        for block in spec.blocks:
            for part in projections(block):
                _place(self, part.name, nn.Linear(part.k, part.rows, bias=part.bias))
        self._layer = spec.build(_Modules(self))

    def forward(self, state: Tensor, step: Step, keys: Keys) -> Tensor:
        """The residual stream after the layer, from `state` [B, L, H] before it. Adds K and V to `keys`."""
        stream, pass_ = GradientStream(state), StepAttention(step, keys, self.spec.attention.head_dim)
        return self._finish(self._layer.attention.begin(stream, pass_), stream, pass_)

    def of_normed(self, state: Tensor, x: Tensor, step: Step, keys: Keys) -> Tensor:
        """The same with x, the input of attention: [B, L, input_size], or [1, 1, input_size] for a mask token."""
        pass_ = StepAttention(step, keys, self.spec.attention.head_dim)
        return self._finish(self._layer.attention.queries_of(x, pass_), GradientStream(state), pass_)

    def _finish(self, q: Tensor, stream: GradientStream, pass_: StepAttention) -> Tensor:
        self._layer.finish(q, stream, pass_, add_in_product=False)
        return stream.state


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    """Register a module under a dotted path."""
    *parents, name = path.split(".")
    for parent in parents:
        if not hasattr(root, parent):
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, module)


class _Modules:
    """A layer's parameters as a BlockSource."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    def product(self, spec: ProductSpec) -> Product:
        return SeparateProduct([self._root.get_submodule(part.name) for part in spec.parts])

    def vector(self, name: str) -> Tensor:
        return self._root.get_parameter(name)

    def grouped(self, spec: GroupedSpec) -> GroupedProduct:
        raise NotImplementedError  # layers of heads are dense


class SeparateProduct(Product):
    """A product whose parts are separate modules. It returns a tuple of their outputs, or the output itself if there is one
    part."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts

    def __call__(self, x: Tensor, lora: LoraTokens | None = None) -> Any:
        outputs = tuple(part(x) for part in self._parts)
        return outputs[0] if len(outputs) == 1 else outputs

    def swiglu(self, x: Tensor, lora: LoraTokens | None = None) -> Tensor:
        out: Tensor = SwiGLU.apply(*self(x))  # type: ignore[no-untyped-call]
        return out


class GradientStream:
    """The residual stream, never changed in place."""

    live = None
    """See `Stream`."""

    def __init__(self, state: Tensor) -> None:
        self.state = state

    def norms_in_product(self, product: Product, *, gated: bool) -> bool:
        return False

    def project(
        self, norm: Tensor | None, eps: float, product: Product, lora: LoraTokens | None, *, gated: bool = False,
        out_aux: Tensor | None = None,
    ) -> Any:
        x = self.state if norm is None else self.normed(norm, eps)
        return product.swiglu(x, lora) if gated else product(x, lora)

    def normed(self, norm: Tensor, eps: float, *, out_aux: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return _rms_norm(self.state, norm, eps)

    def reduced(self, values: Tensor) -> Tensor:
        return values

    def add(self, values: Tensor) -> None:
        self.state = self.state + values

    def add_output(self, values: Tensor) -> None:
        self.add(values)

    def add_pairs(self, values: Tensor, weights: Tensor, shared: Tensor | None = None) -> None:
        raise NotImplementedError  # layers of heads are dense

    def add_product(self, product: Product, x: Tensor, lora: LoraTokens | None, *, in_product: bool) -> None:
        self.add(product(x, lora))


class StepAttention:
    """StoreKV and Attend of a draft step: K and V of this step and of earlier ones are in `Keys`, not in pages."""

    lora: LoraTokens | None = None

    def __init__(self, step: Step, keys: Keys, head_dim: int) -> None:
        self._step, self._keys, self._head_dim = step, keys, head_dim

    def rotate_and_store(self, qkv: Any, *, q_norm: Tensor | None, k_norm: Tensor | None, eps: float) -> Tensor:
        """Rotate q and k, add k and v to the keys, and return q [B or 1, L, NH, D]. qkv: q, k and v [B or 1, L or 1, heads *
        D]."""
        assert q_norm is None, "heads with q and k norms are not trained"
        cos, sin = self._step.angles
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)).expand(-1, len(cos), -1, -1) for part in qkv)
        self._keys.add(RoPE.apply(k, cos, sin), v, self._step.count)  # type: ignore[no-untyped-call]
        rotated: Tensor = RoPE.apply(q, cos, sin)  # type: ignore[no-untyped-call]
        return rotated

    def __call__(self, q: Tensor, scale: float, sink_logits: Tensor | None = None) -> Tensor:
        assert sink_logits is None, "heads with sinks are not trained"
        return attend(q.expand(self._step.rows, -1, -1, -1).contiguous(), self._keys).flatten(2)
