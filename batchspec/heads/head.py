"""The shape and the initial weights of a head to train: a new EAGLE-3 head for the target, or a published one to continue
from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from batchspec.draft.formats import HeadSpec
from batchspec.draft.head import Head
from batchspec.draft.weights import default_aux_layers, dummy_spec, load_head
from batchspec.errors import CheckpointError, ConfigError
from batchspec.heads.data import Numbers
from batchspec.heads.first_norm import norm_of_random_states
from batchspec.heads.network import HeadNetwork, network_of
from batchspec.model.spec import ModelSpec
from batchspec.model.target import Target


def new_spec(
    target: ModelSpec, *, draft_vocab: int, aux_layer_ids: list[int] | None, layers: int = 1, inner: int | None = None,
    mask_id: int | None = None,
) -> HeadSpec:
    """A head with layers of the target's shape.

    aux_layer_ids  ids of the aux hidden states that it reads; None: the default
    inner          intermediate size of its MLPs; None: the target's
    mask_id        the mask token, for a head that drafts in parallel
    Raises ConfigError for aux_layer_ids that the target does not have.
    """
    spec = dummy_spec(target, draft_vocab_size=draft_vocab)
    spec = replace(
        spec, num_layers=layers, windows=(None,) * layers, intermediate_size=inner or spec.intermediate_size,
        mask_token_id=mask_id,
    )
    chosen = checked_boundaries(default_aux_layers(target.num_layers) if aux_layer_ids is None else aux_layer_ids, target)
    if chosen[0] == 1:
        raise ConfigError(
            f"train.aux_layer_ids={list(chosen)}: other programs read ids that begin with 1 as layer outputs; put another first"
        )
    return replace(spec, aux_layer_ids=chosen)


def checked_boundaries(aux_layer_ids: Sequence[int], target: ModelSpec) -> tuple[int, ...]:
    """Raises ConfigError for what the target does not have."""
    if not aux_layer_ids or len({*aux_layer_ids}) < len(aux_layer_ids) or not {*aux_layer_ids} <= {*range(target.num_layers + 1)}:
        raise ConfigError(
            f"train.aux_layer_ids={list(aux_layer_ids)} must be different boundaries in 0 .. {target.num_layers}; null takes the "
            "usual"
        )
    return tuple(aux_layer_ids)


def new_network(spec: HeadSpec, target: Target, draft_vocab_ids: Tensor, *, seed: int) -> HeadNetwork:
    """A network with random weights, the same for one seed on every device; lm_head starts as the target's rows. fp32, or fp64
    for a target in fp64."""
    network, dtype = _random_network(spec, target, seed=seed), torch.promote_types(target.dtype, torch.float32)
    with torch.no_grad():
        rows = target.output_rows(draft_vocab_ids.to(target.device)).to("cpu", dtype)
        network.lm_head.weight.copy_(rows)
        network.norm.weight.copy_(norm_of_random_states(target, rows))
    return network.to(target.device)


def _random_network(spec: HeadSpec, target: Target, *, seed: int) -> HeadNetwork:
    """On the CPU; of the target only the embedding is read."""
    network = network_of(spec, target.embedding.cpu()).to(torch.promote_types(target.dtype, torch.float32))
    network.draw_matrices(seed)
    return network


def why_not_trainable(spec: HeadSpec, target: ModelSpec) -> str | None:
    """Why training cannot continue from a head of this shape; None if it can."""
    plain = replace(new_spec(target, draft_vocab=spec.draft_vocab_size, aux_layer_ids=None), layout=spec.layout, rope=spec.rope)
    same = ("aux_layer_ids", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "rms_eps", "mapped", "mask_token_id")
    plain = replace(plain, num_layers=spec.num_layers, windows=(None,) * spec.num_layers)
    if spec != replace(plain, **{name: getattr(spec, name) for name in same}):
        return "training continues only from plain EAGLE-3 heads with an lm_head and the target's embedding"
    if spec.aux_layer_ids[0] == 1:
        return f"it reads the target's layers {list(spec.aux_layer_ids)}, which cannot be written"
    return None


def why_weights_not_trainable(head: Head) -> str | None:
    """As `why_not_trainable`, for what only the tensors show."""
    width = len(head.spec.aux_layer_ids) * head.spec.target_hidden_size
    if head.map_ids is not None and bool((head.map_ids[1:] <= head.map_ids[:-1]).any()):
        return "the target ids of its d2t are not ascending, so they cannot be written again"
    if "mask_hidden" in head.tensors and head.tensors["mask_hidden"].shape[1] != width:
        return "its mask_hidden is stored after fc has been applied, which cannot be trained"
    return None


def published_network(
    folder: Path, target: Target, *, aux_layers: str, mask_id: int | None, seed: int, layers: int | None = None
) -> tuple[HeadNetwork, Numbers]:
    """A head to continue from, and the target ids int64 [V'] that it drafts.

    mask_id  given for a chain, it learns to draft in parallel with this mask token
    layers   number of layers; those that the head lacks are added and have no effect at first. None: as many as it has
    Raises CheckpointError for a head that cannot be loaded or is not a plain head with an lm_head of its own, ConfigError for
    fewer layers than it has.
    """
    dtype = torch.promote_types(target.dtype, torch.float32)
    head = load_head(folder, target.spec, dtype=dtype, device=torch.device("cpu"), aux_layers=aux_layers)
    spec = head.spec
    if problem := why_not_trainable(spec, target.spec) or why_weights_not_trainable(head):
        raise CheckpointError(f"{folder}: {problem}; leave draft.path out")
    ids = torch.arange(spec.vocab_size) if head.map_ids is None else head.map_ids.cpu().long()
    if spec.mask_token_id is None and mask_id is not None:
        spec = replace(spec, mask_token_id=mask_id)
    had, wanted = spec.num_layers, layers or spec.num_layers
    if wanted < had:
        raise ConfigError(f"train.layers={wanted}: the head {folder} has {had}; leave the key out, or ask for more")
    spec = replace(spec, num_layers=wanted, windows=(None,) * wanted)
    network = _random_network(spec, target, seed=seed)
    own = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in head.tensors.items()}
    if "mask_hidden" in own:
        own["mask_hidden"] = own["mask_hidden"].view(1, 1, -1)
    for i in range(had, wanted):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            network.get_parameter(f"layers.{i}.{name}.weight").detach().zero_()
    network.load_state_dict(network.state_dict() | own)
    return network.to(target.device), ids.numpy()
