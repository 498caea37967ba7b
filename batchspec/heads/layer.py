"""The decoder layer of a head in training: the forward pass of `batchspec.model.layers` over differentiable operations.

B rows, L positions (padded at the end), T = B * L tokens, H hidden, NH / KVH heads of D numbers. Inside a layer tokens are flat
[T, ...], one row after another, as in inference. Parameters have the names of published checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchspec.heads.attend import Keys, attend
from batchspec.heads.experts import DifferentiableExperts
from batchspec.heads.fused import RoPE, SwiGLU
from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.layers.base import GroupedSpec, ProductSpec, Projection, TensorSpec, projections
from batchspec.model.layers.forward import Product
from batchspec.model.layers.layer import DecoderLayer, LayerSpec

Angles = tuple[Tensor, Tensor]
"""cos and sin [L, R], the first half of sin negated; R of the D numbers of a head are rotated"""


@dataclass(frozen=True, slots=True)
class Step:
    """A draft step, computed for all positions at once."""

    count: int
    """Number of draft steps in total."""
    rows: int
    """B"""
    angles: Angles
    """Those of this step's positions."""

    @property
    def length(self) -> int:
        """L"""
        return len(self.angles[0])


class Norm(nn.Module):
    """RMSNorm, computed in fp32 or fp64. wide: see `NormForm`."""

    def __init__(self, size: int, eps: float, *, wide: bool = False) -> None:
        super().__init__()
        self.weight, self.eps, self.wide = nn.Parameter(torch.ones(size)), eps, wide

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, wide=self.wide)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, wide: bool) -> Tensor:
    """RMSNorm over the last dimension of x."""
    dtype = torch.promote_types(x.dtype, weight.dtype) if wide else x.dtype
    return F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps).to(x.dtype)


class Layer(nn.Module):
    """A decoder layer of this shape; its parameters are named as in a checkpoint, relative to the layer."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec
        for block in spec.blocks:
            for vector in block.vectors:
                place(self, vector.name.removesuffix(".weight"), _vector(vector, spec.attention.eps))
        for block in spec.blocks:
            for part in projections(block):
                place(self, part.name, nn.Linear(part.k, part.rows, bias=part.bias))
        for part in (part for block in spec.blocks for grouped in block.grouped for part in _expert_parts(grouped)):
            # Not initialised: an MoE has hundreds of large ones, and what is loaded or drawn overwrites them.
            place(self, part.name, nn.utils.skip_init(nn.Linear, part.k, part.rows, bias=False))

    def forward(self, state: Tensor, step: Step, keys: Keys) -> Tensor:
        """The residual stream after the layer, from `state` [B, L, H] before it. Adds K and V to `keys`."""
        return self.through(state.flatten(0, 1), self._attention(step, keys)).view(step.rows, step.length, -1)

    def through(self, state: Tensor, pass_: TrainedAttention) -> Tensor:
        """The same of flat tokens [T, H], whatever they attend to."""
        layer, stream = self._begin(state)
        layer.finish(layer.attention.begin(stream, pass_), stream, pass_, add_in_product=False)
        return stream.state

    def of_normed(self, state: Tensor, x: Tensor, step: Step, keys: Keys) -> Tensor:
        """The same with x, the input of attention: [B, L, input_size], or [1, 1, input_size] for a mask token."""
        pass_, (layer, stream) = self._attention(step, keys), self._begin(state.flatten(0, 1))
        layer.finish(layer.attention.queries_of(x.flatten(0, 1), pass_), stream, pass_, add_in_product=False)
        return stream.state.view(step.rows, step.length, -1)

    def _attention(self, step: Step, keys: Keys) -> StepAttention:
        return StepAttention(step, keys, self.spec.attention.head_dim, wide=self.spec.attention.norms.wide)

    def _begin(self, state: Tensor) -> tuple[DecoderLayer, GradientStream]:
        """What one pass needs. The layer is built anew, because blocks may join parameters into tensors, such as the matrix of a
        router, through which gradients flow once."""
        return self.spec.build(_Modules(self)), GradientStream(state, wide=self.spec.attention.norms.wide)


def _vector(vector: TensorSpec, eps: float) -> nn.Module:
    """The module that has a norm's weight, or the matrix of a router."""
    if vector.role == "norm":
        return Norm(vector.shape[0], eps, wide=vector.wide)
    assert vector.role == "weight", f"{vector.name} is not trained"  # sinks, and biases of routers
    rows, size = vector.shape
    return nn.Linear(size, rows, bias=False)


def _expert_parts(grouped: GroupedSpec) -> Iterator[Projection]:
    assert not grouped.stacked, f"{grouped.name} is not trained"
    assert not grouped.bias, f"{grouped.name} is not trained"
    for expert in range(grouped.num_experts):
        yield from grouped.of(expert).parts


def place(root: nn.Module, path: str, module: nn.Module) -> None:
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

    def matrix(self, spec: ProductSpec) -> Tensor:
        (part,) = spec.parts
        return self._root.get_parameter(f"{part.name}.weight")

    def vector(self, name: str) -> Tensor:
        return self._root.get_parameter(name)

    def grouped(self, spec: GroupedSpec) -> DifferentiableExperts:
        experts = self._root.get_submodule(spec.name)
        return DifferentiableExperts(
            [[experts.get_submodule(f"{i}.{part}") for i in range(spec.num_experts)] for part in spec.parts]
        )


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
    """The residual stream [T, H], never changed in place."""

    live = None
    """See `Stream`."""

    def __init__(self, state: Tensor, *, wide: bool) -> None:
        self.state, self._wide = state, wide

    @property
    def layer_input(self) -> Tensor:
        raise AssertionError("layers with inputs of their own are not trained")

    def norms_in_product(self, product: Product, *, gated: bool) -> bool:
        return False

    def project(
        self, norm: Tensor | None, eps: float, product: Product, lora: LoraTokens | None, *, gated: bool = False,
        out_aux: Tensor | None = None,
    ) -> Any:
        x = self.state if norm is None else self.normed(norm, eps)
        return product.swiglu(x, lora) if gated else product(x, lora)

    def normed(self, norm: Tensor, eps: float, *, out_aux: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return rms_norm(self.state, norm, eps, wide=self._wide)

    def settle(self, out_aux: Tensor) -> None:
        out_aux.copy_(self.state)

    def reduced(self, values: Tensor) -> Tensor:
        return values

    def add(self, values: Tensor, factor: Tensor | None = None) -> None:
        assert factor is None, "layers whose output is scaled are not trained"
        self.state = self.state + values

    def add_output(self, values: Tensor) -> None:
        self.add(values)

    def add_pairs(self, values: Tensor, weights: Tensor, shared: Tensor | None = None) -> None:
        if shared is not None:
            self.add(shared)
        self.add(self.combined(values, weights))

    def combined(self, values: Tensor, weights: Tensor) -> Tensor:
        return (weights.unsqueeze(-1) * values.view(*weights.shape, -1)).sum(1).to(values.dtype)

    def add_product(self, product: Product, x: Tensor, lora: LoraTokens | None, *, in_product: bool) -> None:
        self.add(product(x, lora))


class TrainedAttention(ABC):
    """StoreKV and Attend of a pass in training."""

    lora: LoraTokens | None = None

    def __init__(self, head_dim: int, *, wide: bool) -> None:
        self._head_dim, self._wide = head_dim, wide

    def rotate_and_store(
        self, qkv: Any, *, q_norm: Tensor | None, k_norm: Tensor | None, eps: float, v_norm: bool = False, shared_v: bool = False
    ) -> Tensor:
        """Norm and rotate q and k, add k and v to the keys, and return q [T, NH, D], or [L, NH, D] for a mask token.

        qkv  q, k and v [T, heads * D], or [1, heads * D] for a mask token, which is the same at all positions
        """
        assert not v_norm, "heads that norm V are not trained"
        assert not shared_v, "heads whose V is what k_proj computes are not trained"
        q, k, v = (self._placed(part.view(len(part), -1, self._head_dim)) for part in qkv)
        if q_norm is not None and k_norm is not None:
            assert len(q_norm) == self._head_dim, "heads with norms over all of q and of k are not trained"
            q, k = (rms_norm(x, norm, eps, wide=self._wide) for x, norm in ((q, q_norm), (k, k_norm)))
        self._store(rotated(k, self._angles), v)
        return rotated(q, self._angles).flatten(0, 1)

    def rotate(self, q: Tensor, *, q_norm: Tensor | None, eps: float) -> Tensor:
        raise AssertionError("layers without K and V of their own are not trained")

    def __call__(self, q: Tensor, scale: float, sink_logits: Tensor | None = None) -> Tensor:
        """[T, NH * D]"""
        assert sink_logits is None, "heads with sinks are not trained"
        return self._attend(q, scale)

    @property
    @abstractmethod
    def _angles(self) -> Angles:
        """Those of the second dimension of what `_placed` returns."""

    @abstractmethod
    def _placed(self, heads: Tensor) -> Tensor:
        """[T, heads, D] -> [rows, tokens, heads, D]"""

    @abstractmethod
    def _store(self, k: Tensor, v: Tensor) -> None:
        """Keep K and V [rows, tokens, KVH, D]."""

    @abstractmethod
    def _attend(self, q: Tensor, scale: float) -> Tensor:
        """q [T, NH, D] -> [T, NH * D]"""


class StepAttention(TrainedAttention):
    """That of a draft step: K and V of this step and of earlier ones are in `Keys`."""

    def __init__(self, step: Step, keys: Keys, head_dim: int, *, wide: bool) -> None:
        super().__init__(head_dim, wide=wide)
        self._step, self._keys = step, keys

    @property
    def _angles(self) -> Angles:
        return self._step.angles

    def _placed(self, heads: Tensor) -> Tensor:
        """[B, L, heads, D], or [1, L, heads, D] for a mask token."""
        length = self._step.length
        return heads.expand(1, length, -1, -1) if len(heads) == 1 else heads.view(-1, length, *heads.shape[1:])

    def _store(self, k: Tensor, v: Tensor) -> None:
        self._keys.add(k, v, self._step.count)

    def _attend(self, q: Tensor, scale: float) -> Tensor:
        by_row = q.unflatten(0, (-1, self._step.length)).expand(self._step.rows, -1, -1, -1)
        return attend(by_row.contiguous(), self._keys).flatten(0, 1).flatten(1)


def rotated(x: Tensor, angles: Angles) -> Tensor:
    """RoPE of the first R numbers of each head of x [B, L, heads, D]."""
    cos, sin = angles
    width = cos.shape[-1]
    turned: Tensor = RoPE.apply(x[..., :width], cos, sin)  # type: ignore[no-untyped-call]
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)
