"""Reads an EAGLE-3 head, checked against its config before one of its tensors is used, or makes a random one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from batchspec.checkpoint.config_values import has_folder, shown
from batchspec.checkpoint.files import LocalFiles, ModelFiles, StoredTensor, listed, stored_tensors, weight_names
from batchspec.checkpoint.weight_files import opened_weights
from batchspec.draft.formats import HeadSpec, read_head
from batchspec.draft.head import Head
from batchspec.draft.head_tensors import expected_shapes, expected_tensors, feature_width, normalised
from batchspec.errors import CheckpointError
from batchspec.model.layers.attention.of_model import attentions_of, first_attention
from batchspec.model.spec import ModelSpec
from batchspec.model.weight_checks import misfits

_TABLES = {"I64": torch.int64, "I32": torch.int32, "BOOL": torch.uint8, "U8": torch.uint8}
_IGNORED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


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
    found, stored = stored_tensors(files), dict[str, StoredTensor]()
    for name, tensor in found.items():
        if name.endswith(_IGNORED):
            continue
        if normalised(name) in stored:
            raise CheckpointError(f"{files.where}: {listed([name])} is stored twice, under two names; export the head again")
        stored[normalised(name)] = tensor
    if drafts_blocks(found):
        raise CheckpointError(f"{files.where}: a DFlash or DSpark head, and an EAGLE-3 head is needed; use draft=block")
    spec = read_head(files.folder, stored, target, aux_layers=aux_layers)
    _check(files.where, spec, stored)
    if spec.mapped:
        check_tables(files, stored, spec.vocab_size)
    return spec


def drafts_blocks(stored: Iterable[str]) -> bool:
    """Whether tensors of these names are those of a DFlash or DSpark head."""
    names = {name.removeprefix("model.").removeprefix("dflash.").removeprefix("dspark.") for name in stored}
    return not names.isdisjoint(("hidden_norm.weight", "encoder.output_norm_enc.weight"))


def has_usual_heads(target: ModelSpec) -> bool:
    """Whether `dummy_spec` can make a head for it."""
    return bool(attentions_of(target))


def check_tables(files: ModelFiles, stored: Mapping[str, StoredTensor], vocab_size: int) -> None:
    """Raises CheckpointError for a d2t among `stored` that leads out of the target's vocabulary or contradicts t2d."""
    map_ids_of(files.where, vocab_size, {name: _table(files, stored[name]) for name in ("d2t", "t2d") if name in stored})


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
        with opened_weights(folder / file_name) as file:
            tensors |= {normalised(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    map_ids = map_ids_of(shown(folder), spec.vocab_size, tensors) if spec.mapped else None
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
    vocab, like = min(draft_vocab_size, target.vocab_size), first_attention(target)
    return HeadSpec(
        layout="flat", hidden_size=target.hidden_size, target_hidden_size=target.hidden_size, num_layers=1,
        num_heads=like.num_heads, num_kv_heads=like.num_kv_heads, head_dim=like.head_dim,
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


def _check(where: str, spec: HeadSpec, stored: Mapping[str, StoredTensor]) -> None:
    expected = {tensor.name: tensor for tensor in expected_tensors(spec)}
    optional = {"t2d", "d2t", *(["fc.weight", "fc.bias"] if spec.final_hidden else [])}
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


def map_ids_of(where: str, vocab_size: int, tensors: dict[str, Tensor]) -> Tensor:
    """int32 [draft vocabulary] target id of each draft id: d2t is the offset between the two."""
    d2t = tensors["d2t"]
    map_ids = d2t.long() + torch.arange(len(d2t))
    outside = (map_ids < 0) | (map_ids >= vocab_size)
    if outside.any():
        first = int(outside.nonzero()[0])
        raise CheckpointError(
            f"{where}: d2t leads {int(outside.sum())} draft ids out of the vocabulary of {vocab_size}: "
            f"draft id {first} to {int(map_ids[first])}; d2t must hold target id minus draft id"
        )
    if "t2d" in tensors and not (known := tensors["t2d"].bool()[map_ids]).all():
        first = int((~known).nonzero()[0])
        raise CheckpointError(
            f"{where}: d2t and t2d disagree on {int((~known).sum())} draft ids: draft id {first} is target id "
            f"{int(map_ids[first])}, which t2d leaves out; export the head again"
        )
    return map_ids.int()
