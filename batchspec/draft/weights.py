"""The tensors of an EAGLE-3 head under one set of names, checked against its config before one of them is used."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from batchspec.draft.formats import HeadSpec, read_head
from batchspec.errors import CheckpointError
from batchspec.model.blocks.attention import AttentionSpec
from batchspec.model.blocks.base import ProductSpec, Projection, TensorSpec
from batchspec.model.blocks.gated_mlp import GatedMlpSpec
from batchspec.model.blocks.layer import LayerSpec
from batchspec.model.checkpoint_part import block_tensors
from batchspec.model.config_values import has_folder, shown
from batchspec.model.files import LocalFiles, ModelFiles, StoredTensor, listed, stored_tensors, weight_names
from batchspec.model.quant.plain import PLAIN
from batchspec.model.spec import ModelSpec
from batchspec.model.weights import Shapes, misfits, shapes_of

HIDDEN_NORM = "layers.0.hidden_norm.weight"
"""The norm of the feature that layer 0 reads."""
_TABLES = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.uint8, "U8": torch.uint8}
_IGNORED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A head's shape and its tensors by normalised name."""

    spec: HeadSpec
    tensors: dict[str, Tensor]
    map_ids: Tensor | None
    """int32 [draft vocabulary] target id of each draft id; None if they are equal."""


def normalised(name: str) -> str:
    """A tensor's name in either layout -> `fc.weight`, `layers.{i}.self_attn.q_proj.weight`, `norm.weight`, `d2t` ...

    Layer 0 is the one that reads embedding and feature.
    """
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    if found := re.match(r"additional_layers\.(\d+)\.", name):
        return f"layers.{int(found[1]) + 1}." + name[found.end() :]
    return name


def expected_tensors(spec: HeadSpec) -> list[TensorSpec]:
    """Every tensor that the spec requires, by normalised name, in the order in which `dummy_head` draws them.

    mask_hidden may have more leading dimensions of size one, and may be as wide as the head instead of its aux hidden states.
    The vocabulary tables d2t and t2d are checked separately.
    """
    fc, hidden = fc_product(spec), spec.hidden_size
    width = feature_width(spec)
    tensors = [] if fc is None else PLAIN.tensors(fc.parts[0])
    tensors = [*tensors, TensorSpec("norm.weight", (hidden,), "norm")]
    if spec.input_norm:
        tensors.append(TensorSpec("input_norm.weight", (width,), "norm"))
    if spec.fc_norm:
        names = (f"fc_norm.{i}.weight" for i in range(len(spec.aux_layer_ids)))
        tensors += [TensorSpec(name, (spec.target_hidden_size,), "norm") for name in names]
    if spec.own_embedding:
        tensors.append(TensorSpec("embed_tokens.weight", (spec.vocab_size, hidden), "weight"))
    if spec.own_head:
        tensors.append(TensorSpec("lm_head.weight", (spec.draft_part.stop - spec.draft_part.start, hidden), "weight"))
    if spec.mapped:
        tensors.append(TensorSpec("d2t", (spec.draft_vocab_size,), "table", ("I64", "I32")))
    if spec.mask_token_id is not None:
        tensors.append(TensorSpec("mask_hidden", (1, width), "weight"))
    for i, layer in enumerate(head_layers(spec)):
        found = [tensor for block in layer.blocks for tensor in block_tensors(block, head_prefix(i))]
        tensors += sorted(found, key=lambda tensor: ("weight", "bias", "norm").index(tensor.role))
    tensors.append(TensorSpec(HIDDEN_NORM, (hidden,), "norm"))
    return tensors


def expected_shapes(spec: HeadSpec) -> Shapes:
    """Names and shapes of `expected_tensors`."""
    return shapes_of(expected_tensors(spec))


def feature_width(spec: HeadSpec) -> int:
    """Number of values of the target's hidden states that a head reads for each token."""
    return len(spec.aux_layer_ids) * spec.target_hidden_size


def fc_product(spec: HeadSpec) -> ProductSpec | None:
    """Concatenated aux hidden states -> the feature [H]; None if the feature is the target's last hidden state itself."""
    if spec.final_hidden:
        return None
    return ProductSpec((Projection("fc", spec.hidden_size, feature_width(spec), spec.fc_bias),))


def head_layers(spec: HeadSpec) -> tuple[LayerSpec, ...]:
    """The decoder layers of a head. The input of layer 0 is the embedding and the feature, each normed, concatenated."""
    mlp = GatedMlpSpec(
        hidden_size=spec.hidden_size, inner_size=spec.intermediate_size, eps=spec.rms_eps, bias=spec.mlp_bias
    )
    attentions = [
        AttentionSpec(
            hidden_size=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            eps=spec.rms_eps,
            window=window,
            input_size=None if index else 2 * spec.hidden_size,
            qkv_bias=spec.qkv_bias,
            o_bias=spec.o_bias,
            qk_norm=spec.qk_norm,
        )
        for index, window in enumerate(spec.windows)
    ]
    return tuple(LayerSpec(attention, mlp) for attention in attentions)


def head_prefix(index: int) -> str:
    """The prefix of the normalised names of a layer's tensors."""
    return f"layers.{index}."


def read_head_spec(folder: Path, target: ModelSpec, *, aux_layers: str = "auto") -> HeadSpec:
    """The head of a folder, checked by `open_head`. Raises CheckpointError."""
    if not has_folder(folder, "draft.path"):
        raise CheckpointError(f"draft.path={folder}: no such folder; give the folder of an EAGLE-3 head")
    return open_head(LocalFiles(folder), target, aux_layers=aux_layers)


def open_head(files: ModelFiles, target: ModelSpec, *, aux_layers: str = "auto") -> HeadSpec:
    """Check a head by config.json, the headers of its weight files and its vocabulary tables; no weight is read.

    Raises CheckpointError for what `read_head` refuses, for tensors of wrong names, shapes or dtypes, and for a d2t that leads
    out of the vocabulary or contradicts t2d.
    """
    stored: dict[str, StoredTensor] = {}
    for name, tensor in stored_tensors(files).items():
        if name.endswith(_IGNORED):
            continue
        if normalised(name) in stored:
            raise CheckpointError(f"{files.where}: {listed([name])} is stored twice, under two names; export the head again")
        stored[normalised(name)] = tensor
    spec = read_head(files.folder, stored, target, aux_layers=aux_layers)
    _check(files.where, spec, stored)
    if spec.mapped:
        _map_ids(files.where, spec, {name: _table(files, stored[name]) for name in ("d2t", "t2d") if name in stored})
    return spec


def _table(files: ModelFiles, stored: StoredTensor) -> Tensor:
    """Read a table of integers, a few hundred kB."""
    content, _ = files.read(stored.file, stored.start, stored.end)
    return torch.frombuffer(bytearray(content), dtype=_TABLES[stored.dtype]).reshape(stored.shape)


def load_head(folder: Path, target: ModelSpec, *, dtype: torch.dtype, device: torch.device, aux_layers: str = "auto") -> Head:
    """Read a head's safetensors in the target's dtype.

    Raises CheckpointError for what `open_head` refuses.
    """
    spec = read_head_spec(folder, target, aux_layers=aux_layers)
    tensors: dict[str, Tensor] = {}
    for file_name in weight_names(LocalFiles(folder)):
        with safe_open(folder / file_name, framework="pt") as file:
            tensors |= {normalised(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    map_ids = _map_ids(shown(folder), spec, tensors) if spec.mapped else None
    kept = {name: tensors[name].to(device=device, dtype=dtype) for name in expected_shapes(spec) if name != "d2t"}
    if spec.mask_token_id is not None:
        kept["mask_hidden"] = kept["mask_hidden"].view(1, -1)
    return Head(spec, kept, None if map_ids is None else map_ids.to(device))


def dummy_head(spec: HeadSpec, *, dtype: torch.dtype, device: torch.device) -> Head:
    """Random weights of the right shapes, the same in every run on one kind of device; draft ids are spread over the
    vocabulary."""
    generator = torch.Generator(device).manual_seed(1)
    tensors = {}
    for tensor in expected_tensors(spec):
        if tensor.role != "table":
            out = torch.empty(tensor.shape, dtype=dtype, device=device)
            tensors[tensor.name] = out.fill_(1.0) if tensor.role == "norm" else out.normal_(0.0, 0.02, generator=generator)
    map_ids = torch.arange(spec.draft_vocab_size, device=device) * spec.vocab_size // spec.draft_vocab_size
    return Head(spec, tensors, map_ids.int() if spec.mapped else None)


def dummy_spec(target: ModelSpec, *, draft_vocab_size: int = 32000, parallel: bool = False) -> HeadSpec:
    """A typical head: one dense layer of the target's shape, three aux hidden states, 32,000 draft tokens, the target's
    embedding.

    parallel  it has a mask token, with which it drafts in parallel
    """
    vocab = min(draft_vocab_size, target.vocab_size)
    return HeadSpec(
        layout="flat", hidden_size=target.hidden_size, target_hidden_size=target.hidden_size, num_layers=1,
        num_heads=target.num_heads, num_kv_heads=target.num_kv_heads, head_dim=target.head_dim,
        intermediate_size=target.intermediate_size, vocab_size=target.vocab_size, draft_vocab_size=vocab,
        aux_layer_ids=default_aux_layers(target.num_layers), rms_eps=target.rms_eps,
        rope=target.rope.of_heads, windows=(None,),
        qkv_bias=False, o_bias=False, mlp_bias=False, fc_bias=False, qk_norm=False, norm_before_residual=False, input_norm=False,
        fc_norm=False, feed_normed=False, own_embedding=False, own_head=True, mapped=vocab < target.vocab_size,
        mask_token_id=target.vocab_size - 1 if parallel else None,
    )


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Low, middle and high boundaries as in published heads; for a model that is too shallow for them the last three."""
    usual = (2, num_layers // 2, num_layers - 3)
    fits = len(set(usual)) == 3 and min(usual) >= 0 and max(usual) <= num_layers
    return usual if fits else tuple(range(max(0, num_layers - 2), num_layers + 1))


def head_bytes(spec: HeadSpec, dtype: torch.dtype) -> int:
    """Bytes of the head's weights in memory."""
    return sum(prod(tensor.shape) for tensor in expected_tensors(spec) if tensor.role != "table") * dtype.itemsize


def _check(where: str, spec: HeadSpec, stored: Mapping[str, StoredTensor]) -> None:
    expected = {tensor.name: tensor for tensor in expected_tensors(spec)}
    optional = {"t2d", *(["d2t"] if spec.own_head else []), *(["fc.weight", "fc.bias"] if spec.final_hidden else [])}
    if "mask_hidden" in expected and "mask_hidden" in stored and stored["mask_hidden"].shape in _mask_shapes(spec):
        expected["mask_hidden"] = replace(expected["mask_hidden"], shape=stored["mask_hidden"].shape)
    problems = misfits(expected.values(), stored, stored.keys() - expected.keys() - optional)
    if "t2d" in stored and stored["t2d"].shape != (spec.vocab_size,):
        problems.append(f"t2d is {list(stored['t2d'].shape)}, config.json says {[spec.vocab_size]}")
    if "t2d" in stored and stored["t2d"].dtype not in ("BOOL", "U8"):
        problems.append(f"t2d is {stored['t2d'].dtype}, it must be BOOL or U8")
    if problems:
        raise CheckpointError(f"{where}: the head's weights do not fit config.json: {'; '.join(problems)}")


def _mask_shapes(spec: HeadSpec) -> set[tuple[int, ...]]:
    widths = (feature_width(spec), spec.hidden_size)
    return {(*leading, width) for width in widths for leading in ((), (1,), (1, 1))}


def _map_ids(where: str, spec: HeadSpec, tensors: dict[str, Tensor]) -> Tensor:
    """int32 [draft vocabulary] target id of each draft id: d2t is the offset between the two."""
    d2t = tensors["d2t"]
    map_ids = d2t.long() + torch.arange(len(d2t))
    outside = (map_ids < 0) | (map_ids >= spec.vocab_size)
    if outside.any():
        first = int(outside.nonzero()[0])
        raise CheckpointError(
            f"{where}: d2t leads {int(outside.sum())} draft ids out of the vocabulary of {spec.vocab_size}: "
            f"draft id {first} to {int(map_ids[first])}; d2t must hold target id minus draft id"
        )
    if "t2d" in tensors and not (known := tensors["t2d"].bool()[map_ids]).all():
        first = int((~known).nonzero()[0])
        raise CheckpointError(
            f"{where}: d2t and t2d disagree on {int((~known).sum())} draft ids: draft id {first} is target id "
            f"{int(map_ids[first])}, which t2d leaves out; export the head again"
        )
    return map_ids.int()
