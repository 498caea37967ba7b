"""The tensors of a file against those that a part of a checkpoint must have, before one byte of a weight is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from batchspec.checkpoint.files import StoredTensor, listed
from batchspec.checkpoint.wrapped import plain_name
from batchspec.errors import CheckpointError
from batchspec.model.checkpoint_part import CheckpointPart
from batchspec.model.layers.attention.kv_scales import SUFFIXES
from batchspec.model.layers.base import FLOATS, TensorSpec
from batchspec.model.quant.formats import Formats
from batchspec.model.quant.grouped import expert_parts

_PACKED_HEADS = ("lm_head.qweight", "lm_head.weight_packed", "lm_head.weight_scale")
_EXPERTS = re.compile(r"\.experts\.(\d+\.)?")


def check_tensors(where: str, part: CheckpointPart, stored: Mapping[str, StoredTensor]) -> None:
    """Names, shapes and dtypes of tensors against those that this part of a checkpoint must have. stored: by those names.

    Raises CheckpointError, in one line: how many are missing, unexpected, misshapen and of a wrong dtype, the first ones by name.
    """
    expected = {tensor.name: tensor for tensor in part.tensors()}
    for copy, name in part.copies().items():
        if copy in stored:
            expected[copy] = replace(expected[name], name=copy)
    if stored.keys() - expected.keys():
        expected |= {tensor.name: tensor for tensor in part.spares() if tensor.name in stored}
    ignored = ("rotary_emb.inv_freq", *SUFFIXES)
    unexpected = [name for name in stored.keys() - expected.keys() if not (name.endswith(ignored) or part.ignores(name))]
    if problems := misfits(expected.values(), stored, unexpected):
        raise CheckpointError(f"{where}: the weights do not fit config.json: {'; '.join(problems)}")


def check_groups(where: str, formats: Formats, names: Iterable[str]) -> None:
    """Raises CheckpointError for a format that quantization_config gives only to modules that the files do not have.

    names  of all tensors in the files
    """
    found: set[str] = set()
    for name in names if formats.modules or formats.patterns else ():
        module = plain_name(name).rpartition(".")[0]
        while module and module not in found:
            found.add(module)
            module = module.rpartition(".")[0]
    if unmatched := formats.without_modules(found):
        raise CheckpointError(
            f"{where}: quantization_config gives a format of its own to {listed(unmatched)}, and the files have no such module; "
            "correct config.json, or download the files again"
        )


def check_products(where: str, part: CheckpointPart) -> None:
    """Raises CheckpointError for projections that are multiplied as one matrix, or experts of a layer, in several formats."""
    for prefix, block in part.blocks():
        products = [product.parts for product in block.products]
        products += [tuple(own for _, _, own in expert_parts(experts)) for experts in block.grouped]
        for parts in products:
            try:
                part.formats.of_product([prefix + own.name for own in parts])
            except CheckpointError as error:
                raise CheckpointError(f"{where}: {error}") from None


def misfits(expected: Iterable[TensorSpec], stored: Mapping[str, StoredTensor], unexpected: Collection[str]) -> list[str]:
    """What is missing, unexpected, of another shape or of a dtype that is not read."""
    by_name = {tensor.name: tensor for tensor in expected}
    missing, common = sorted(by_name.keys() - stored.keys()), sorted(by_name.keys() & stored.keys())
    wrong = [(title, sorted(names)) for title, names in (("missing", missing), ("unexpected", unexpected)) if names]
    if reason := _wrapper(missing, unexpected) or _other_experts(missing, unexpected):
        problems = [f"{len(missing)} missing and {len(unexpected)} unexpected tensors: {reason}"]
    else:
        most = [2 if len(names) == 2 else 3 - len(wrong) for _, names in wrong]
        problems = [
            f"{len(names)} {title} tensors: {listed(names, shown)}" for (title, names), shown in zip(wrong, most, strict=True)
        ]
    if any(name.startswith("block.0.") for name in unexpected):
        problems.append("names as in gpt-oss's folder original/: use the files of the folder above it")
    if packed := sorted(name for name in unexpected if name in _PACKED_HEADS):
        problems.append(f"{packed[0]}: a quantised output matrix is not supported: use a checkpoint that leaves it as it is")
    shapes = [
        f"{name} is {list(stored[name].shape)}, config.json says {list(by_name[name].shape)}"
        for name in common
        if stored[name].shape not in (by_name[name].shape, *by_name[name].others)
    ]
    floats = [name for name in common if by_name[name].dtypes == FLOATS and stored[name].dtype not in FLOATS]
    others = [
        f"{name} is {stored[name].dtype}, it must be {' or '.join(by_name[name].dtypes)}"
        for name in common
        if by_name[name].dtypes != FLOATS and stored[name].dtype not in by_name[name].dtypes
    ]
    if shapes:
        problems.append(listed(shapes, 1))
    if floats:
        found = listed([f"{name} is {stored[name].dtype}" for name in floats])
        problems.append(f"{found}: {', '.join(FLOATS)} are supported, quantized weights are not")
    if others:
        problems.append(listed(others, 1))
    return problems


def _wrapper(missing: Sequence[str], unexpected: Collection[str]) -> str:
    """What is wrong if a missing tensor is in the file with a prefix before its name, else empty."""
    for name in missing[:1]:
        tail = name.removeprefix("model.")
        for other in sorted(unexpected):
            if other.endswith(tail) and other.removesuffix(tail)[-1:] in ("", "."):
                return (
                    f"{listed([other])} is there instead of {name}: saved from inside a wrapper (torch.compile, a multimodal "
                    "model, PEFT); save the language model itself"
                )
    return ""


def _other_experts(missing: Iterable[str], unexpected: Collection[str]) -> str:
    """What is wrong if a file has a layer's experts in one tensor and they are read one by one, or the reverse, else empty."""
    asked, found = (
        {bool(match[1]) for name in names if (match := _EXPERTS.search(name))} for names in (missing, unexpected)
    )
    ways = ("in one tensor", "one by one")
    if len(asked) == len(found) == 1 and asked != found:
        (own,), (other,) = asked, found
        example = next(name for name in sorted(unexpected) if _EXPERTS.search(name))
        return (
            f"the file has a layer's experts {ways[other]}, {listed([example])}; with these weights only experts {ways[own]} are "
            "supported: use such a checkpoint"
        )
    return ""


def check_copies(where: str, part: CheckpointPart, names: Collection[str], read: Callable[[str], Tensor]) -> None:
    """Raises CheckpointError for an output matrix that should be the embedding and is not. read: the tensor of one of `names`."""
    for copy, name in part.copies().items():
        if copy in names and not torch.equal(read(copy), read(name)):
            raise CheckpointError(f"{where}: {copy} differs from the embedding although tie_word_embeddings is true")


def check_unread_tensors(
    where: str, tensors: Iterable[TensorSpec], names: Collection[str], read: Callable[[str], Tensor]
) -> None:
    """Raises CheckpointError for tensors of four-bit weights that are not read, because config.json says what they hold, and hold
    something else: groups of columns that are not in order, and zero points besides 8. read: the tensor of one of `names`."""
    for tensor in tensors:
        if tensor.name not in names:
            continue
        if tensor.name.endswith(".g_idx") and not tensor.shuffled:
            index = read(tensor.name)
            if not torch.equal(index.long(), torch.arange(len(index), device=index.device) // int(tensor.typical)):
                raise CheckpointError(
                    f"{where}: {tensor.name} does not divide the columns in order, and by quantization_config it does "
                    "(desc_act=false); correct it"
                )
        if tensor.words:
            words = read(tensor.name)
            if not torch.isin(words, torch.tensor(tensor.words, dtype=words.dtype, device=words.device)).all():
                raise CheckpointError(
                    f"{where}: {tensor.name} has zero points besides 8, and by quantization_config all are 8 (sym=true or "
                    "zero_point=false); correct it"
                )


def check_spares(where: str, part: CheckpointPart, names: Collection[str], read: Callable[[str], Tensor]) -> None:
    """Raises CheckpointError for a bias that is not used and is not zero. read: the tensor of one of `names`."""
    if any(name.endswith(".bias") for name in names):
        for tensor in part.spares():
            if tensor.role == "bias" and tensor.name in names and bool(read(tensor.name).any()):
                raise CheckpointError(
                    f"{where}: {tensor.name} is not zero, and by config.json the model has no such bias; correct config.json"
                )
