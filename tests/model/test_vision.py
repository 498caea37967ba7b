"""Vision encoders against transformers: what an image is encoded to, positions of rows with images, and keys that are refused."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from batchspec.batch.images import rope_positions
from batchspec.errors import CheckpointError
from batchspec.images.decode import decode
from batchspec.images.header import read_header
from batchspec.images.pixtral_processor import LongestEdgeProcessor
from batchspec.model.families.shapes import SHAPES
from batchspec.model.spec import load_spec
from batchspec.model.vision import spec as module_of_spec
from batchspec.model.vision.blocks import AttentionWithin, grid_positions, merge_order
from batchspec.model.vision.encoder import PatchEncoder
from batchspec.model.vision.qwen2_5_vl import window_order
from batchspec.model.vision.registry import load_vision
from batchspec.model.vision.spec import VisionSpec
from batchspec.model.weights import Checkpoint
from batchspec.records import ImagePiece
from tests.helpers.image_models import GLM, inputs_of, make_image_model, picture, theirs

CPU = torch.device("cpu")
QWEN3 = ("qwen3_5", "qwen3_5_moe", "qwen3_vl")
KINDS = (*QWEN3, "qwen2_5_vl", "mistral3", "lighton_ocr", "glm_ocr", "gemma4", "gemma4_small", "gemma4_unified")
SIZES = ((50, 70), (13, 90), (200, 300), (8, 8), (50, 70), (15, 120))


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("models") / request.param, request.param)


def built(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[VisionSpec, Any]:
    spec = load_vision(folder)
    with Checkpoint(folder, spec, dtype=dtype, device=CPU) as weights:
        return spec, spec.build(weights)


def pixels(spec: VisionSpec, data: bytes) -> np.ndarray[Any, Any]:
    header = read_header(data)
    return decode(data, spec.processor.fit(header.height, header.width))


@torch.no_grad()
def encoded_by_transformers(folder: Path, inputs: dict[str, torch.Tensor]) -> Any:
    model = theirs(folder).model
    if "image_position_ids" in inputs:
        return model.get_image_features(inputs["pixel_values"], inputs["image_position_ids"])
    if "image_sizes" in inputs:
        return model.get_image_features(inputs["pixel_values"], inputs["image_sizes"])
    return model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])


@pytest.mark.parametrize("most", [32_768, 100])
def test_an_image_is_encoded_as_transformers_does_it(folder: Path, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone or with others; the deepstack of Qwen3-VL too."""
    monkeypatch.setattr(module_of_spec, "MOST_PATCHES", most)
    spec, encoder = built(folder)
    images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    inputs = inputs_of(folder, [], images)
    encoded = encoded_by_transformers(folder, inputs)
    pooled = encoded.pooler_output if isinstance(encoded.pooler_output, tuple) else encoded.pooler_output.split(1 << 20)
    expected = torch.stack([torch.cat(pooled), *(getattr(encoded, "deepstack_features", None) or [])], 1)
    found = encoder.encode([pixels(spec, one) for one in images])
    if (positions := inputs.get("image_position_ids")) is not None:
        counts = (positions[..., 0] >= 0).sum(1) // (1 if folder.name == "gemma4_unified" else 9)
    else:
        grids = inputs["image_grid_thw"][:, 1:] if "image_grid_thw" in inputs else inputs["image_sizes"] // 4
        counts = (grids // 2).prod(1)
        assert (grids % 2).any() == (folder.name == "lighton_ocr"), "rows and columns of patches that become no token"
    assert [len(own) for own in found] == counts.tolist()
    assert expected.shape[1] == (3 if folder.name == "qwen3_vl" else 1)
    assert [own.untyped_storage().nbytes() for own in found] == [own.nbytes for own in found], "dropping one frees its memory"
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(encoder.encode([pixels(spec, images[0])])[0], found[0], atol=1e-5, rtol=0)


def test_heads_have_the_strides_that_attention_on_a_gpu_takes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bidirectional_attention` refuses others."""
    spec, encoder = built(folder)
    seen, plain = list[tuple[int, ...]](), AttentionWithin.__call__

    def attend(self: AttentionWithin, *heads: torch.Tensor) -> torch.Tensor:
        assert len({own.stride() for own in heads}) == 1
        assert heads[0].stride()[1:] == (heads[0].shape[2], 1)
        seen.append(heads[0].stride())
        return plain(self, *heads)

    monkeypatch.setattr(AttentionWithin, "__call__", attend)
    encoder.encode([pixels(spec, picture(50, 70))])
    assert len(seen) == spec.depth


def test_the_operations_of_a_vision_encoder_are_those_that_torch_counts(folder: Path) -> None:
    """In transformers' encoder, whose attention is two products; of an image of whole windows."""
    from torch.utils.flop_counter import FlopCounterMode

    spec, (height, width) = load_vision(folder), (84, 120) if folder.name.startswith("gemma4") else (24, 48)
    inputs = inputs_of(folder, [], [picture(height, width)])
    with FlopCounterMode(display=False) as counter:
        encoded_by_transformers(folder, inputs)
    patches = height * width // spec.processor.patch**2
    pooling = 2 * patches * 70 * spec.size if folder.name in ("gemma4", "gemma4_small") else 0  # theirs is a product
    assert spec.flop(patches) == pytest.approx(counter.get_total_flops() - pooling, rel=1e-12)


def test_the_tensors_of_a_vision_encoder_are_those_that_transformers_saves(folder: Path) -> None:
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        every = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    stored = {name: every[saved] for name, saved in load_vision(folder).own("", {name: name for name in every}).items()}
    assert {tensor.name: tensor.shape for tensor in load_vision(folder).tensors()} == stored
    assert len(stored) == sum(any(part in name for part in ("visual.", "vision", "projector")) for name in every)
    assert load_vision(folder).weight_bytes(torch.float32) == sum(4 * int(np.prod(shape)) for shape in stored.values())


class _Live(TorchDispatchMode):
    """The most bytes of results of operations that were in memory at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results, self.most = list[weakref.ref[torch.Tensor]](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.results.append(weakref.ref(found))
        storages = [own.untyped_storage() for ref in self.results if (own := ref()) is not None]
        self.most = max(self.most, sum({one.data_ptr(): one.nbytes() for one in storages}.values()))
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_positions_of_a_large_image_take_two_buffers(dtype: torch.dtype) -> None:
    grid, table = (40, 52), torch.randn(25, 64, dtype=dtype)
    coords = merge_order(grid, 2)
    with _Live() as live:
        found = grid_positions(table, coords, grid)
    assert live.most < 2.5 * found.nbytes
    image = table.to(found.dtype).view(1, 5, 5, 64).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(image, grid, mode="bilinear", align_corners=True)[0].permute(1, 2, 0)
    torch.testing.assert_close(found, expected[coords[0], coords[1]], atol=1e-5, rtol=0)


class _Rope:
    """What `get_rope_index` reads of a model."""

    class config:
        class vision_config:
            spatial_merge_size = 2

    get_vision_position_ids = Qwen3VLModel.get_vision_position_ids


@settings(max_examples=300)
@given(st.lists(st.integers(1, 12) | st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=7), st.data())
def test_positions_are_those_of_transformers_wherever_a_prompt_is_cut(layout: list[Any], data: Any) -> None:
    """Numbers are lengths of texts, pairs are grids of images. Transformers takes images without a text between them for one."""
    parts: list[Any] = []
    for part in layout:
        parts += [1, part] if parts and isinstance(part, tuple) and isinstance(parts[-1], tuple) else [part]
    pieces, kinds, begin = list[ImagePiece](), list[int](), 0
    of_size = partial(ImagePiece, height=0, width=0, encoded_pixels=0, digest=b"", source=b"")
    for part in parts:
        length = part if isinstance(part, int) else part[0] * part[1]
        if not isinstance(part, int):
            pieces.append(of_size(begin=begin, length=length, rows=part[0], cols=part[1], advance=max(part)))
        kinds += [int(not isinstance(part, int))] * length
        begin += length
    grids = torch.tensor([[1, 2 * piece.rows, 2 * piece.cols] for piece in pieces])
    index: Any = Qwen3VLModel.get_rope_index
    expected, delta = index(
        _Rope(), torch.zeros(1, begin, dtype=torch.long), mm_token_type_ids=torch.tensor([kinds]), image_grid_thw=grids
    )
    cut = data.draw(st.integers(0, begin))
    found = np.concatenate([rope_positions(pieces, 0, cut), rope_positions(pieces, cut, begin)], 1)
    assert found.tolist() == expected[:, 0].tolist()
    assert sum(piece.advance - piece.length for piece in pieces) == int(delta)
    assert rope_positions(pieces, begin + 3, begin + 5)[2].tolist() == [begin + 3 + int(delta), begin + 4 + int(delta)]


@pytest.mark.parametrize(
    ("part", "keys", "said"),
    [
        ("vision_config", {"hidden_act": "relu"}, "hidden_act"), ("vision_config", {"in_channels": 1}, "in_channels"),
        ("vision_config", {"num_heads": 5}, "num_heads=5 does not divide"),
        ("vision_config", {"window_size": 112}, "window_size=112 is unknown"),
        ("vision_config", {"out_hidden_size": 32}, "out_hidden_size=32 is not the hidden_size"),
        ("vision_config", {"num_position_embeddings": 26}, "a square"), ("vision_config", {"depth": 0}, "depth"),
        ("vision_config", {"deepstack_visual_indexes": [9]}, "different layers of the vision encoder"),
        ("", {"image_token_id": 9999}, "image_token_id=9999 is outside"), ("", {"model_type": "gemma3"}, "no vision encoder"),
    ],
)  # fmt: skip
def test_a_key_that_changes_what_a_vision_encoder_computes_is_refused(
    part: str, keys: Any, said: str, folder: Path, tmp_path: Path
) -> None:
    if folder.name not in QWEN3:
        pytest.skip("its keys have a test of their own")
    refused_key(folder, tmp_path, part, keys, said)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"window_size": 7}, "window_size=7 must be at least 8"), ({"fullatt_block_indexes": [3]}, "different layers"),
        ({"hidden_act": "relu"}, "hidden_act"), ({"num_heads": 5}, "num_heads=5 does not divide"),
        ({"deepstack_visual_indexes": [1]}, "is unknown"), ({"out_hidden_size": 32}, "is not the hidden_size"),
    ],
)  # fmt: skip
def test_a_key_of_qwen2_5_vl_that_changes_what_is_computed_is_refused(keys: Any, said: str, tmp_path: Path) -> None:
    make_image_model(tmp_path / "model", "qwen2_5_vl")
    refused_key(tmp_path / "model", tmp_path, "vision_config", keys, said)


@pytest.mark.parametrize(
    ("kind", "keys", "said"),
    [
        ("gemma4", {"hidden_activation": "relu"}, "hidden_activation other than gelu_pytorch_tanh"),
        ("gemma4", {"num_key_value_heads": 1}, "num_key_value_heads=1 must be num_attention_heads=3"),
        ("gemma4", {"attention_bias": True}, "attention_bias=true"), ("gemma4", {"head_dim": 6}, "head_dim=6 is no multiple"),
        ("gemma4", {"position_embedding_size": 209}, "position_embedding_size=209 is below 210"),
        ("gemma4", {"model_type": "siglip"}, "model_type=.*supported is gemma4_vision"),
        ("gemma4", {"sharpened": 1}, "sharpened=1 is unknown"), ("gemma4", {"patch_size": 5}, "patch_size=4: config.json says 5"),
        ("gemma4", None, "no vision_config"), ("gemma4_unified", None, "no vision_config"),
        ("gemma4_unified", {"mm_posemb_size": 69}, "mm_posemb_size=69 is below 70"),
        ("gemma4_unified", {"output_proj_dims": 25}, "output_proj_dims must be mm_embed_dim=24"),
        ("gemma4_unified", {"model_patch_size": 16}, "model_patch_size be 12"),
        ("gemma4_unified", {"sharpened": 1}, "sharpened=1 is unknown"),
        ("gemma4_unified", {"model_type": "gemma4_vision"}, "supported is gemma4_unified_vision"),
    ],
)  # fmt: skip
def test_a_key_of_gemma4_that_changes_what_is_computed_is_refused(kind: str, keys: Any, said: str, tmp_path: Path) -> None:
    make_image_model(tmp_path / "model", kind)
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["vision_config"] = None if keys is None else {**config["vision_config"], **keys}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    refused_key(tmp_path / "model", tmp_path, "", {}, said)


@pytest.mark.parametrize(
    ("part", "keys", "said"),
    [
        ("text_config", {"pad_token_id": -1}, "pad_token_id=-1 must be a token"),
        ("text_config", {"pad_token_id": 320}, "pad_token_id=320 is outside"),
        ("", {"boi_token_id": 999}, "boi_token_id=999 is outside"), ("", {"eoi_token_id": 320}, "eoi_token_id=320 is outside"),
        ("", {"image_token_id": 320}, "image_token_id=320 is outside the vocabulary of 320 tokens"),
    ],
)  # fmt: skip
def test_a_token_of_gemma4_that_does_not_exist_is_refused(part: str, keys: Any, said: str, tmp_path: Path) -> None:
    refused_key(make_image_model(tmp_path / "model", "gemma4_small"), tmp_path, part, keys, said)


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_max_pixels_of_a_job_are_within_the_tables_of_positions_of_gemma4(kind: str, tmp_path: Path) -> None:
    processor = load_vision(make_image_model(tmp_path, kind)).processor
    assert processor.within(None, processor.max_pixels) == processor
    with pytest.raises(ValueError, match=r"is 140 tokens, and the model's tables of positions hold 70"):
        processor.within(None, 2 * processor.max_pixels)


def test_whether_images_are_cut_follows_from_the_language_model(tmp_path: Path) -> None:
    tower, unified = "gemma4", "gemma4_unified"
    for kind, key, most in ((tower, "vision", 70), (tower, None, 0), (tower, ..., 0), (unified, None, 0), (unified, ..., 70)):
        folder = make_image_model(tmp_path / f"{kind}-{key}", kind)
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["use_bidirectional_attention"] = key
        if key is ...:
            del config["text_config"]["use_bidirectional_attention"]
        (folder / "config.json").write_text(json.dumps(config))
        spec = replace(load_spec(folder), vision=load_vision(folder))
        attentions: list[Any] = [layer.mixer for layer in spec.layers]
        assert [own.whole_images for own in attentions] == [most > 0 and own.window is not None for own in attentions]
        assert spec.least_pass == max(1, most)


def test_the_published_vision_config_of_gemma4_is_read(tmp_path: Path) -> None:
    """Of the 31B, with keys that transformers wrote for every part."""
    folder = make_image_model(tmp_path, "gemma4")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] = {
        "_name_or_path": "", "architectures": None, "attention_bias": False, "attention_dropout": 0.0,
        "chunk_size_feed_forward": 0, "default_output_length": 280, "dtype": "bfloat16", "global_head_dim": 72, "head_dim": 72,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
        "initializer_range": 0.02, "intermediate_size": 4304, "is_encoder_decoder": False,
        "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "max_position_embeddings": 131_072, "model_type": "gemma4_vision",
        "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16, "output_attentions": False,
        "output_hidden_states": False, "patch_size": 16, "pooling_kernel_size": 3, "position_embedding_size": 10_240,
        "problem_type": None, "return_dict": True, "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "standardize": True, "use_clipped_linears": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Gemma4ImageProcessor"}))
    spec = load_vision(folder)
    assert (spec.depth, spec.size, spec.heads, spec.inner, spec.processor.max_pixels) == (27, 1152, 16, 4304, 280 * 48**2)
    assert spec.theta == 100.0


@pytest.mark.parametrize(
    ("file", "keys", "said"),
    [
        ("config.json", {"vision_feature_layer": -2}, "vision_feature_layer=-2 is not supported"),
        ("config.json", {"image_token_index": 5}, "image_token_index=5 is not the image_token of the tokenizer, 301"),
        ("config.json", {"projector_hidden_act": "relu"}, "projector_hidden_act=relu"),
        ("config.json", {"text_config": {"model_type": "mistral4"}}, "model_type=mistral4 with images is not supported; leave"),
        ("config.json", {"text_config": {"vocab_size": 302, "hidden_size": 64}}, "=302 is outside the vocabulary of 302 tokens"),
        ("processor_config.json", {"spatial_merge_size": 1}, "spatial_merge_size=1: config.json says 2"),
        ("processor_config.json", {"image_end_token": "[IMG_END]"}, r"no added token \[IMG_END\]"),
    ],
)  # fmt: skip
def test_files_of_mistral3_that_contradict_each_other_are_refused(file: str, keys: Any, said: str, tmp_path: Path) -> None:
    make_image_model(tmp_path, "mistral3")
    (tmp_path / file).write_text(json.dumps({**json.loads((tmp_path / file).read_text()), **keys}))
    with pytest.raises(CheckpointError, match=said) as caught:
        load_vision(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("other", "said"), [(None, "save the tokenizer in the fast format"), ("tekken.json", "tekken.json is not read; add a")]
)
def test_mistral3_without_tokenizer_json_is_refused(other: str | None, said: str, tmp_path: Path) -> None:
    make_image_model(tmp_path, "mistral3")
    (tmp_path / "tokenizer.json").unlink()
    if other is not None:
        (tmp_path / other).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"no tokenizer\.json; {said}"):
        load_vision(tmp_path)


@pytest.mark.parametrize(
    ("file", "keys", "said"),
    [
        ("config.json", {"projector_hidden_act": "silu"}, "projector_hidden_act must be gelu"),
        ("config.json", {"multimodal_projector_bias": True}, "multimodal_projector_bias false"),
        ("config.json", {"vision_feature_layer": -2}, "vision_feature_layer=-2 is not supported"),
        ("config.json", {"text_config": {"model_type": "qwen2"}}, "model_type=qwen2 with images is not supported; leave"),
        ("config.json", {"image_token_id": 320}, "image_token_id=320 is outside the vocabulary of 320 tokens"),
        ("processor_config.json", {"spatial_merge_size": 1}, "spatial_merge_size=1: config.json says 2"),
        ("processor_config.json", {"patch_size": None}, "patch_size=None: config.json says 4"),
        ("preprocessor_config.json", {"patch_size": 16}, "patch_size=16: config.json says 4 or 8"),
    ],
)
def test_files_of_lighton_ocr_that_contradict_each_other_are_refused(file: str, keys: Any, said: str, tmp_path: Path) -> None:
    make_image_model(tmp_path, "lighton_ocr")
    (tmp_path / file).write_text(json.dumps({**json.loads((tmp_path / file).read_text()), **keys}))
    with pytest.raises(CheckpointError, match=said) as caught:
        load_vision(tmp_path)
    assert "\n" not in str(caught.value)


def test_published_files_of_lighton_ocr_are_told_by_their_class(tmp_path: Path) -> None:
    """They call themselves mistral3. Without processor_config.json its sizes are 14 and 2, as in transformers."""
    make_image_model(tmp_path, "lighton_ocr")
    expected, text, path = load_vision(tmp_path), replace(load_spec(tmp_path), tie=True), tmp_path / "config.json"
    config = json.loads(path.read_text())
    config |= {"model_type": "mistral3", "architectures": ["LightOnOCRForConditionalGeneration"], "vision_feature_layer": -1}
    config |= {"image_token_index": config.pop("image_token_id"), "projector_hidden_act": "gelu", "eos_token_id": 2}
    del config["tie_word_embeddings"]
    config["auto_map"] = {"AutoModel": "modeling_lightonocr.LightOnOCRForConditionalGeneration"}
    path.write_text(json.dumps(config))
    assert load_vision(tmp_path) == expected
    assert load_spec(tmp_path) == text
    assert (text.family, load_spec(tmp_path).unread) == ("qwen3", ())
    nested = json.loads((tmp_path / "preprocessor_config.json").read_text()) | {"patch_size": 8}
    values = json.loads((tmp_path / "processor_config.json").read_text()) | {"image_processor": nested}
    (tmp_path / "processor_config.json").write_text(json.dumps(values))
    assert isinstance(expected.processor, LongestEdgeProcessor)
    assert load_vision(tmp_path) == replace(expected, processor=replace(expected.processor, unit=8))
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"patch_size=14: config\.json says 4; correct"):
        load_vision(tmp_path)


def test_an_image_of_lighton_of_whole_tokens_is_encoded_as_transformers_does_it(tmp_path: Path) -> None:
    make_image_model(tmp_path, "lighton_ocr")
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"patch_size": {"height": 8, "width": 8}}))
    spec, encoder = built(tmp_path)
    images = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    inputs = inputs_of(tmp_path, [], images)
    assert not (inputs["image_sizes"] % 8).any()
    found = encoder.encode([pixels(spec, one) for one in images])
    expected = torch.cat(encoded_by_transformers(tmp_path, inputs).pooler_output)
    torch.testing.assert_close(torch.cat(found)[:, 0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("part", "keys", "said"),
    [
        ("vision_config", {"hidden_act": "relu"}, "hidden_act"), ("vision_config", {"in_channels": 1}, "in_channels must be 3"),
        ("vision_config", {"num_heads": 5}, "num_heads=5 does not divide"),
        ("vision_config", {"window_size": 112}, "window_size=112 is unknown"),
        ("vision_config", {"out_hidden_size": 32}, "out_hidden_size=32 is not the hidden_size"),
        ("vision_config", {"patch_size": 8}, "patch_size=4: config.json says 8"),
        ("", {"image_token_id": 9999}, "image_token_id=9999 is outside"),
        ("text_config", {"head_dim": 16}, r"mrope_section=\[2, 4, 6\] must be three numbers with the sum 8"),
        ("text_config", {"rope_parameters": None, "head_dim": 16}, r"mrope_section=\[8, 12, 12\] must be .* sum 8"),
    ],
)  # fmt: skip
def test_a_key_of_glm_ocr_that_changes_what_is_computed_is_refused(part: str, keys: Any, said: str, tmp_path: Path) -> None:
    make_image_model(tmp_path / "model", "glm_ocr")
    refused_key(tmp_path / "model", tmp_path, part, keys, said)


def test_the_published_glm_ocr_has_as_many_tensors_and_weights_as_its_files(tmp_path: Path) -> None:
    """526 and 1,325,258,240, with two copies of matrices. Source: zhutao100/GLM-OCR-Swift, docs/GLM-OCR_model.md."""
    config: dict[str, Any] = {
        "architectures": ["GlmOcrForConditionalGeneration"], "model_type": "glm_ocr", "image_token_id": 59280,
        "image_start_token_id": 59256, "image_end_token_id": 59257, "tie_word_embeddings": False, "dtype": "bfloat16",
        "text_config": {**SHAPES["glm-ocr"], "architectures": None, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        "vision_config": {
            "model_type": "glm_ocr_vision", "hidden_size": 1024, "depth": 24, "num_heads": 16, "attention_bias": True,
            "intermediate_size": 4096, "hidden_act": "silu", "hidden_dropout_prob": 0.0, "attention_dropout": 0.0,
            "initializer_range": 0.02, "image_size": 336, "patch_size": 14, "out_hidden_size": 1536, "rms_norm_eps": 1e-5,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "dtype": "bfloat16",
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = {**GLM, "patch_size": 14, "size": {"shortest_edge": 12544, "longest_edge": 9633792}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values))
    spec, vision = load_spec(tmp_path), load_vision(tmp_path)
    assert spec.unread == ()
    assert spec.mtp is not None
    tensors = [*spec.tensors(), *spec.mtp.tensors(), *vision.tensors()]
    assert len(tensors) + len(spec.mtp.copies_of_model) == 526
    copies = len(spec.mtp.copies_of_model) * spec.vocab_size * spec.hidden_size
    assert sum(int(np.prod(tensor.shape)) for tensor in tensors) + copies == 1_325_258_240


@pytest.mark.parametrize("kind", KINDS)
def test_the_rotation_of_a_vision_encoder_may_be_called_default(kind: str, tmp_path: Path) -> None:
    if kind == "gemma4_unified":
        pytest.skip("no patch is rotated")
    make_image_model(tmp_path, kind)
    expected, file = load_vision(tmp_path), tmp_path / "config.json"
    config = json.loads(file.read_text())
    for name, theta in (("default", expected.theta), ("axial", 70.0), ("yarn", None)):
        config["vision_config"]["rope_parameters"] = {"rope_type": name, "rope_theta": theta}
        file.write_text(json.dumps(config))
        if theta is None:
            with pytest.raises(CheckpointError, match=r"rope_type=.*yarn.*supported is axial"):
                load_vision(tmp_path)
        else:
            assert load_vision(tmp_path) == replace(expected, theta=theta)


def refused_key(folder: Path, tmp_path: Path, part: str, keys: Any, said: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (config[part] if part else config).update(keys)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text((folder / "preprocessor_config.json").read_text())
    with pytest.raises(CheckpointError, match=said) as caught:
        load_vision(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_preprocessor_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=r"no preprocessor_config\.json"):
        load_vision(tmp_path)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("qwen2_5_vl", {"window": 4}), ("qwen2_5_vl", {"whole": ()}), ("qwen2_5_vl", {"whole": (0,)}),
        ("qwen2_5_vl", {"act": "none"}), ("qwen2_5_vl", {"theta": 9_000.0}),
        ("qwen3_vl", {"deepstack": (0, 2)}), ("qwen3_vl", {"gelu": "none"}), ("mistral3", {"act": "silu"}),
        ("gemma4", {"theta": 90.0}), ("gemma4", {"standardized": False}), ("gemma4_small", {"clipped": False}),
        ("gemma4_small", {"theta": 100.0}), ("gemma4", {"eps": 1.0}), ("gemma4_unified", {"eps": 1.0}),
        ("mistral3", {"theta": 60.0}), ("mistral3", {"projector_eps": 0.1}), ("mistral3", {"projector_act": "silu"}),
        ("glm_ocr", {"act": "none"}), ("glm_ocr", {"eps": 1e-4}), ("glm_ocr", {"theta": 9_000.0}),
        ("lighton_ocr", {"act": "none"}), ("lighton_ocr", {"projector_eps": 0.1}), ("lighton_ocr", {"projector_act": "silu"}),
    ],
)  # fmt: skip
def test_another_shape_of_the_same_weights_encodes_something_else(kind: str, wrong: Any, tmp_path: Path) -> None:
    """What the comparison with transformers would miss if it were too coarse."""
    make_image_model(tmp_path, kind)
    spec, encoder = built(tmp_path)
    image = [pixels(spec, picture(60, 68))]
    with Checkpoint(tmp_path, spec, dtype=torch.float32, device=CPU) as weights:
        other = replace(spec, **wrong).build(weights)
    assert (encoder.encode(image)[0] - other.encode(image)[0]).abs().max() > 1e-3


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_windows_hold_each_token_of_an_image_once(rows: int, cols: int, side: int) -> None:
    from transformers.vision_utils import get_vision_window_index

    places, sizes = window_order((rows, cols), side)
    grid = torch.tensor([[1, 2 * rows, 2 * cols]])
    expected, ends = get_vision_window_index(grid, spatial_merge_size=2, window_size=2 * 4 * side, patch_size=4)
    assert places.tolist() == expected.tolist()
    assert [0, *np.cumsum(sizes).tolist()] == (ends // 4).tolist()


def test_published_files_of_qwen2_5_vl_have_the_keys_of_the_language_model_beside_those_of_the_encoder(tmp_path: Path) -> None:
    make_image_model(tmp_path, "qwen2_5_vl")
    expected, text = load_vision(tmp_path), load_spec(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    inner = config.pop("text_config")
    rope = inner.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config |= {**inner, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    config |= {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    config["vision_config"] |= {"in_chans": 3, "spatial_patch_size": 4, "tokens_per_second": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_vision(tmp_path) == expected
    assert load_spec(tmp_path) == text
    config["rope_scaling"]["mrope_section"] = [2, 3, 2]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="three numbers with the sum 8"):
        load_vision(tmp_path)


A4 = (1728, 1216)
"""Height and width in pixels of a page of A4 at 200 dpi after resizing to at most 2.1 million pixels: 8,208 patches of 16."""


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 19_269), (torch.float32, 10_399)])
def test_two_pages_share_a_pass_in_bf16_and_the_plan_covers_what_a_pass_may_hold(
    dtype: torch.dtype, most: int, tmp_path: Path
) -> None:
    """Sizes of Qwen3-VL-8B's encoder. The passes are counted, nothing is encoded."""
    small = load_vision(make_image_model(tmp_path / "model", "qwen3_vl"))
    processor = replace(small.processor, patch=16, frames=2, max_pixels=2_129_920)
    spec = replace(small, processor=processor, size=1152, inner=4304)
    assert spec.most_patches(dtype) == most
    assert spec.activation_bytes(dtype) == most * spec.patch_bytes(dtype) <= module_of_spec.PASS_BYTES
    area = 16**2
    passes: list[int] = []

    class Counted(PatchEncoder):
        def __init__(self) -> None:
            self.spec, self._patch = spec, torch.zeros(1, dtype=dtype)

        def _pass(self, images: Any) -> list[torch.Tensor]:
            passes.append(sum(one.shape[0] * one.shape[1] // area for one in images))
            return [torch.zeros(1)] * len(images)

        def rows_of(self, patches: Any) -> torch.Tensor:
            raise AssertionError("not reached")

    Counted().encode([np.zeros((*A4, 3), np.uint8)] * 5)
    assert passes == ([16_416, 16_416, 8_208] if dtype == torch.bfloat16 else [8_208] * 5)
    assert max(passes) * spec.patch_bytes(dtype) <= spec.activation_bytes(dtype)


def test_an_image_larger_than_a_pass_is_planned_for(tmp_path: Path) -> None:
    small = load_vision(make_image_model(tmp_path / "model", "qwen3_vl"))
    spec = replace(small, processor=replace(small.processor, patch=16, max_pixels=16_777_216), size=1152, inner=4304)
    assert spec.activation_bytes(torch.bfloat16) == 65_536 * spec.patch_bytes(torch.bfloat16)
    assert replace(spec, size=8, inner=8).most_patches(torch.bfloat16) == module_of_spec.MOST_PATCHES
