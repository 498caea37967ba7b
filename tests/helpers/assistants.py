"""Random assistants of Gemma 4 and models for them, as transformers saves them, and what its classes compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from batchspec.checkpoint.files import LocalFiles
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.schema import ModelConfig, RunConfig
from batchspec.distributed.collectives import Collectives
from batchspec.draft.assistant import AssistantDrafterSpec
from batchspec.draft.assistant_head import Assistant
from batchspec.draft.spec import DrafterSpec, open_drafter
from batchspec.model.layers.attention.of_model import keepers_of
from batchspec.model.layers.base import Shard
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.model.target import Target
from batchspec.model.weights import judge_model
from tests.helpers.engines import DEVICE
from tests.helpers.gemma4_models import DENSE, EXPERTS, LAYER_INPUTS, NO_LAYER_INPUTS
from tests.helpers.models import make_checkpoint

SIZE = 32
"""Number of tokens: 8 clusters of 4."""
TARGETS: dict[str, dict[str, Any]] = {
    "dense": DENSE, "experts": EXPERTS, "late layers": LAYER_INPUTS | {"vocab_size_per_layer_input": SIZE},
    "own values": {**DENSE, "attention_k_eq_v": False, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
}
CLUSTERS: dict[str, Any] = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 3}


def make_target(folder: Path, name: str, **changes: Any) -> Path:
    config = {**TARGETS[name], "num_hidden_layers": len(TARGETS[name]["layer_types"]), **changes}
    return make_checkpoint(folder, "gemma4_text", vocab=SIZE, dtype=torch.float64, **config)


def make_assistant(folder: Path, target: Path, *, text: dict[str, Any] | None = None, **config: Any) -> Path:
    """One of three layers, in fp64, for the model in a folder; `config` and `text` override keys of its config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = load_spec(target)
    windowed, full = ([own for own in keepers_of(spec).values() if (own.window is None) == every][-1] for every in (False, True))
    values = {
        **NO_LAYER_INPUTS, "model_type": "gemma4_text", "hidden_size": 20, "intermediate_size": 26, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_kv_shared_layers": 3,
        "head_dim": windowed.head_dim, "num_key_value_heads": windowed.num_kv_heads, "sliding_window": windowed.window,
        "global_head_dim": full.head_dim, "num_global_key_value_heads": full.num_kv_heads, "attention_k_eq_v": True,
        "num_attention_heads": 4, "vocab_size": spec.vocab_size, "initializer_range": 0.3, **(text or {}),
    }
    settings = AutoConfig.for_model(
        "gemma4_assistant",
        **{"text_config": values, "backbone_hidden_size": spec.hidden_size, "initializer_range": 0.3, **config},
    )
    torch.manual_seed(3)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(settings).double()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                tensor.normal_(1.0, 0.2)
            elif name.endswith("layer_scalar"):
                tensor.uniform_(0.6, 1.3)
            elif name.endswith("token_ordering"):
                tensor.copy_(torch.randperm(spec.vocab_size))
    model.save_pretrained(folder)
    return folder


def opened(target: Path, assistant: Path, **draft: Any) -> tuple[ModelSpec, AssistantDrafterSpec]:
    spec = judge_model(LocalFiles(target))
    config = RunConfig(
        model=ModelConfig(path=str(target)),
        draft=DraftConfig(**{"name": "mtp", "num_speculative_tokens": 3, "path": str(assistant), **draft}),
    )
    found = open_drafter(config, spec)
    assert isinstance(found, AssistantDrafterSpec)
    return spec, found


def load_pair(target: Path, assistant: Path, ranks: Collectives | None = None) -> tuple[Target, Assistant]:
    """In fp64; with ranks, what one of them holds of both."""
    spec, own = opened(target, assistant)
    drafter: DrafterSpec[Assistant] = own
    if ranks is not None:
        shard = Shard(ranks.rank, ranks.ranks)
        spec, drafter = spec.sharded(shard), own.of_rank(shard)
    model = Target.load(target, spec, dtype=torch.float64, device=DEVICE, ranks=ranks)
    return model, drafter.load(dtype=torch.float64, device=DEVICE)


def reference_logits(target: Path, assistant: Path) -> Callable[[Sequence[int], Sequence[int]], list[Tensor]]:
    """Of transformers' classes: tokens of a row, and drafts -> the logits [V] from which each draft is chosen, after those before
    it; -inf for tokens of clusters that were not chosen."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    options = {"dtype": torch.float64, "attn_implementation": "eager"}
    whole, small = (auto.from_pretrained(folder, **options).eval() for folder in (target, assistant))
    if hasattr(whole, "set_experts_implementation"):
        whole.set_experts_implementation("eager")
    window, in_clusters = whole.config.sliding_window, small.config.use_ordered_embeddings

    @torch.inference_mode()
    def logits_of(row: Sequence[int], drafts: Sequence[int]) -> list[Tensor]:
        out = whole(
            torch.tensor([row[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False
        )
        kept = {
            kind: tuple(own[:, :, -window:] if kind == "sliding_attention" else own for own in pair)
            for kind, pair in out.shared_kv_states.items()
        }
        hidden, found = out.hidden_states[-1][:, -1:], list[Tensor]()
        for newest in [row[-1], *drafts][: len(drafts)]:
            joined = torch.cat((whole.get_input_embeddings()(torch.tensor([[newest]])), hidden), -1)
            step = small(inputs_embeds=joined, position_ids=torch.tensor([[len(row) - 1]]), shared_kv_states=kept)
            hidden, logits = step.last_hidden_state, step.logits[0, -1]
            left_out = (logits == logits.min()) & in_clusters  # they have one number, less than all others
            found.append(logits.masked_fill(left_out, -torch.inf))
        return found

    return logits_of
