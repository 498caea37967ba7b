"""What is read of published DFlash and DSpark heads, and what is refused, in one line, before a weight is read."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from batchspec.checkpoint.files import LocalFiles
from batchspec.config.schema import RunConfig
from batchspec.draft.block import BlockDrafter, BlockDrafterSpec
from batchspec.draft.block_head import dummy_block, dummy_block_spec, load_block, open_block
from batchspec.draft.block_spec import BlockSpec
from batchspec.draft.block_tensors import block_bytes
from batchspec.draft.weights import open_head
from batchspec.errors import CheckpointError, ConfigError
from tests.helpers.block_heads import LAYOUTS, BlockDesign, random_block, write_block
from tests.helpers.engines import DEVICE, tiny_spec, tiny_target

TARGET = tiny_spec()
BASE = BlockDesign(hidden=16, vocab=31, taps=(0, 1), mask_id=30)


def opened(folder: Path, design: BlockDesign = BASE, *, renamed: dict[str, str] | None = None, **keys: Any) -> BlockSpec:
    return open_block(LocalFiles(write_block(folder, design, random_block(design), renamed=renamed, **keys)), TARGET)


def refused(folder: Path, design: BlockDesign = BASE, **keys: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        opened(folder, design, **keys)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_says_the_same_of_a_head(layout: str, tmp_path: Path) -> None:
    design = replace(BASE, rank=3, confidence="markov", draft_vocab=12, windows=(8, None), block=7, layout=layout)
    found = opened(tmp_path, design)
    assert found.aux_layer_ids == (0, 1)
    assert (found.block_size, found.most_drafts, found.queries(4), found.from_anchor) == (7, 7, 4, True)
    assert (found.markov_rank, found.confidence, found.mapped, found.own_head) == (3, "markov", True, True)
    assert found.causal == (True, False)
    # Queries of z-lab's heads read 8 keys, themselves included; those of speculators 8 keys before the block.
    assert (found.windows, found.windows_at_anchor) == (((9, None), True) if layout == "speculators" else ((8, None), False))


def test_tensors_say_what_a_head_is_and_not_the_name_of_its_architecture(tmp_path: Path) -> None:
    for i, name in enumerate(("DSparkDraftModel", "DFlashDraftModel", "DeepseekV4DSpark", None)):
        names = None if name is None else [name]
        plain = opened(tmp_path / f"{i}", replace(BASE, layout="z-lab", from_anchor=False), architectures=names)
        assert (plain.from_anchor, plain.markov_rank, plain.most_drafts) == (False, 0, 7)
        markov = opened(tmp_path / f"{i}m", replace(BASE, layout="z-lab", rank=3), architectures=names)
        assert (markov.from_anchor, markov.markov_rank, markov.most_drafts) == (True, 3, 8)


def test_deepspecs_dflash_heads_draft_from_the_anchor_too(tmp_path: Path) -> None:
    assert opened(tmp_path, replace(BASE, layout="deepspec")).from_anchor
    assert not opened(tmp_path / "said", replace(BASE, layout="deepspec", from_anchor=False)).from_anchor


def test_names_of_other_exports(tmp_path: Path) -> None:
    one = replace(BASE, layers=1, windows=(None,))
    names = {"layers.0.": "midlayer.", "fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    plain = opened(tmp_path / "plain", one)
    assert opened(tmp_path, one, renamed=names) == plain
    loaded, usual = (load_block(at, plain, dtype=torch.float64, device=DEVICE) for at in (tmp_path, tmp_path / "plain"))
    assert all(torch.equal(tensor, usual.tensors[name]) for name, tensor in loaded.tensors.items())
    assert opened(tmp_path / "prefix", renamed={"": "model."}) == opened(tmp_path / "none")


@pytest.mark.parametrize(
    ("keys", "causal"),
    [
        ({}, (True, False)), ({"is_causal": False}, (False, False)), ({"is_causal": True}, (True, True)),
        ({"sliding_window_non_causal": True}, (False, False)),
    ],
)
def test_layers_with_a_window_are_causal_unless_a_key_says_otherwise(
    keys: dict[str, Any], causal: tuple[bool, ...], tmp_path: Path
) -> None:
    assert opened(tmp_path, replace(BASE, layout="z-lab", windows=(9, None)), **keys).causal == causal


def test_keys_of_dflash_config_are_read_there(tmp_path: Path) -> None:
    nested = {"target_layer_ids": [0], "mask_token_id": 3, "block_size": 4, "causal": True}
    one = replace(BASE, layout="z-lab", taps=(1,), from_anchor=False)
    found = opened(tmp_path, one, dflash_config=nested, block_size=None)
    assert (found.block_size, found.mask_token_id, found.aux_layer_ids, found.causal) == (4, 3, (1,), (True, True))
    renamed = opened(tmp_path / "dspark", one, dflash_config=None, dspark_config=nested, block_size=None)
    assert renamed == found


def test_the_confidence_stays_in_fp32(tmp_path: Path) -> None:
    design = replace(BASE, rank=3, confidence="hidden")
    spec = opened(tmp_path, design)
    weights = load_block(tmp_path, spec, dtype=torch.bfloat16, device=torch.device("cpu"))
    of_confidence = {tensor.dtype for name, tensor in weights.tensors.items() if name.startswith("confidence_head.")}
    others = {tensor.dtype for name, tensor in weights.tensors.items() if "confidence" not in name}
    assert (of_confidence, others) == ({torch.float32}, {torch.bfloat16})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_of_0_says_nothing_of_the_block_layout(layout: str, tmp_path: Path) -> None:
    design = replace(BASE, layout=layout, from_anchor=False)
    plain = opened(tmp_path, design, sample_from_anchor=None, num_anchors=None, markov_rank=0)
    assert not plain.from_anchor


@pytest.mark.parametrize(("kind", "from_anchor"), [("dspark", True), ("dflash", False)])
@pytest.mark.parametrize("rank", [0, 3])
def test_the_algorithm_of_speculators_gives_the_default_of_the_block_layout(
    kind: str, from_anchor: bool, rank: int, tmp_path: Path
) -> None:
    design = replace(BASE, layout="speculators", rank=rank)
    assert opened(tmp_path, design, sample_from_anchor=None, speculators_model_type=kind).from_anchor == from_anchor
    said = opened(tmp_path / "said", design, sample_from_anchor=not from_anchor, speculators_model_type=kind)
    assert said.from_anchor != from_anchor


def test_keys_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    plain = opened(tmp_path / "plain")
    keys: dict[str, Any] = {
        "max_anchors": 512, "confidence_head_alpha": 1.0, "projector_type": "dspark", "attention_mode": "gqa", "use_mrope": False,
        "is_neox_style": True, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "mrope_section": [1, 1, 1]},
    }
    assert opened(tmp_path, **keys) == plain
    assert opened(tmp_path / "two", dflash_config={"projector_type": "dflash"}, dspark_config={"causal": None}) == plain


@pytest.mark.parametrize("family", ["qwen3", "mistral", "llama"])
def test_without_layer_types_no_layer_has_a_window(family: str, tmp_path: Path) -> None:
    found = opened(tmp_path, model_type=family, layer_types=None, sliding_window=9, use_sliding_window=True, max_window_layers=0)
    assert (found.windows, found.causal) == ((None, None), (False, False))


def test_layer_ids_under_both_names_may_agree(tmp_path: Path) -> None:
    assert opened(tmp_path, target_layer_ids=[-1, 1], aux_hidden_state_layer_ids=[0, 2]).aux_layer_ids == (0, 2)


def test_markov_matrices_at_the_top(tmp_path: Path) -> None:
    usual = opened(tmp_path / "usual", replace(BASE, rank=3))
    assert opened(tmp_path, replace(BASE, rank=3), renamed={"markov_head.": ""}) == usual
    assert usual.markov_rank == 3


REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another vocabulary": ({}, {"vocab_size": 30, "mask_token_id": 3}, "vocab_size 30, the target's 31: a head of another"),
    "another width": ({}, {"hidden_size": 8}, "hidden_size 8, the target's 16: a head of another target"),
    "another depth": ({}, {"num_target_layers": 5}, "num_target_layers 5, the target's 2: a head of another target"),
    "no mask": ({}, {"mask_token_id": None}, "no id of the mask token; add one of mask_token_id"),
    "a mask outside": ({}, {"mask_token_id": 31}, "mask_token_id=31 must be one token id in 0 .. 30"),
    "no layers": ({}, {"target_layer_ids": None}, "neither target_layer_ids nor aux_hidden_state_layer_ids says"),
    "layers too high": ({}, {"target_layer_ids": [0, 2]}, "reads the target's layers [1, 3]"),
    "the last layer": (
        {}, {"target_layer_ids": [0, 1]},
        "target_layer_ids=[0, 1]: z-lab's heads read the last layer's output after the final norm, DeepSpec's before it; add "
        "aux_hidden_state_layer_ids [1, 2] if before, or use a head of earlier layers",
    ),
    "layers twice": ({}, {"target_layer_ids": [1, 1]}, "reads the target's layers [2, 2]"),
    "gated": ({"rank": 3}, {"markov_head_type": "gated"}, 'not known to draft=block: markov_head_type="gated"'),
    "another rank": ({"rank": 3}, {"markov_rank": 4}, "markov_rank=4, but the Markov matrices have rank 3"),
    "no confidence": ({"rank": 3}, {"enable_confidence_head": True}, "enable_confidence_head true, but the weights have no"),
    "an unknown key": ({}, {"pure_draft_prefix_len": 2}, "not known to draft=block: pure_draft_prefix_len=2"),
    "scaled embeddings": ({}, {"input_embedding_scale": 2.0}, "not known to draft=block: input_embedding_scale=2.0"),
    "another family": ({}, {"model_type": "gemma4_text"}, "model_type 'gemma4_text' of the head is not supported"),
    "a block too long": ({}, {"block_size": 65}, "block_size is 65; it must be an integer in 2 .. 64"),
    "a window below the block": ({"windows": (5, None)}, {}, "sliding_window below block_size 8 is not supported"),
    "interleaved pairs": ({}, {"is_neox_style": False}, "not known to draft=block: is_neox_style=false"),
    "interleaved pairs, in a nested object": (
        {"layout": "z-lab"}, {"dflash_config": {"is_neox_style": False}}, "not known to draft=block: dflash_config.is_neox_style"
    ),
    "labels that are not shifted": ({}, {"shift_label": False}, "not known to draft=block: shift_label=false"),
    "shifted labels": ({}, {"shift_label": True}, "not known to draft=block: shift_label=true"),
    "an unknown zero": ({}, {"logit_scale": 0}, "not known to draft=block: logit_scale=0"),
    "another projector": ({}, {"projector_type": "mlp"}, 'not known to draft=block: projector_type="mlp"'),
    "another attention": ({}, {"attention_mode": "mla"}, 'not known to draft=block: attention_mode="mla"'),
    "another algorithm": (
        {"layout": "speculators"}, {"speculators_model_type": "domino"},
        "speculators_model_type 'domino' is not supported; draft=block needs one of 'dflash', 'dspark', 'dflash2'",
    ),
    "two nested objects": (
        {}, {"dflash_config": {"causal": True}, "dspark_config": {"causal": False}},
        "dflash_config.causal=true and dspark_config.causal=false must be equal",
    ),
    "two lists of layers": (
        {}, {"aux_hidden_state_layer_ids": [0, 2]},
        "target_layer_ids=[-1, 0] (boundaries [0, 1]) and aux_hidden_state_layer_ids=[0, 2] (boundaries [0, 2]) say different",
    ),
    "a rank too high": ({"rank": 3}, {"markov_rank": 1025}, "markov_rank is 1025; it must be an integer in 0 .. 1024"),
    "matrices of a rank too high": (
        {"rank": 1025}, {"markov_rank": None}, "the Markov matrices have rank 1025; supported is at most 1,024"
    ),
    "an activation": ({}, {"hidden_act": "gelu"}, 'not known to draft=block: hidden_act="gelu"'),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_supported_is_refused_by_name(name: str, tmp_path: Path) -> None:
    changes, keys, said = REFUSALS[name]
    assert said in refused(tmp_path, replace(BASE, **changes), **keys)


@pytest.mark.parametrize(("aux_layers", "ids"), [("auto", [0, 1]), ("input", [1, 2]), ("output", [0, 1])])
def test_a_head_of_the_last_layer_loads_with_what_its_refusal_advises(aux_layers: str, ids: list[int], tmp_path: Path) -> None:
    """For each way to read ids."""
    keys: dict[str, Any] = {"target_layer_ids": ids}
    write_block(tmp_path, BASE, random_block(BASE), **keys)
    with pytest.raises(CheckpointError) as error:
        open_block(LocalFiles(tmp_path), tiny_spec(), aux_layers=aux_layers)
    advised = re.search(r"add aux_hidden_state_layer_ids (\[.*?\]) if before", str(error.value))
    assert advised
    write_block(tmp_path, BASE, random_block(BASE), **keys, aux_hidden_state_layer_ids=json.loads(advised[1]))
    assert open_block(LocalFiles(tmp_path), tiny_spec(), aux_layers=aux_layers).aux_layer_ids == (1, 2)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        ("markov_head.gate_proj.weight", "a gated Markov head, which is not supported"),
        ("markov_head.joint_proj.weight", "a Markov head with a recurrent state, which is not supported"),
        ("hc_norm.weight", "DeepSeek-V4's layers, which is not supported"),
        ("layers.0.self_attn.sinks", "1 unexpected tensor"),
    ],
)
def test_parts_that_are_not_computed_are_refused_by_their_tensors(tensor: str, said: str, tmp_path: Path) -> None:
    write_block(tmp_path, BASE, random_block(BASE) | {tensor: torch.zeros(2)})
    with pytest.raises(CheckpointError) as error:
        open_block(LocalFiles(tmp_path), TARGET)
    assert said in str(error.value)
    assert tensor in str(error.value)


def test_a_missing_tensor_and_one_of_another_shape_are_refused(tmp_path: Path) -> None:
    for name, tensor, said in (
        ("norm.weight", None, "norm.weight"), ("markov_head.markov_w2.weight", torch.zeros(30, 3), "markov_w2"),
        ("confidence_head.proj.weight", torch.zeros(1, 5), "confidence_head.proj.weight is [1, 5]"),
    ):
        tensors = random_block(replace(BASE, rank=3, confidence="markov"))
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
        write_block(tmp_path, replace(BASE, rank=3, confidence="markov"), tensors)
        with pytest.raises(CheckpointError) as error:
            open_block(LocalFiles(tmp_path), TARGET)
        assert said in str(error.value)


@pytest.mark.parametrize(
    "name", ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"]
)
def test_a_tensor_without_dimensions_is_refused(name: str, tmp_path: Path) -> None:
    design = replace(BASE, rank=3, confidence="markov")
    write_block(tmp_path, design, random_block(design) | {name: torch.tensor(1.0)})
    with pytest.raises(CheckpointError) as error:
        open_block(LocalFiles(tmp_path), TARGET)
    assert f"{name} is []; it must have two dimensions" in str(error.value)
    assert "\n" not in str(error.value)


def test_draft_eagle3_names_the_drafter_of_such_a_head(tmp_path: Path) -> None:
    for i, names in enumerate(({}, {"hidden_norm.": "encoder.output_norm_enc."})):
        folder = write_block(tmp_path / f"{i}", BASE, random_block(BASE), renamed=names)
        with pytest.raises(CheckpointError, match=r"a DFlash or DSpark head, and an EAGLE-3 head is needed; use draft=block$"):
            open_head(LocalFiles(folder), TARGET)


def test_an_eagle3_head_and_a_pickled_mask_are_refused(tmp_path: Path) -> None:
    tensors = random_block(BASE)
    del tensors["hidden_norm.weight"]
    write_block(tmp_path / "eagle", BASE, tensors)
    with pytest.raises(CheckpointError, match=r"the weights have no fc and hidden_norm; .*draft=eagle3 is for EAGLE-3 heads"):
        open_block(LocalFiles(tmp_path / "eagle"), TARGET)
    write_block(tmp_path / "pickle", BASE, random_block(BASE))
    (tmp_path / "pickle" / "mask_embedding.pt").write_bytes(b"anything")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt is a pickle, which is not read"):
        open_block(LocalFiles(tmp_path / "pickle"), TARGET)


def test_a_d2t_out_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    design = replace(BASE, draft_vocab=9)
    write_block(tmp_path, design, random_block(design) | {"d2t": torch.full((9,), 25)})
    with pytest.raises(CheckpointError, match="d2t leads 3 draft ids out of the vocabulary of 31"):
        open_block(LocalFiles(tmp_path), TARGET)


def config(path: Path | None, draft_len: int, *, dummy: bool = False) -> RunConfig:
    found = RunConfig()
    found.draft.name, found.draft.num_speculative_tokens = "block", draft_len
    found.draft.path = None if path is None else str(path)
    found.model.load_format = "dummy" if dummy else "auto"
    return found


def test_more_drafts_than_a_block_holds_are_refused(tmp_path: Path) -> None:
    design = replace(BASE, block=4, from_anchor=False)
    folder = write_block(tmp_path, design, random_block(design))
    assert BlockDrafterSpec(config(folder, 3), TARGET).checkpoint.most_drafts == 3
    with pytest.raises(ConfigError, match=r"draft\.num_speculative_tokens=4 exceeds the 3 tokens that .* drafts in a block; use"):
        BlockDrafterSpec(config(folder, 4), TARGET)
    weights = load_block(folder, open_block(LocalFiles(folder), TARGET), dtype=torch.float64, device=DEVICE)
    with pytest.raises(ValueError, match="draft_len 4; the head drafts at most 3"):
        BlockDrafter(weights, tiny_target(), 4, slots=1)


def test_a_guessed_block_layout_is_said(tmp_path: Path) -> None:
    for layout, kind, said in (
        ("z-lab", {}, "no sample_from_anchor in config.json; false is assumed"),
        ("deepspec", {}, "no sample_from_anchor in config.json; true is assumed"),
        ("speculators", {"sample_from_anchor": None}, ""), ("z-lab", {"sample_from_anchor": False}, ""),
    ):
        design = replace(BASE, layout=layout, from_anchor=layout == "deepspec")
        folder = write_block(tmp_path / f"{layout}{len(kind)}", design, random_block(design), **kind)
        note = BlockDrafterSpec(config(folder, 3), TARGET).note
        assert said in note
        assert bool(note) == bool(said)
    assert not BlockDrafterSpec(config(None, 3, dummy=True), TARGET).note


def test_the_bytes_of_a_head_are_those_that_it_keeps() -> None:
    """The rows that compute K and V are kept a second time, for the product of all layers."""
    spec = dummy_block_spec(TARGET, draft_vocab_size=19, num_layers=3)
    found = dummy_block(spec, dtype=torch.bfloat16, device=DEVICE)
    kept = sum(tensor.numel() for tensor in found.tensors.values()) + 3 * 2 * spec.num_kv_heads * spec.head_dim * 16
    assert block_bytes(spec, torch.bfloat16) == 2 * kept


def test_a_dummy_head_fits_any_model_and_length() -> None:
    spec = BlockDrafterSpec(config(None, 12, dummy=True), TARGET)
    assert spec.checkpoint.most_drafts == 12
    assert spec.draft_bytes(0, dtype=torch.bfloat16, device=DEVICE) == 0
    assert len(spec.layer_states(torch.bfloat16, 16)) == 5

