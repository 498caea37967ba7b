"""PARD: a small language model drafts for the target, K tokens in one forward pass or one after another.

    parallel   the newest token, then K - 1 mask tokens at the positions of the drafts; draft k is the model's output at
               position k - 1 of them
    chain      K forward passes over one position a row, as with any language model that drafts

The model reads tokens only, no hidden states of the target. Its K/V layers follow the target's in the row's pages. Catch-up and
prefill write K/V of committed tokens, over those of mask tokens and drafts.
Source: An et al. 2025, PARD (arXiv 2504.18583), its checkpoints' `pard_token`; https://github.com/vllm-project/vllm/pull/32887.
Legend: R rows, T flat positions, K draft_len.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.flat_batch import FlatBatch
from batchspec.batch.uniform_layout import UniformLayout
from batchspec.cache.layer_state import LayerState
from batchspec.cache.pages import KVCache
from batchspec.checkpoint.config_values import ConfigReader, read_json, shown
from batchspec.checkpoint.hub import find_model, resolve_model
from batchspec.checkpoint.weight_files import weight_files
from batchspec.config.schema import RunConfig
from batchspec.draft.base import DrafterBase
from batchspec.draft.coupled import later_draws
from batchspec.draft.formats import read_mask_token
from batchspec.draft.spec import DEFAULT_DRAFT_VOCAB, DrafterSpec
from batchspec.draft.window import WindowDrafter
from batchspec.errors import ConfigError
from batchspec.kernels.rounds.prepare_verify_inputs import prepare_verify_inputs
from batchspec.kernels.sampling.argmax import PROBABILITIES
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.target import Target
from batchspec.model.weights import judge_model


@dataclass(frozen=True, slots=True, kw_only=True)
class PardSpec:
    """A language model that drafts."""

    model: ModelSpec
    mask_token_id: int | None
    """The token in place of one that is not known yet; None: the model drafts a chain."""

    def on(self, device: torch.device, dtype: torch.dtype) -> PardSpec:
        """The spec for drafting in `dtype` on this device, with weights in the formats of the fast kernels: see `ModelSpec.on`.

        The drafter cannot change output tokens, so `model.activations` applies to the target alone. Raises ConfigError.
        """
        if device.type == "cuda" and (why := self.model.refuses("gpu")) is not None:
            raise ConfigError(f"draft=pard: {self.model.family} {why}; use another draft.path or another drafter")
        return replace(self, model=self.model.on(device, dtype))


@dataclass(frozen=True, slots=True, eq=False)
class PardModel:
    spec: PardSpec
    model: Target


def read_pard(folder: Path, target: ModelSpec) -> PardSpec:
    """config.json of a drafter's folder. Raises CheckpointError for a model that is not supported, or another target's."""
    path = folder / "config.json"
    spec = load_spec(folder)
    spec.check_output("draft=pard")
    config = ConfigReader(read_json(path), shown(path))
    mask_token_id = read_mask_token(config, spec.vocab_size)
    if spec.vocab_size < target.vocab_size // 2:
        raise config.refusal(
            f"vocab_size {spec.vocab_size}, the target has {target.vocab_size}: another tokenizer; draft.path must be a "
            "model that shares the target's"
        )
    return PardSpec(model=spec, mask_token_id=mask_token_id)


def load_pard(folder: Path, spec: PardSpec, *, dtype: torch.dtype, device: torch.device, dummy: bool = False) -> PardModel:
    """Load the drafter's weights in the target's dtype. Raises CheckpointError as `Target.load`; also for tensors of PARD-2."""
    spec = spec.on(device, dtype)
    if not dummy:
        weight_files(folder)
    return PardModel(spec, Target.load(folder, spec.model, dtype=dtype, device=device, dummy=dummy))


class PardDrafter(DrafterBase):
    """Keeps nothing of a slot from round to round but K/V: a round with it can be captured in a CUDA graph."""

    name = "pard"
    fixed_len = True
    prior_chances = PROBABILITIES
    aux_layer_ids: tuple[int, ...] = ()

    def __init__(self, drafter: PardModel, target: ModelSpec, draft_len: int, *, slots: int, parallel: bool) -> None:
        """parallel: draft all tokens at once, which raises ValueError for a model without a mask token; False: draft a chain"""
        mask_id, model = drafter.spec.mask_token_id, drafter.model
        if parallel and mask_id is None:
            raise ValueError("PardDrafter: the model has no mask token; give one that was trained for it, or parallel=False")
        device = model.device
        self.draft_len = draft_len
        self._model, self._vocab = model, min(model.spec.vocab_size, target.vocab_size)
        self._chain = None
        if not parallel:
            self._chain = WindowDrafter(model, draft_len, slots=slots, window=None, vocab=self._vocab, sees_images=False)
        widths = range(1, draft_len + 1) if parallel else ()
        self._layout = UniformLayout(slots, widths, device)
        self._ids = [torch.full((slots, k), mask_id or 0, dtype=torch.int32, device=device) for k in widths]
        self._positions, self._slots = torch.zeros(2, slots * draft_len, dtype=torch.int64, device=device)
        self._kv_len, self._room = torch.zeros(2, slots, dtype=torch.int32, device=device)

    @property
    def prefill_by_bounds(self) -> bool:
        return True

    def layer_states(self, page_size: int) -> tuple[LayerState, ...]:
        return self._model.spec.layer_states(self._model.dtype, page_size, draft_len=0)

    @torch.inference_mode()
    def prefill(
        self, batch: FlatBatch, slot_ids: Tensor, aux_hidden_states: Tensor | None, rows: DeviceBatch, cache: KVCache
    ) -> None:
        self._model.forward(_of_text(batch), cache.drafter_part(), kv_only=True)

    @torch.inference_mode()
    def catch_up(
        self,
        batch: FlatBatch,
        aux_hidden_states: Tensor | None,
        accepted_len: Tensor,
        rows: DeviceBatch,
        cache: KVCache,
        *,
        prepare_next: bool,
    ) -> None:
        self._model.forward(_of_text(batch), cache.drafter_part(), kv_only=True)

    @torch.inference_mode()
    def propose(self, rows: DeviceBatch, draft_ids: Tensor, draft_len: Tensor, cache: KVCache) -> None:
        if self._chain is not None:
            self._chain.mode, self._chain.confidence = self.mode, self.confidence
            self._chain.propose(rows, draft_ids, draft_len, cache.drafter_part())
            return
        num_rows, width = draft_ids.shape
        ids, kv_len, page_table = self._ids[width - 1][:num_rows], self._kv_len[:num_rows], cache.draft_table(rows)
        positions, slots = (x[: num_rows * width] for x in (self._positions, self._slots))
        # The inputs of the coming verification, without the last position, and with mask tokens in place of the drafts.
        prepare_verify_inputs(
            rows.tokens, rows.num_tokens, rows.limit, rows.live, page_table, page_size=cache.page_size,
            out_ids=ids, out_draft_len=self._room[:num_rows], out_positions=positions, out_slot_mapping=slots, out_kv_len=kv_len,
        )
        batch = self._layout.batch(ids, positions, slots, kv_len, page_table, rows.max_kv)
        hidden, _ = self._model.forward(batch, cache.drafter_part())
        draws = later_draws(self.mode, rows, batch.row_ids, positions, ahead=1, drafts=draft_ids)
        torch.mul(rows.live, width, out=draft_len)
        sure = None if self.confidence is None else self.confidence[:num_rows, :width]
        if draws is not None:
            draws.choose_parallel(self._model.logits(hidden)[:, : self._vocab], draft_ids, out_confidence=sure)
            return
        flat = None if sure is None else torch.empty(num_rows * width, dtype=torch.int32, device=hidden.device)
        draft_ids.copy_(self._model.greedy_sample(hidden, vocab=self._vocab, out_confidence=flat).view(num_rows, width))
        if sure is not None and flat is not None:
            sure.copy_(flat.view(num_rows, width))


def _of_text(batch: FlatBatch) -> FlatBatch:
    """The batch as a model reads it that was never shown images: their placeholders as tokens, positions one after another."""
    return replace(batch, rope=None, images=None, next_images=None, last_keys=None)


class PardDrafterSpec(DrafterSpec[PardModel]):
    """draft=pard."""

    assumed_accepted = 1.5
    """An assumption: it was not measured."""

    def __init__(self, config: RunConfig, target: ModelSpec, *, draft_vocab: int = DEFAULT_DRAFT_VOCAB) -> None:
        super().__init__(config, target, draft_vocab=draft_vocab)
        self.checkpoint = self.pard = _open(config, target)

    @property
    def _path(self) -> str:
        assert self.config.draft.path is not None
        return self.config.draft.path

    def layer_states(self, dtype: torch.dtype, page_size: int) -> tuple[LayerState, ...]:
        return self.pard.model.layer_states(dtype, page_size, draft_len=0)

    def weight_bytes(self, *, dtype: torch.dtype, device: torch.device) -> int:
        return self.pard.on(device, dtype).model.weight_bytes(dtype)

    def draft_bytes(self, draft_len: int, *, dtype: torch.dtype, device: torch.device) -> int:
        """One pass drafts all of them."""
        return self.weight_bytes(dtype=dtype, device=device) if draft_len else 0

    def fetch(self) -> None:
        resolve_model(self._path, key="draft.path")

    def load(self, *, dtype: torch.dtype, device: torch.device) -> PardModel:
        folder, dummy = resolve_model(self._path, key="draft.path"), self.config.model.load_format == "dummy"
        return load_pard(folder, self.pard, dtype=dtype, device=device, dummy=dummy)

    def build(self, weights: PardModel, target: Target, *, slots: int) -> PardDrafter:
        draft = self.config.draft
        parallel = draft.parallel is not False and self.pard.mask_token_id is not None
        return PardDrafter(weights, target.spec, draft.draft_len, slots=slots, parallel=parallel)


def _open(config: RunConfig, target: ModelSpec) -> PardSpec:
    path = config.draft.path
    assert path is not None
    files = find_model(path, key="draft.path")
    pard = read_pard(files.folder, target)
    if (why := pard.model.refuses("drafter")) is not None:
        raise ConfigError(f"draft.path={path}: {pard.model.family} {why}; PARD drafts with attention alone")
    if config.model.load_format != "dummy":
        pard = replace(pard, model=judge_model(files))
    if config.draft.parallel is True and pard.mask_token_id is None:
        raise ConfigError(
            f"draft.parallel=true, but {path} names no mask token (pard_token): it drafts a chain; use draft.parallel=auto"
        )
    return pard


SPEC = PardDrafterSpec
