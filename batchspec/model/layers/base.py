"""The parts of a decoder as pure shapes: blocks, their matrix products and their vectors. No weights here.

A decoder layer is a mixer, such as attention, and an MLP, or one of them; the input of each is a norm of the residual stream. A
block names its projections and vectors relative to the layer (`self_attn.q_proj`). All code that needs shapes sums over blocks:
the loader, dummy weights, the tuner, the cost model, the memory plan and `plan`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, Self

from batchspec.errors import ConfigError

FLOATS = ("F64", "F32", "F16", "BF16")
"""Floating-point dtypes in a file that can be converted to any model dtype, as safetensors calls them."""

Role = Literal["weight", "bias", "norm", "scale", "zero_points", "table", "index"]

Cut = Literal["columns", "rows"]
"""How tensor parallelism divides a product. columns (column parallel): each rank computes some of the outputs, so the rows of
W [N, K] are divided. rows (row parallel): each rank reads some of the inputs, so the columns of W are divided, and the outputs of
all ranks are added up."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model a process computes, among `ranks` processes that compute it together (tensor parallelism)."""

    rank: int = 0
    ranks: int = 1

    def of(self, what: str, size: int, unit: int = 1) -> slice:
        """The part of `size` values that is this rank's, in whole units; the last unit of all may be shorter.

        All ranks have equally many units, or the first ones have one more than the others: rank 0 has the most.
        Raises ConfigError if a rank would have none, and for units of one value if the parts are not equal.
        """
        units = -(-size // unit)
        if units < self.ranks or (unit == 1 and size % self.ranks):
            parts = "equal parts" if unit == 1 else f"parts in blocks of {unit}"
            raise ConfigError(f"{what} {size} cannot be cut into {self.ranks} {parts}; lower cluster.tensor_parallel")
        each, more = divmod(units, self.ranks)
        first = self.rank * each + min(self.rank, more)
        return slice(first * unit, min(size, (first + each + (self.rank < more)) * unit))


WHOLE = Shard()
"""The shard of a process that computes a model alone."""


class Share(NamedTuple):
    """The part of one product, or of one vector, that a rank holds."""

    cut: Cut
    ranges: tuple[slice, ...]
    """columns: ranges of the rows of W, several if a tensor of the file holds several projections. rows: one range of its
    columns."""
    adds_bias: bool = True
    """False: W is cut by rows, and another rank adds the bias."""


def whole_shares(products: tuple[ProductSpec, ...]) -> dict[str, Share]:
    """All rows of each projection, on every rank."""
    return {part.name: Share("columns", (slice(0, part.rows),)) for product in products for part in product.parts}


def shifted(own: slice, by: int) -> slice:
    return slice(own.start + by, own.stop + by)


def scaled(own: slice, by: int) -> slice:
    """The range of values of some heads, or rows, of `by` values each."""
    return slice(own.start * by, own.stop * by)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint file."""

    name: str
    shape: tuple[int, ...]
    role: Role
    dtypes: tuple[str, ...] = FLOATS
    """dtypes that the file may have, as safetensors calls them."""
    offset: float = 0.0
    """Added to the stored values, in fp32 or wider."""
    wide: bool = False
    """Whether it is kept in fp32 or wider, whatever the model's dtype is."""
    others: tuple[tuple[int, ...], ...] = ()
    """Other shapes in which the file may hold the same values."""
    typical: float = 1.0
    """Among dummy weights the value of a scale, the mean of zero points, or of an index how often each value comes, one after
    another."""
    shuffled: bool = False
    """Whether the values of an index among dummy weights come in any order."""
    between: tuple[float, float] | None = None
    """Range of the values among dummy weights; None: they are as its role says."""
    words: tuple[int, ...] = ()
    """The only values that the file may have; (): any."""


@dataclass(frozen=True, slots=True)
class NormForm:
    """How the RMS norms of a family use their weights."""

    offset: float = 0.0
    """Added to the stored weight: 1 if the file holds the difference to 1."""
    wide: bool = False
    """Whether the normed value is multiplied in fp32 and rounded once; otherwise it is rounded, then multiplied in the model's
    dtype. Kernels tell the two apart by the weight's dtype."""

    def tensor(self, name: str, size: int) -> TensorSpec:
        """The weight [size] of a norm of this name."""
        return TensorSpec(f"{name}.weight", (size,), "norm", offset=self.offset, wide=self.wide)


PLAIN_NORM = NormForm()


@dataclass(frozen=True, slots=True)
class Projection:
    """y = x W' + b with W [rows, k]. Which tensors a file holds for it depends on the weight format (`batchspec.model.quant`)."""

    name: str
    """its name relative to the layer, without `.weight`"""
    rows: int
    k: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ProductSpec:
    """Projections of one input that are multiplied as one matrix [rows, k], their rows one after another."""

    parts: tuple[Projection, ...]
    quantisable: bool = True
    """Whether model.quantize quantises its weights. Those of gates and routers stay in the model's dtype."""

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def k(self) -> int:
        return self.parts[0].k

    @property
    def bias(self) -> bool:
        return self.parts[0].bias


@dataclass(frozen=True, slots=True)
class Clamp:
    """g sigmoid(alpha g) (u + 1) with g = min(gate, limit), u = clamp(up, -limit, limit), in place of silu(gate) up."""

    alpha: float
    limit: float


Gating = Literal["silu", "gelu_tanh", "relu2"] | Clamp
"""What comes between the two products of an expert: silu(gate) up, gelu_tanh(gate) up, or what `Clamp` says. relu2: there is no
gate, and relu(up)^2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedSpec:
    """One matrix [rows, k] for each of E experts; a token is multiplied only with the matrices of its own experts.

    Which tensors a file holds for it depends on the weight format (`batchspec.model.quant`).
    """

    name: str
    """name of the experts, relative to the layer"""
    parts: tuple[str, ...]
    """Names of the projections of an expert that are multiplied as one matrix, their rows one after another."""
    num_experts: int
    part_rows: int
    """Number of rows of each of these projections."""
    k: int
    bias: bool = False
    stacked: bool = False
    """Whether a file holds the projections of all experts as one tensor."""
    interleaved: bool = False
    """Whether even rows in the file are the gate's and odd ones up's; in memory the gate's come first."""

    @property
    def rows(self) -> int:
        return len(self.parts) * self.part_rows

    def of(self, expert: int) -> ProductSpec:
        """The product of one expert; stacked experts all have the same names."""
        names = (f"{self.name}.{part}" if self.stacked else f"{self.name}.{expert}.{part}" for part in self.parts)
        return ProductSpec(tuple(Projection(name, self.part_rows, self.k, self.bias) for name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """E MLPs of one shape: the grouped products gate-up, with the gate first, or up alone where there is no gate, and down."""

    name: str
    """name relative to the layer"""
    num_experts: int
    hidden_size: int
    expert_size: int
    """I, number of values between the two products of one expert"""
    parts: tuple[str, str, str] | tuple[str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of gate, up and down of each expert; without a gate of up and down. Or of gate-up and down of all experts, stacked,
    gate and up interleaved."""
    bias: bool = False
    gating: Gating = "silu"

    @property
    def _stacked(self) -> bool:
        return len(self.parts) == 2 and self.gating != "relu2"

    @property
    def gate_up(self) -> GroupedSpec:
        rows = (2 if self._stacked else 1) * self.expert_size
        return self._grouped(self.parts[:-1], rows, self.hidden_size, interleaved=self._stacked)

    @property
    def down(self) -> GroupedSpec:
        return self._grouped(self.parts[-1:], self.hidden_size, self.expert_size)

    def _grouped(self, parts: tuple[str, ...], rows: int, k: int, *, interleaved: bool = False) -> GroupedSpec:
        return GroupedSpec(
            name=self.name, parts=parts, num_experts=self.num_experts, part_rows=rows, k=k, bias=self.bias,
            stacked=self._stacked, interleaved=interleaved,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """A matrix product of a forward pass over T tokens: how it can be computed, and how often its weight is stored, read and
    used."""

    product: ProductSpec
    ops: tuple[str, ...]
    """Kernels that can compute it (`batchspec.kernels.gemm`); those with a fused norm or sum only if H is small."""
    stored: int = 1
    """Number of weights of this shape in memory, such as the experts of an MoE."""
    read: float = 1
    """Number of these weights that T tokens read, on average."""
    active: int = 1
    """Number of these weights with which each token is multiplied."""
    grouped: bool = False
    """Whether they are weights of experts."""

    @property
    def size(self) -> int:
        """Number of values of one weight."""
        return self.product.rows * self.product.k


@dataclass(frozen=True, slots=True, kw_only=True)
class NormedSpec:
    """A block whose input, the residual stream, or whose output may be normed."""

    hidden_size: int
    eps: float
    """epsilon of its norms"""
    norm: str | None
    """name of the norm of the residual stream; None: the input is not normed"""
    post_norm: str | None = None
    """name of the norm of the block's output; None: it is not normed"""
    out_scale: float | None = None
    """Factor of the block's output, before it is normed or added to the stream; None: 1."""
    out_factor: str | None = None
    """Name of a number [1] with which the stream is multiplied after the normed output is added; None: it is not multiplied."""
    norms: NormForm = PLAIN_NORM

    @property
    def grouped(self) -> tuple[GroupedSpec, ...]:
        return ()

    @property
    def num_sums(self) -> int:
        return 1

    @property
    def stream_norms(self) -> tuple[TensorSpec, ...]:
        """The weights of these norms, and the factor."""
        norms = (self.norms.tensor(name, self.hidden_size) for name in (self.norm, self.post_norm) if name is not None)
        return *norms, *(() if self.out_factor is None else (TensorSpec(self.out_factor, (1,), "scale"),))

    @property
    def norms_in_kernel(self) -> bool:
        """Whether kernels that norm their input can compute its norm."""
        return self.norm is not None and self.norms == PLAIN_NORM

    def gemm_of_output(self, product: ProductSpec) -> Gemm:
        """The block's last product. A kernel can add it to the stream unless its output is normed or multiplied first."""
        added = self.post_norm is None and self.out_scale is None
        return Gemm(product=product, ops=("linear", "linear_add") if added else ("linear",))


class WholeBlockSpec(ABC):
    """A block of plain products that every rank holds in full."""

    __slots__ = ()

    @property
    @abstractmethod
    def products(self) -> tuple[ProductSpec, ...]:
        """As of `BlockSpec`."""

    @property
    def grouped(self) -> tuple[GroupedSpec, ...]:
        return ()

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        return ()

    @property
    def num_sums(self) -> int:
        return 0

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        return tuple(Gemm(product=product, ops=("linear",)) for product in self.products)

    def sharded(self, shard: Shard, unit: int) -> Self:
        return self

    def shares(self, shard: Shard, unit: int) -> Mapping[str, Share]:
        return whole_shares(self.products)


class BlockSpec(Protocol):
    """The shape of a block. Instances are frozen dataclasses; the `build(source)` of each makes the block that computes."""

    __slots__ = ()

    @property
    def hidden_size(self) -> int:
        """Width H of the residual stream."""

    @property
    def products(self) -> tuple[ProductSpec, ...]:
        """All matrix products whose weights are in the checkpoint, in loading order, except grouped ones."""

    @property
    def grouped(self) -> tuple[GroupedSpec, ...]:
        """The grouped products of experts, loaded after the others."""

    @property
    def vectors(self) -> tuple[TensorSpec, ...]:
        """Norms and other small tensors, with names relative to the layer. They are kept in the model's dtype."""

    @property
    def inner_size(self) -> int:
        """Inner width of the block: heads * head_dim, or the number of values between the MLP's two products."""

    @property
    def num_sums(self) -> int:
        """Number of times that ranks add up their parts of its output."""

    @property
    def activation_size(self) -> int:
        """Number of values of one token that are in memory at once inside the block, without the residual stream."""

    def gemms(self, tokens: float) -> tuple[Gemm, ...]:
        """The products of a forward pass over `tokens` tokens."""

    def sharded(self, shard: Shard, unit: int) -> Self:
        """The shape of what one rank computes. Raises ConfigError for a shape that cannot be cut.

        unit  number of values between the two products of an MLP, or of an expert, that cannot be divided between ranks
        """

    def shares(self, shard: Shard, unit: int) -> Mapping[str, Share]:
        """What a rank holds: the part of each projection, by its name; of each grouped product, by the name of the first
        projection of its first expert, as a range of the values between the two products of an expert; and of vectors that are
        not whole on every rank, which are cut by columns.

        unit  number of values between the two products of an MLP, or of an expert, that cannot be divided between ranks
        """


def projections(block: BlockSpec) -> Iterator[Projection]:
    """All projections of a block, in the order in which they are loaded."""
    for product in block.products:
        yield from product.parts
