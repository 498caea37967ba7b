"""A part of a checkpoint that is loaded by itself: blocks under the prefixes of their names, and the formats of their weights.

The model is one (`ModelSpec`), its MTP layer another (`MtpSpec`). All code that needs shapes and bytes of weights sums over the
blocks: the loader, dummy weights, the tuner, the cost model, the memory plan and `plan`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

import torch

from batchspec.checkpoint.files import StoredTensor
from batchspec.model.layers.base import FLOATS, BlockSpec, Gemm, Shard, TensorSpec, projections
from batchspec.model.quant.base import Slices
from batchspec.model.quant.formats import ALL_PLAIN, Formats
from batchspec.model.quant.grouped import expert_parts
from batchspec.model.quant.plain import Plain

Item = TypeVar("Item")


class CheckpointPart(ABC):
    """What loading needs to know of a part of a checkpoint, and the bytes of its weights."""

    __slots__ = ()
    formats: Formats
    shard: Shard

    @property
    @abstractmethod
    def complete(self) -> CheckpointPart:
        """This part for all ranks: itself, unless it describes what one rank holds."""

    @abstractmethod
    def blocks(self) -> Iterator[tuple[str, BlockSpec]]:
        """Each block with the prefix of its names in the checkpoint, in the order of the forward pass."""

    @abstractmethod
    def tensors(self) -> Iterator[TensorSpec]:
        """Every tensor that the checkpoint must have for this part, by its full name."""

    def copies(self) -> dict[str, str]:
        """Tensors that the file may have besides these: each must be equal to the one that is named here."""
        return {}

    def ignores(self, name: str) -> bool:
        """Whether the file may have a tensor of this name, with any values, that nothing reads."""
        return False

    def spares(self) -> Iterator[TensorSpec]:
        """Tensors that the file may have besides these, and that are not used; biases must be zeros."""
        for prefix, block in self.blocks():
            grouped = (part for spec in block.grouped if not spec.stacked for _, _, part in expert_parts(spec))
            for part in (*projections(block), *grouped):
                for tensor in self.formats.of(prefix + part.name).spares(part):
                    yield replace(tensor, name=prefix + tensor.name)

    @abstractmethod
    def slices_beside_blocks(self) -> Slices:
        """What this rank holds of the tensors that belong to no block."""

    @abstractmethod
    def own(self, where: str, items: Mapping[str, Item]) -> dict[str, Item]:
        """Those of this part, by the names that its blocks have, of the tensors of a file.

        items  by their names in the file
        Raises CheckpointError for two of one name.
        """

    def gemms(self, tokens: float) -> Iterator[tuple[str, Gemm]]:
        """The products of all blocks for this number of tokens, with their prefix."""
        for prefix, block in self.blocks():
            for gemm in block.gemms(tokens):
                yield prefix, gemm

    def gemm_bytes(self, prefix: str, gemm: Gemm, dtype: torch.dtype) -> int:
        """Bytes in memory of one weight of this product."""
        weight_format = self.formats.of(prefix + gemm.product.parts[0].name)
        nbytes = weight_format.expert_nbytes if gemm.grouped else weight_format.nbytes
        return nbytes(gemm.product.rows, gemm.product.k, dtype)

    def multiplies_fp8(self, prefix: str, gemm: Gemm) -> bool:
        """Whether this product multiplies FP8 weights with quantised activations; other products multiply in the model's
        dtype."""
        return self.formats.quantises_input_of(prefix + gemm.product.parts[0].name)

    def unpacking(self, prefix: str, gemm: Gemm) -> float | None:
        """How long the kernel of this product takes to unpack a weight, relative to INT4; None: no kernel unpacks its weights,
        which are not packed, or dequantised by plain torch."""
        return self.formats.of(prefix + gemm.product.parts[0].name).unpacking(grouped=gemm.grouped)

    def dequantises(self, prefix: str, gemm: Gemm) -> bool:
        """Whether this product dequantises NVFP4 weights in plain torch, of experts all, and multiplies each with every token."""
        return self.formats.dequantises(prefix + gemm.product.parts[0].name)

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Bytes in memory of the weights of all blocks; norms and biases are too few to count."""
        return sum(gemm.stored * self.gemm_bytes(prefix, gemm, dtype) for prefix, gemm in self.gemms(1))


def formats_as_stored(
    part: CheckpointPart, stored: Mapping[str, StoredTensor], *, named_by: tuple[type, ...] = ()
) -> Formats:
    """The formats of this part, where products that its file holds unquantised are plain, whatever quantization_config says.

    stored    the tensors of its file, by the names that the blocks give them
    named_by  formats whose tools name all plain modules in quantization_config: these formats stay as they are
    """
    formats, plain = part.formats, set()
    for prefix, block in part.blocks():
        modules = {own.name: own.name for own in projections(block)}
        modules |= {experts.name: experts.of(0).parts[0].name for experts in block.grouped}
        for module, first in modules.items():
            weight = stored.get(f"{prefix}{first}.weight")
            if weight is not None and weight.dtype in FLOATS and not isinstance(formats.of(prefix + first), (Plain, *named_by)):
                plain.add(prefix + module)
    return replace(formats, plain_modules=(*formats.plain_modules, *sorted(plain)))


def block_tensors(block: BlockSpec, prefix: str, formats: Formats = ALL_PLAIN) -> Iterator[TensorSpec]:
    """Every tensor of a block by its full name: first the products', as their formats store them, then the vectors."""
    for part in projections(block):
        for tensor in formats.of(prefix + part.name).tensors(part):
            yield replace(tensor, name=prefix + tensor.name)
    for spec in block.grouped:
        for tensor in formats.of(prefix + spec.of(0).parts[0].name).grouped_tensors(spec):
            yield replace(tensor, name=prefix + tensor.name)
    for tensor in block.vectors:
        yield replace(tensor, name=prefix + tensor.name)
