"""`batchspec train draft=block`: a new DSpark head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from batchspec.config.train_schema import TrainRun
from batchspec.draft.block_head import dummy_block_spec
from batchspec.draft.block_parts import CONFIDENCE, CONFIDENCE_BIAS, MARKOV_OUT
from batchspec.draft.block_spec import BlockSpec
from batchspec.errors import ConfigError
from batchspec.heads.block_network import BlockNetwork
from batchspec.heads.block_save import save_block
from batchspec.heads.data import Row, frequent_ids
from batchspec.heads.draft_network import DraftNetwork
from batchspec.heads.first_norm import norm_of_random_states
from batchspec.heads.head import checked_boundaries
from batchspec.heads.teacher import Teacher
from batchspec.heads.trained_drafter import TrainedDrafter, dtype_of_inputs, mask_token, share_of_draft_vocab
from batchspec.kernels.train.prefix_attention import TILES, runs_on_gpu
from batchspec.model.dtype import dtype_name
from batchspec.model.layers.attention.of_model import first_attention
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target

USUAL_LAYERS = 3
_STATES = 5
"""Number of the target's states that a head reads, evenly spaced as in DeepSpec's heads."""


def usual_boundaries(num_layers: int) -> tuple[int, ...]:
    """From the second to the last but two; fewer states of a model that has fewer layers, of one layer its input alone."""
    first, last = min(2, num_layers - 1), min(max(1, num_layers - 2), num_layers - 1)
    return tuple(sorted({round(first + i * (last - first) / (_STATES - 1)) for i in range(_STATES)}))


def new_block_spec(run: TrainRun, target: ModelSpec, mask_id: int) -> BlockSpec:
    """A head with layers of the target's shape. Raises ConfigError for train.aux_layer_ids that the target does not have, and
    for the state after its last layer."""
    train = run.train
    spec = dummy_block_spec(
        target, draft_vocab_size=train.draft_vocab, num_layers=train.layers or USUAL_LAYERS, block_size=train.ahead
    )
    usual = usual_boundaries(target.num_layers)
    chosen = checked_boundaries(usual if train.aux_layer_ids is None else train.aux_layer_ids, target)
    if target.num_layers in chosen:
        raise ConfigError(
            f"train.aux_layer_ids={list(chosen)}: {target.num_layers} is the state after the last layer, which programs read "
            "before or after the final norm; choose earlier ones"
        )
    return replace(
        spec, aux_layer_ids=chosen, intermediate_size=train.inner or spec.intermediate_size, mask_token_id=mask_id, own_head=True,
    )


def new_block_network(spec: BlockSpec, target: Target, draft_vocab_ids: torch.Tensor, *, seed: int) -> BlockNetwork:
    """A network with random weights, the same for one seed on every device; lm_head starts as the target's rows, and neither
    Markov matrices nor confidence say anything. fp32, or fp64 for a target in fp64."""
    dtype = torch.promote_types(target.dtype, torch.float32)
    network = BlockNetwork(spec, target.embedding).to(dtype)
    network.draw_matrices(seed)
    with torch.no_grad():
        rows = target.output_rows(draft_vocab_ids.to(target.device)).to("cpu", dtype)
        network.lm_head.weight.copy_(rows)
        network.norm.weight.copy_(norm_of_random_states(target, rows))
        for name in (MARKOV_OUT, CONFIDENCE, CONFIDENCE_BIAS):
            network.get_parameter(name).zero_()
    return network.to(target.device)


class NewBlockHead(TrainedDrafter):
    """It drafts from the anchor, with Markov matrices and an estimate of being accepted."""

    name = "block"

    def check_dtype(self, dtype: torch.dtype, device: torch.device) -> None:
        head_dim, narrow = first_attention(self._target).head_dim, dtype_of_inputs(dtype, device)
        if device.type == "cuda" and not runs_on_gpu(head_dim, narrow):
            helps = "model.dtype=bfloat16 or device=cpu" if runs_on_gpu(head_dim, torch.bfloat16) else "device=cpu"
            raise ConfigError(
                f"draft=block: a head of {head_dim} numbers in {dtype_name(narrow)} is not trained on a GPU, whose kernels read "
                f"at most {max(TILES):,} bytes a head in float32 or bfloat16; set {helps}"
            )

    def check(self, rows: list[Row]) -> None:
        self._spec(rows)

    def _spec(self, rows: list[Row]) -> BlockSpec:
        return new_block_spec(self._run, self._target, mask_token(self._run, rows, self._target.vocab_size))

    def network(self, target: Target, rows: list[Row]) -> BlockNetwork:
        train, spec = self._run.train, self._spec(rows)
        self._draft_vocab_ids = frequent_ids(
            rows, vocab_size=target.spec.vocab_size, count=train.draft_vocab, keep=target.spec.eos_ids
        )
        self._aux_layer_ids = spec.aux_layer_ids
        return new_block_network(spec, target, torch.from_numpy(self._draft_vocab_ids), seed=train.seed)

    def teacher(self, target: Target) -> Teacher:
        return self._teacher(target, self._aux_layer_ids, self._draft_vocab_ids)

    def about(self, network: DraftNetwork, rows: list[Row]) -> str:
        assert isinstance(network, BlockNetwork)
        ids, spec = self._draft_vocab_ids, network.spec
        share = share_of_draft_vocab(ids, rows, self._target.vocab_size)
        layers = ", ".join(map(str, spec.aux_layer_ids))
        return (
            f"a head of {network.num_weights:,} weights in {spec.num_layers} layers reads layers {layers} and drafts blocks of "
            f"{spec.block_size} from {len(ids):,} tokens, {share:.1%} of those completions; its mask is token "
            f"{spec.mask_token_id}"
        )

    def save(self, folder: Path, network: DraftNetwork, dtype: torch.dtype) -> None:
        assert isinstance(network, BlockNetwork)
        assert self._run.model.path is not None
        save_block(
            folder, network, torch.from_numpy(self._draft_vocab_ids), self._target, layout=self._run.output.layout, dtype=dtype,
            verifier=self._run.model.path, draft_len=self._run.draft.draft_len,
        )
