"""DFlash2 heads: what is read of them and what is refused, and that each part of their definition changes drafts.

tests/draft/test_block.py compares their drafts with the definition, tests/engine/test_lossless.py decodes with them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.checkpoint.files import LocalFiles
from batchspec.config.schema import RunConfig
from batchspec.draft.block import BlockDrafterSpec
from batchspec.draft.block_head import BlockWeights, dummy_block, dummy_block_spec, load_block, open_block
from batchspec.draft.block_spec import BlockSpec
from batchspec.draft.block_tensors import block_bytes, products
from batchspec.errors import CheckpointError
from batchspec.kernels.drafting.block_conv import block_conv
from batchspec.model.families.shapes import shape_spec
from tests.draft.test_block import DFLASH2, check, design_of, drafted, loaded
from tests.helpers.block_heads import BlockDesign, Tensors, config_of, random_block, write_block
from tests.helpers.engines import DEVICE, tiny_spec

TARGET = tiny_spec()
BASE = BlockDesign(
    hidden=16, vocab=31, taps=(0, 1), mask_id=30, from_anchor=False, selector=5, taps_of_conv=2, windows=(8, 8), causal=False,
    layout="z-lab",
)
SPECULATORS = replace(BASE, layout="speculators")
A, B = "candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"


def opened(folder: Path, design: BlockDesign = BASE, tensors: Tensors | None = None, **written: Any) -> BlockSpec:
    return open_block(LocalFiles(write_block(folder, design, tensors or random_block(design), **written)), TARGET)


# --- what is read


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_every_layout_says_the_same_of_a_head(layout: str, tmp_path: Path) -> None:
    found = opened(tmp_path, replace(BASE, layout=layout))
    assert (found.selector_rank, found.candidates, found.conv_taps, found.conv_groups) == (5, 16, 2, 4)
    assert (found.from_anchor, found.most_drafts, found.queries(3), found.own_head) == (False, 7, 4, False)
    assert (found.causal, found.markov_rank, found.confidence) == ((False, False), 0, "none")
    assert not found.assumed  # all of these heads have their masks at the drafts


def test_a_published_config_is_read(tmp_path: Path) -> None:
    """The keys of z-lab's head of Qwen3.8-27B, with small numbers; block_size is in dflash_config."""
    keys: dict[str, Any] = {
        "architectures": ["DFlash2DraftModel"], "attention_dropout": 0.0, "bos_token_id": None, "dtype": "bfloat16",
        "eos_token_id": 3, "hidden_act": "silu", "initializer_range": 0.02, "max_window_layers": 2, "num_target_layers": 2,
        "pad_token_id": 3, "rope_theta": None, "rope_parameters": {"rope_theta": 50.0, "rope_type": "default"},
        "tie_word_embeddings": False, "transformers_version": "5.8.1", "use_cache": True, "use_sliding_window": True,
        "is_causal": False, "block_size": None,
    }
    nested = config_of(BASE)["dflash_config"] | {"block_size": 8}
    found = opened(tmp_path / "published", **keys, dflash_config=nested)
    assert found == opened(tmp_path / "usual")


@pytest.mark.parametrize("keys", [("conv_kernel_size", "conv_group_size"), ("selector_rank", "selector_top_k")])
def test_tensors_say_the_shapes_of_the_parts(keys: tuple[str, str], tmp_path: Path) -> None:
    without = {key: value for key, value in config_of(BASE)["dflash_config"].items() if key not in keys}
    assert opened(tmp_path, dflash_config=without) == opened(tmp_path / "usual")


def test_codebooks_may_be_stored_as_embeddings(tmp_path: Path) -> None:
    """transformers saves z-lab's modules with `.weight`."""
    found = opened(tmp_path, renamed={A: f"{A}.weight", B: f"{B}.weight"})
    usual = opened(tmp_path / "usual")
    assert found == usual
    weights, others = (load_block(at, usual, dtype=torch.float64, device=DEVICE) for at in (tmp_path, tmp_path / "usual"))
    assert all(torch.equal(tensor, others.tensors[name]) for name, tensor in weights.tensors.items())


def test_names_of_other_exports(tmp_path: Path) -> None:
    one = replace(BASE, layers=1, windows=(8,))
    names = {"layers.0.": "midlayer.", "fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    assert opened(tmp_path, one, renamed=names) == opened(tmp_path / "usual", one)


def test_a_pickled_mask_is_refused(tmp_path: Path) -> None:
    write_block(tmp_path, BASE, random_block(BASE))
    (tmp_path / "mask_embedding.pt").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt is a pickle, which is not read"):
        open_block(LocalFiles(tmp_path), TARGET)


@pytest.mark.parametrize(
    ("keys", "causal"),
    [
        ({"sliding_window_non_causal": None}, False), ({"sliding_window_non_causal": False}, True),
        ({"sliding_window_non_causal": None, "speculators_model_type": "dflash"}, True),
    ],
)
def test_windows_are_not_causal_in_dflash2_of_speculators_by_default(
    keys: dict[str, Any], causal: bool, tmp_path: Path
) -> None:
    assert opened(tmp_path, SPECULATORS, **keys).causal == (causal, causal)


def test_no_note_says_that_the_block_layout_is_guessed(tmp_path: Path) -> None:
    found = RunConfig()
    found.draft.name, found.draft.num_speculative_tokens = "block", 3
    found.draft.path = str(write_block(tmp_path, BASE, random_block(BASE)))
    assert not BlockDrafterSpec(found, TARGET).note


# --- what is refused


REFUSALS: dict[str, tuple[BlockDesign, dict[str, Any], str]] = {
    "other taps": (SPECULATORS, {"conv_kernel_size": 3}, "conv_kernel_size=3, but the convolutions have 2 taps; correct it"),
    "other groups": (SPECULATORS, {"conv_group_size": 8}, "conv_group_size=8, but the convolutions have 4 groups; correct it"),
    "another rank": (SPECULATORS, {"selector_rank": 4}, "selector_rank=4, but the candidate selector has rank 5; correct it"),
    "no convolutions": (
        replace(SPECULATORS, taps_of_conv=0), {"conv_kernel_size": 2}, "conv_kernel_size=2, but the convolutions have 0 taps"
    ),
    "too many candidates": (SPECULATORS, {"selector_top_k": 33}, "selector_top_k is 33; it must be an integer in 1 .. 32"),
    "from the anchor": (
        SPECULATORS, {"sample_from_anchor": True},
        "sample_from_anchor true, with convolutions or a candidate selector (DFlash2), is not supported",
    ),
    "from the anchor without a selector": (
        replace(BASE, selector=0, from_anchor=True), {}, "sample_from_anchor true, with convolutions or a candidate selector"
    ),
    "Markov matrices too": (replace(BASE, rank=3), {}, "a candidate selector and a Markov or confidence head; one of them is"),
    "a confidence head too": (replace(BASE, confidence="hidden"), {}, "a candidate selector and a Markov or confidence head"),
    "fewer words": (
        replace(BASE, draft_vocab=9), {}, "draft_vocab_size 9 with a candidate selector, which is over the target's 31 tokens"
    ),
    "a rank too high": (
        replace(BASE, selector=1025), {}, "the matrices of the candidate selector have rank 1025; supported is at most 1,024"
    ),
    "too many taps": (replace(BASE, taps_of_conv=17), {}, "attention_conv.base_kernel is [2, 17, 16]; it must be [2, taps, 16]"),
    "scaled logits": (
        BASE, {"dflash_config": config_of(BASE)["dflash_config"] | {"output_multiplier": 0.2}},
        "not known to draft=block: dflash_config.output_multiplier=0.2",
    ),
    "capped logits": (
        BASE, {"dflash_config": config_of(BASE)["dflash_config"] | {"final_logit_softcapping": 20.0}},
        "not known to draft=block: dflash_config.final_logit_softcapping=20.0",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_supported_is_refused_by_name(name: str, tmp_path: Path) -> None:
    design, keys, said = REFUSALS[name]
    with pytest.raises(CheckpointError) as error:
        opened(tmp_path, design, **keys)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


CONV, KERNELS = "layers.0.attention_conv", "layers.0.attention_conv.kernel_projection.weight"
MISFITS: dict[str, tuple[dict[str, tuple[int, ...] | None], str]] = {
    "a base without the taps of a state": ({KERNELS: None}, f"{CONV}.base_kernel without {KERNELS}"),
    "one side": ({f"{CONV}.base_kernel": (1, 2, 16)}, f"{CONV}.base_kernel is [1, 2, 16]"),
    "a base of two dimensions": ({f"{CONV}.base_kernel": (2, 16)}, f"{CONV}.base_kernel is [2, 16]; it must be [2, taps, 16]"),
    "groups that do not divide the width": (
        {KERNELS: (12, 16)}, f"{KERNELS} has 12 rows; it must have 4 times a divisor of hidden_size 16"
    ),
    "rows for three taps": ({KERNELS: (6, 16)}, f"{KERNELS} has 6 rows"),
    "a scalar": ({KERNELS: ()}, f"{KERNELS} has 0 rows"),
    "a layer without": ({"layers.1.mlp_conv.base_kernel": None}, "layers.1.mlp_conv.base_kernel"),
    "a layer with other taps": ({"layers.1.mlp_conv.base_kernel": (2, 3, 16)}, "layers.1.mlp_conv.base_kernel is [2, 3, 16]"),
    "one codebook": ({B: None}, B),
    "a codebook of other words": ({B: (30, 5)}, f"{B} is [30, 5]"),
    "a codebook of one dimension": ({A: (31,)}, f"{A} is [31]; it must have two dimensions"),
    "no projection of the state": ({"candidate_selector.hidden_projection.weight": None}, "candidate_selector.hidden_projection"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_tensors_that_do_not_fit_are_refused_by_name(name: str, tmp_path: Path) -> None:
    changes, said = MISFITS[name]
    tensors = random_block(BASE)
    for tensor, shape in changes.items():
        if shape is None:
            del tensors[tensor]
        else:
            tensors[tensor] = torch.zeros(shape)
    with pytest.raises(CheckpointError) as error:
        opened(tmp_path, BASE, tensors)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


# --- what is computed


def faulty(fault: str, tensors: Tensors) -> Tensors:
    """The tensors of a head that computes otherwise than the definition with the given ones."""
    changed = dict(tensors)
    for name, tensor in tensors.items():
        if fault == "fixed taps alone" and name.endswith("kernel_projection.weight"):
            changed[name] = torch.zeros_like(tensor)
        if fault == "no earlier query" and name.endswith("_conv.base_kernel"):
            changed[name] = torch.cat((tensor[:, :1], torch.zeros_like(tensor[:, 1:])), 1)
        if fault == "sides exchanged" and name.endswith("_conv.base_kernel"):
            changed[name] = tensor.flip(0)
        if fault == "sides of the state exchanged" and name.endswith("kernel_projection.weight"):
            changed[name] = tensor.unflatten(0, (2, -1)).flip(0).flatten(0, 1)
        if fault == "groups before taps" and name.endswith("kernel_projection.weight"):
            changed[name] = tensor.unflatten(0, (2, 2, -1)).transpose(1, 2).flatten(0, 2)
        if fault == "convolutions exchanged" and "_conv." in name:
            other = name.replace("mlp_conv", "x").replace("attention_conv", "mlp_conv").replace("x.", "attention_conv.")
            changed[other] = tensor
    if fault == "codebooks exchanged":
        changed |= {A: tensors[B], B: tensors[A]}
    if fault == "no state in the selector":
        changed["candidate_selector.hidden_projection.weight"] = torch.zeros_like(
            tensors["candidate_selector.hidden_projection.weight"]
        )
    return changed


FAULTS = (
    "fixed taps alone", "no earlier query", "sides exchanged", "sides of the state exchanged", "groups before taps",
    "convolutions exchanged", "codebooks exchanged", "no state in the selector",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_part_that_is_computed_otherwise_drafts_other_tokens(fault: str, tmp_path: Path) -> None:
    design = design_of(**DFLASH2)
    tensors = random_block(design, seed=7)
    seen = drafted(loaded(tmp_path, design, faulty(fault, tensors)), 4)
    with pytest.raises(AssertionError):
        check(seen, design, tensors)


def test_another_number_of_candidates_drafts_other_tokens(tmp_path: Path) -> None:
    design = design_of(**DFLASH2)
    tensors = random_block(design, seed=7)
    head = loaded(tmp_path, design, tensors)
    seen = drafted(BlockWeights(replace(head.spec, candidates=16), head.tensors, head.map_ids), 4)
    with pytest.raises(AssertionError):
        check(seen, design, tensors)


def test_rows_are_convolved_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's first query reads none before it; without that, drafts depend on the rows beside them."""
    design = design_of(**DFLASH2)
    tensors = random_block(design, seed=7)
    head = loaded(tmp_path, design, tensors)
    joined = "batchspec.draft.block_conv.block_conv"
    monkeypatch.setattr(joined, lambda x, delta, base, block: block_conv(x, delta, base, len(x)))
    seen = drafted(head, 4)
    with pytest.raises(AssertionError):
        check(seen, design, tensors)


# --- a head of this shape with random weights


def test_the_bytes_of_a_dummy_head_are_those_that_it_keeps() -> None:
    spec = dummy_block_spec(TARGET, dflash2=True)
    found = dummy_block(spec, dtype=torch.bfloat16, device=DEVICE)
    kept = sum(tensor.numel() for tensor in found.tensors.values()) + 5 * 2 * spec.num_kv_heads * spec.head_dim * 16
    assert block_bytes(spec, torch.bfloat16) == 2 * kept
    assert not found.spec.own_head
    assert all(bool((tensor == 1).all()) for name, tensor in found.tensors.items() if name.endswith("base_kernel"))


def test_a_dummy_head_has_the_parts_of_the_published_one_of_qwen_27b() -> None:
    """Its groups have 16 channels: https://github.com/sgl-project/SpecForge, configs/qwen3.6-27b-dflash2.json."""
    spec = dummy_block_spec(shape_spec("qwen3.5-27b"), dflash2=True)
    assert (spec.conv_groups, spec.conv_taps, spec.selector_rank, spec.candidates, spec.from_anchor) == (320, 2, 256, 16, False)
    assert {("linear", 1280, 5120), ("linear", 256, 5120)} < {*products(spec)}
