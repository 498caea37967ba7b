"""The gated MLP: down(act(gate(x)) * up(x)), act SiLU (SwiGLU) or GELU (GEGLU) (Shazeer 2020, arXiv 2002.05202).

With relu2 it has no gate: down(relu(up(x))^2) (So et al. 2021, arXiv 2109.08668).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from batchspec.kernels.lora.lora_tokens import LoraTokens
from batchspec.model.fused import activation_quantised, gelu_tanh_and_mul, relu_squared, rms_norm
from batchspec.model.layers.base import (
    Gemm,
    NormedSpec,
    ProductSpec,
    Projection,
    Shard,
    Share,
    TensorSpec,
    shifted,
)
from batchspec.model.layers.forward import BlockSource, Stream
from batchspec.model.layers.scaled import column_scaled_product, scaled_product


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlpSpec(NormedSpec):
    """The shape of a gated MLP."""

    inner_size: int
    bias: bool = False
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    """relu2: there is no gate."""
    gate_scale: float = 1.0
    """Factor of gate(x)."""
    parts: tuple[str, str, str] | tuple[str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of gate, up and down; without a gate of up and down. Or of gate-up, which the file holds as one projection, the
    gate's rows first, and of down."""
    name: str = "mlp"
    norm: str | None = "post_attention_layernorm"

    @property
    def has_gate(self) -> bool:
        return self.activation != "relu2"

    @property
    def gate_up(self) -> ProductSpec:
        """Of gate and up, or of up alone."""
        *into, _ = self.parts
        rows = (2 if self.has_gate else 1) * self.inner_size // len(into)
        return ProductSpec(tuple(Projection(f"{self.name}.{part}", rows, self.hidden_size, self.bias) for part in into))

    @property
    def down(self) -> ProductSpec:
        return ProductSpec((Projection(f"{self.name}.{self.parts[-1]}", self.hidden_size, self.inner_size, self.bias),))

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        return self.gate_up, self.down

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        return self.stream_norms

    @property
    def activation_size(self) -> int:
        """Values of gate and up, and of their product."""
        return 3 * self.inner_size

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        gated: tuple[str, ...] = ("linear", "swiglu") if self.activation == "silu" else ("linear",)
        if self.gate_scale != 1:
            gated = ("linear",)
        elif self.norms_in_kernel:
            gated += ("norm_swiglu" if self.activation == "silu" else "norm_linear",)
        return Gemm(product=self.gate_up, ops=gated), self.gemm_of_output(self.down)

    def _inner(self, shard: Shard, unit: int) -> slice:
        return shard.of("intermediate_size", self.inner_size, unit)

    def sharded(self, shard: Shard, unit: int) -> GatedMlpSpec:
        inner = self._inner(shard, unit)
        return replace(self, inner_size=inner.stop - inner.start)

    def shares(self, shard: Shard, unit: int) -> Mapping[str, Share]:
        inner = self._inner(shard, unit)
        *into, down = self.parts
        fused = len(into) == 1 and self.has_gate
        ranges = (inner, shifted(inner, self.inner_size)) if fused else (inner,)
        shares = dict.fromkeys(into, Share("columns", ranges)) | {down: Share("rows", (inner,), shard.rank == 0)}
        return {f"{self.name}.{part}": share for part, share in shares.items()}

    def build(self, source: BlockSource) -> GatedMlp:
        return GatedMlp(self, source)


class GatedProducts:
    """The products of an MLP with SiLU, or without a gate, of an input that the caller has normed and with an output that the
    caller adds."""

    def __init__(self, spec: GatedMlpSpec, source: BlockSource) -> None:
        assert spec.activation != "gelu_tanh"
        assert spec.gate_scale == 1
        self._has_gate = spec.has_gate
        self._gate_up, self._down = source.product(spec.gate_up), scaled_product(source.product(spec.down), spec.out_scale)

    def __call__(self, x: Tensor, lora: LoraTokens | None) -> Tensor:
        """x [T, H] -> [T, H]; of a model of several ranks this rank's part of a sum."""
        if not self._has_gate:
            plain: Tensor = self._down(relu_squared(self._gate_up(x, lora)), lora)
            return plain
        form = self._down.fp8_form
        if form is not None:
            return self._down.of_fp8(activation_quantised(self._gate_up(x, lora), form, gelu=False))
        out: Tensor = self._down(self._gate_up.swiglu(x, lora), lora)
        return out


class GatedMlp:
    """See the module's docstring."""

    num_experts_read = None

    def __init__(self, spec: GatedMlpSpec, source: BlockSource) -> None:
        self._spec, self._silu = spec, spec.activation == "silu"
        self._norm = None if spec.norm is None else source.vector(f"{spec.norm}.weight")
        self._post_norm = None if spec.post_norm is None else source.vector(f"{spec.post_norm}.weight")
        self._out_factor = None if spec.out_factor is None else source.vector(spec.out_factor)
        self._gate_up = source.product(spec.gate_up)
        if spec.gate_scale != 1:
            assert self._norm is not None
            assert spec.has_gate
            sizes = (spec.inner_size, spec.gate_scale), (spec.inner_size, 1.0)
            self._gate_up = column_scaled_product(self._gate_up, sizes, self._norm)
        self._down = scaled_product(source.product(spec.down), spec.out_scale)

    def pass_sizes(self, most: int) -> Sequence[int]:
        return ()

    def norms_in_product(self, stream: Stream) -> bool:
        return self._spec.norms_in_kernel and stream.norms_in_product(self._gate_up, gated=self._silu)

    def __call__(self, stream: Stream, lora: LoraTokens | None, *, add_in_product: bool) -> None:
        if self._post_norm is not None:
            stream.add(self.output(stream, lora), self._out_factor)
        elif self._down.fp8_form is None or not self._spec.has_gate:
            stream.add_product(self._down, self._inner(stream, lora), lora, in_product=add_in_product)
        else:
            stream.add_output(self._product(stream, lora))

    def output(self, stream: Stream, lora: LoraTokens | None) -> Tensor:
        """[T, H] the output of a block that norms it, the same on all ranks."""
        assert self._post_norm is not None
        return rms_norm(stream.reduced(self._product(stream, lora)), self._post_norm, self._spec.eps)

    def _product(self, stream: Stream, lora: LoraTokens | None) -> Tensor:
        """The output of the last product, of this rank."""
        form = self._down.fp8_form
        if form is not None and self._spec.has_gate:
            gate_up = stream.project(self._norm, self._spec.eps, self._gate_up, lora)
            return self._down.of_fp8(activation_quantised(gate_up, form, gelu=not self._silu))
        out: Tensor = self._down(self._inner(stream, lora), lora)
        return out

    def _inner(self, stream: Stream, lora: LoraTokens | None) -> Tensor:
        inner: Tensor = stream.project(self._norm, self._spec.eps, self._gate_up, lora, gated=self._silu)
        if self._silu:
            return inner
        return gelu_tanh_and_mul(inner) if self._spec.has_gate else relu_squared(inner)
