"""The drafter that a config asks for: what can be checked without weights, the weights, and what it takes of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from batchspec.adapt.limits import check_spec, check_weights
from batchspec.cache.layout import KVLayout
from batchspec.config.schema import RunConfig
from batchspec.draft.base import Drafter, NoDrafter
from batchspec.draft.corpus import Corpus, usual_lengths
from batchspec.draft.eagle3 import Eagle3Drafter
from batchspec.draft.formats import HeadSpec
from batchspec.draft.hybrid import HybridDrafter
from batchspec.draft.lookup import LookupDrafter
from batchspec.draft.parallel import ParallelDrafter
from batchspec.draft.pard import PardDrafter, PardModel, PardSpec, load_pard, read_pard
from batchspec.draft.tree import TreeDrafter, TreeShape, usual_nodes
from batchspec.draft.weights import Head, dummy_head, dummy_spec, head_bytes, judge_head, load_head
from batchspec.draft.window import WindowDrafter
from batchspec.errors import ConfigError
from batchspec.model.files import ModelFiles, stored_tensors
from batchspec.model.hub import find_model, resolve_model
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target
from batchspec.model.weights import check_tensors
from batchspec.packing.cost import weight_bytes


def open_head(config: RunConfig, spec: ModelSpec) -> HeadSpec | PardSpec | None:
    """The head or model that draft=eagle3, hybrid or pard drafts with, checked, its weights not read; None for other drafters."""
    if config.draft.name not in ("eagle3", "hybrid", "pard"):
        return None
    if config.draft.path is None:
        return dummy_spec(spec, parallel=config.draft.parallel is True)
    files = find_model(config.draft.path, key="draft.path")
    if config.draft.name == "pard":
        return _open_pard(config, files, spec)
    head = judge_head(files, spec, aux_layers=config.draft.aux_layers)
    if config.draft.tree.topk > head.draft_vocab_size:
        raise ConfigError(
            f"draft.tree.topk={config.draft.tree.topk} exceeds the {head.draft_vocab_size} draft tokens of the head "
            f"{config.draft.path}; lower it"
        )
    if config.draft.parallel is True and head.mask_token_id is None:
        raise ConfigError(
            f"draft.parallel=true, but the head {config.draft.path} has no mask token: it drafts a chain; use draft=eagle3"
        )
    check_spec(config.draft, head, spec)
    return head


def _open_pard(config: RunConfig, files: ModelFiles, spec: ModelSpec) -> PardSpec:
    pard = read_pard(files.folder, spec)
    if config.model.load_format != "dummy":
        check_tensors(files.where, pard.model, stored_tensors(files))
    if config.draft.parallel is True and pard.mask_token_id is None:
        raise ConfigError(
            f"draft.parallel=true, but {config.draft.path} names no mask token (pard_token): it drafts a chain; use "
            "draft.parallel=auto"
        )
    return pard


def head_folder(config: RunConfig) -> Path | None:
    """The folder of draft.path, its weights fetched; None where there is none, which model.load_format=dummy allows."""
    return None if config.draft.path is None else resolve_model(config.draft.path, key="draft.path")


def load_drafter(
    config: RunConfig, spec: HeadSpec | PardSpec | None, target: ModelSpec, *, dtype: torch.dtype, device: torch.device
) -> Head | PardModel | None:
    """The weights of a drafter that has some; `spec` from `open_head`."""
    if spec is None:
        return None
    folder = head_folder(config)
    if isinstance(spec, PardSpec):
        assert folder is not None
        return load_pard(folder, spec, dtype=dtype, device=device, dummy=config.model.load_format == "dummy")
    if folder is None:
        return dummy_head(spec, dtype=dtype, device=device)
    head = load_head(folder, target, dtype=dtype, device=device, aux_layers=config.draft.aux_layers)
    check_weights(config.draft, head)
    return head


def make_drafter(config: RunConfig, head: Head | PardModel | None, target: Target, *, slots: int) -> Drafter:
    """The job's drafter for that many slots; `head` from `load_drafter`."""
    draft, opt = config.draft, config.ablation
    if draft.name == "none":
        return NoDrafter()
    if draft.name == "lookup":
        return make_lookup(config, target.device)
    if draft.name == "window":
        assert draft.window is not None
        return WindowDrafter(target, draft.num_speculative_tokens, slots=slots, window=draft.window, sink=draft.sink_tokens or 0)
    if isinstance(head, PardModel):
        parallel = draft.parallel is not False and head.spec.mask_token_id is not None
        return PardDrafter(head, target.spec, draft.num_speculative_tokens, slots=slots, parallel=parallel)
    assert head is not None
    options: dict[str, Any] = {
        "slots": slots,
        "window": draft.window,
        "sink": draft.sink_tokens or 0,
        "dead_positions": opt.dead_positions is not False,
        "argmax": opt.argmax,
    }
    shape = tree_shape(config)
    if shape is not None:
        del options["argmax"]
        return TreeDrafter(head, target, shape, **options)
    own: Eagle3Drafter | ParallelDrafter
    max_len = (
        draft.num_speculative_tokens
        if draft.name != "hybrid"
        else min(draft.head_len or draft.num_speculative_tokens, draft.num_speculative_tokens)
    )
    if draft.parallel is not False and head.spec.mask_token_id is not None:
        own = ParallelDrafter(head, target, max_len, **options)
    else:
        own = Eagle3Drafter(head, target, max_len, uniform_slots=opt.uniform_slots, **options)
    if draft.name == "hybrid":
        return HybridDrafter(own, make_lookup(config, target.device), slots=slots, device=target.device)
    return own


def make_lookup(config: RunConfig, device: torch.device) -> LookupDrafter:
    draft, corpus = config.draft, None
    if draft.corpus_tokens:
        lengths = usual_lengths(draft.prompt_lookup_min, draft.prompt_lookup_max)
        corpus = Corpus(draft.corpus_tokens, num_entries=draft.table_entries, lengths=lengths, device=device)
    return LookupDrafter(
        draft.num_speculative_tokens,
        min_ngram=draft.prompt_lookup_min,
        max_ngram=draft.prompt_lookup_max,
        growth=draft.growth,
        corpus=corpus,
    )


def tree_shape(config: RunConfig) -> TreeShape | None:
    """How the job's draft trees grow; None where it drafts none."""
    draft, tree = config.draft, config.draft.tree
    if tree.topk == 1:
        return None
    depth = tree.depth or draft.num_speculative_tokens
    return TreeShape(topk=tree.topk, depth=depth, nodes=tree.nodes or usual_nodes(tree.topk, depth), rank=tree.rank)


def draft_len(config: RunConfig) -> int:
    """K; of a tree its nodes."""
    shape = tree_shape(config)
    if shape is not None:
        return shape.nodes
    return 0 if config.draft.name == "none" else config.draft.num_speculative_tokens


def draft_kv_layers(
    config: RunConfig, head: HeadSpec | PardSpec | None, dtype: torch.dtype, page_size: int
) -> tuple[tuple[KVLayout, int | None], ...]:
    """K/V layout of each of the drafter's layers, and how many of its newest keys it reads, None for all."""
    if head is None:
        return ()
    if isinstance(head, PardSpec):
        layout, windows = head.model.kv_layout(dtype, page_size), head.model.windows
    else:
        layout = head.kv_layout(dtype, page_size)
        windows = head.kv_windows(config.draft.window, config.draft.sink_tokens or 0)
    return tuple((layout, window) for window in windows)


def drafter_bytes(head: HeadSpec | PardSpec | None, dtype: torch.dtype) -> int:
    """Bytes of the drafter's weights in memory."""
    if isinstance(head, PardSpec):
        return weight_bytes(head.model, dtype)
    return 0 if head is None else head_bytes(head, dtype)
