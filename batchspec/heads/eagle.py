"""`batchspec train draft=eagle3` and `draft=parallel`: a new EAGLE-3 head, or one that goes on learning."""

from __future__ import annotations

from pathlib import Path

import torch

from batchspec.checkpoint.files import ModelFiles
from batchspec.checkpoint.hub import find_model, resolve_model
from batchspec.config.train_schema import TrainRun
from batchspec.draft.formats import HeadSpec
from batchspec.draft.weights import open_head
from batchspec.errors import ConfigError
from batchspec.heads.data import Numbers, Row, frequent_ids
from batchspec.heads.draft_network import DraftNetwork
from batchspec.heads.head import new_network, new_spec, published_network
from batchspec.heads.network import HeadNetwork
from batchspec.heads.save import save_head
from batchspec.heads.teacher import Teacher
from batchspec.heads.trained_drafter import TrainedDrafter, mask_token, share_of_draft_vocab
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target


class EagleHead(TrainedDrafter):
    """A chain."""

    name = "eagle3"

    def __init__(self, run: TrainRun, files: ModelFiles, target: ModelSpec) -> None:
        super().__init__(run, files, target)
        if run.draft.path is not None:
            head = open_head(find_model(run.draft.path, key="draft.path"), target, aux_layers=run.draft.aux_layers)
            if (limit := run.train.draft_vocab) < head.draft_vocab_size and limit != TrainRun().train.draft_vocab:
                raise ConfigError(
                    f"train.draft_vocab={limit}: the head {run.draft.path} can draft {head.draft_vocab_size} different tokens, "
                    "and training cannot remove any; leave the key out"
                )

    def check(self, rows: list[Row]) -> None:
        if self._run.draft.path is None:
            self._new_spec(rows)

    def network(self, target: Target, rows: list[Row]) -> HeadNetwork:
        made, self._draft_vocab_ids = self._made(target, rows)
        self._aux_layer_ids = made.spec.aux_layer_ids
        return made

    def _made(self, target: Target, rows: list[Row]) -> tuple[HeadNetwork, Numbers]:
        """The head to train, and the target ids int64 [V'] that it drafts."""
        run, train = self._run, self._run.train
        if run.draft.path is None:
            ids = frequent_ids(rows, vocab_size=target.spec.vocab_size, count=train.draft_vocab, keep=target.spec.eos_ids)
            return new_network(self._new_spec(rows), target, torch.from_numpy(ids), seed=train.seed), ids
        network, ids = published_network(
            resolve_model(run.draft.path, key="draft.path"), target, aux_layers=run.draft.aux_layers, mask_id=self._mask_id(rows),
            seed=train.seed, layers=train.layers,
        )
        if run.draft.parallel is False and network.spec.mask_token_id is not None:
            raise ConfigError(f"draft.parallel=false, but the head {run.draft.path} drafts in parallel; use draft.parallel=auto")
        return network, ids

    def _new_spec(self, rows: list[Row]) -> HeadSpec:
        train = self._run.train
        return new_spec(
            self._target, draft_vocab=train.draft_vocab, aux_layer_ids=train.aux_layer_ids, layers=train.layers or 1,
            inner=train.inner, mask_id=self._mask_id(rows),
        )

    def _mask_id(self, rows: list[Row]) -> int | None:
        """The mask token of a parallel head; None for a chain."""
        return None

    def teacher(self, target: Target) -> Teacher:
        return self._teacher(target, self._aux_layer_ids, self._draft_vocab_ids)

    def about(self, network: DraftNetwork, rows: list[Row]) -> str:
        assert isinstance(network, HeadNetwork)
        ids, mask = self._draft_vocab_ids, network.spec.mask_token_id
        share = share_of_draft_vocab(ids, rows, self._target.vocab_size)
        layers = ", ".join(map(str, network.spec.aux_layer_ids))
        return (
            f"a head of {network.num_weights:,} weights reads layers {layers} and drafts {len(ids):,} tokens, "
            f"{share:.1%} of those completions" + ("" if mask is None else f"; its mask is token {mask}")
        )

    def save(self, folder: Path, network: DraftNetwork, dtype: torch.dtype) -> None:
        assert isinstance(network, HeadNetwork)
        assert self._run.model.path is not None
        save_head(
            folder, network, torch.from_numpy(self._draft_vocab_ids), self._target, layout=self._run.output.layout, dtype=dtype,
            verifier=self._run.model.path, draft_len=self._run.draft.draft_len,
        )


class ParallelHead(EagleHead):
    """A head that drafts all tokens in one forward pass, with a mask token."""

    name = "parallel"

    def _mask_id(self, rows: list[Row]) -> int | None:
        return mask_token(self._run, rows, self._target.vocab_size)
