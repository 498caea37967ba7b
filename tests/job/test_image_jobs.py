"""Whole jobs over rows with images: the tokens of transformers, every form of input, error rows, and what is refused by name."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLImageProcessorPil

import batchspec
from batchspec import cli, run
from batchspec.commands.planning import plan
from batchspec.commands.verify import verify
from batchspec.config.compose import compose
from batchspec.config.schema import InputConfig
from batchspec.data.dataset.reader import open_source
from batchspec.errors import BadRow, CheckpointError, ConfigError, InputError
from batchspec.heads.data import read_rows
from batchspec.images import prepared_images
from batchspec.images.header import MOST_PIXELS
from batchspec.job.load.memory import image_bytes
from batchspec.job.prepare import Job, open_job
from batchspec.job.runner.identity import job_fingerprint
from batchspec.job.runner.shard_work import ShardWork
from batchspec.model.spec import load_spec
from batchspec.model.vision import spec as vision_spec
from batchspec.model.vision.of_ranks import EXCHANGED
from batchspec.model.vision.registry import load_vision
from batchspec.packing.image_cost import PREPARE_S
from batchspec.packing.planner import GPU_PREFILL
from batchspec.packing.prompt_images import PromptImages
from batchspec.records import Completion, Request, RowError
from tests.data.s3_lab import BUCKET, running_lab
from tests.helpers.four_bit_models import FOUR_BITS
from tests.helpers.heads import random_tensors, tiny_design, write_head
from tests.helpers.image_models import PAD, PREPROCESSOR, add_marks, generated, make_image_model, picture, quantised, theirs
from tests.helpers.models import make_checkpoint
from tests.helpers.runs import run_apart, signalled_after_commits
from tests.images.test_decode import png
from tests.job.test_job import rewrite
from tests.model.test_lora import make_adapter, products

Rows = list[dict[str, Any]]
A, B, C = picture(30, 50, 1), picture(60, 20, 2), picture(50, 70, 3)
ONE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
NO_ANSWER = RowError(code="failed", stage="decode", message="none", retryable=False)
URL = pa.struct([("url", pa.string())])
PART = pa.struct([("type", pa.string()), ("text", pa.string()), ("image", pa.binary()), ("image_url", URL)])


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_vl", "qwen2_5_vl", "mistral3", "lighton_ocr", "glm_ocr", "gemma4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("models") / request.param, request.param, seed=3)


@pytest.fixture(scope="module")
def vl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("models") / "vl", "qwen3_vl", seed=3)


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def words(model: Path, folder: Path, *more: str) -> list[str]:
    return [
        f"model.path={model}", f"input.path={folder}/in.parquet", f"output.dir={folder}/out", "model.dtype=float32",
        "output.prompt_ids=true", "output.token_ids=true", "decode.ignore_eos=true", "input.max_error_fraction=1",
        "decode.max_new_tokens=20",
        *more,
    ]


def written(folder: Path) -> Rows:
    return pl.read_parquet(folder / "out/data").sort("row_index").to_dicts()


def done(model: Path, folder: Path, rows: Rows, *more: str, schema: pa.Schema | None = None) -> Rows:
    """The output of a job over these rows."""
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / "in.parquet")
    assert run.main(words(model, folder, *more)) == 0
    return written(folder)


def code_of(row: dict[str, Any]) -> tuple[str, str]:
    return (row["error"]["code"], row["error"]["message"]) if row["error"] else ("", "")


@pytest.mark.second
@pytest.mark.parametrize("draft", ["none", "lookup"])
def test_the_tokens_of_a_job_are_those_of_transformers(draft: str, model: Path, tmp_path: Path) -> None:
    column = "input.columns={images:images}"
    rows: Rows = [
        {"messages": user("no picture"), "images": None}, {"messages": user("<image>What is this?"), "images": [A]},
        {"messages": user("One<image>two<image>\n<image>"), "images": [B, A, C]},
        {"messages": user("It is <image>"), "images": [C]},
        {"messages": [*user("<image>"), {"role": "assistant", "content": "yes"}, *user("And <image>?")], "images": [A, B]},
    ]
    workers = "input.num_workers=2" if draft == "lookup" else "input.num_workers=0"  # rows come from processes of their own
    found = done(model, tmp_path, rows, f"draft={draft}", "decode.max_new_tokens=64", column, workers)
    if draft == "lookup" and model.name == "qwen3_vl":  # recurrent layers refuse it
        keys = ("draft=window", "draft.window=64", "decode.max_new_tokens=64", column, "output.overwrite=true")
        assert [row["token_ids"] for row in done(model, tmp_path, rows, *keys)] == [row["token_ids"] for row in found]
    reference = theirs(model)
    for row, out in zip(rows, found, strict=True):
        assert out["error"] is None
        expected = generated(reference, model, out["prompt_ids"], row["images"] or [], 64)
        assert out["token_ids"][: len(expected)] == expected
        assert len(expected) == 64 or expected[-1] == PAD
        count, of_text = out["prompt_ids"].count(PAD), len(row["images"] or [])  # the template writes a mark before and after
        if model.name == "mistral3":
            count += sum(out["prompt_ids"].count(mark) for mark in (300, 302)) - 2 * of_text
        assert out["usage"]["image_tokens"] == count
        assert len(out["image_digest"] or "") == 32 * len(row["images"] or [])
    assert "images" not in found[0]
    assert found[1]["messages"][0]["content"] == "<image>What is this?"


@pytest.mark.second
def test_every_form_of_an_image_gives_the_same_tokens(vl: Path, tmp_path: Path) -> None:
    """Bytes, the hub's struct, lists of them, data URLs; marks, parts {type: image}, parts with data; samples of a row."""
    cap, text = "decode.max_new_tokens=12", [{"type": "text", "text": "What is this?"}]
    column = "input.columns={images:images}"
    forms: list[tuple[Any, pa.DataType]] = [
        (A, pa.binary()), ([A], pa.list_(pa.large_binary())), ({"bytes": A, "path": "a.png"}, ONE),
        ([{"bytes": A, "path": None}], pa.list_(ONE)), (url(A), pa.string()),
    ]
    answers = []
    for place, (cell, kind) in enumerate(forms):
        folder = tmp_path / str(place)
        folder.mkdir()
        parts = user("<image>What is this?") if place % 2 else user([{"type": "image"}, *text])
        turn = pa.struct([("role", pa.string()), ("content", pa.string() if place % 2 else pa.list_(PART))])
        schema = pa.schema([("messages", pa.list_(turn)), ("images", kind)])
        answers += done(vl, folder, [{"messages": parts, "images": cell}], cap, column, schema=schema)
    inline = [
        user([{"type": "image_url", "image_url": {"url": url(A)}}, *text]), user([{"type": "image", "image": url(A)}, *text]),
    ]
    (tmp_path / "json").mkdir()
    as_json = [{"messages": json.dumps(one)} for one in inline]
    answers += done(vl, tmp_path / "json", as_json, cap, "model.vision=true", "decode.n=1")
    (tmp_path / "plain").mkdir()
    keys = ("input.columns={images:pic}", "input.chat=true")
    rows: Rows = [{"prompt": "What is this?", "pic": A}, {"prompt": "What is this?", "pic": None}]
    *plain, missing = done(vl, tmp_path / "plain", rows, cap, *keys)
    assert code_of(missing)[0] == "missing_image"
    answers += plain
    assert len(answers) == 8
    assert len({tuple(one["token_ids"]) for one in answers}) == 1
    assert len({tuple(one["prompt_ids"]) for one in answers}) == 1
    assert all(one["error"] is None for one in answers)


@pytest.mark.parametrize("form", ["in.jsonl", "in.csv"])
def test_cells_of_text_files_hold_one_path_or_a_list_of_paths(form: str, vl: Path, tmp_path: Path) -> None:
    for name, data in (("a.png", A), ("b.png", B)):
        (tmp_path / name).write_bytes(data)
    cells: list[Any] = ["a.png", ["a.png", "b.png"], []]
    rows = [{"prompt": "What?", "pic": one} for one in cells]
    if form == "in.csv":
        texts = [one if isinstance(one, str) else json.dumps(one) for one in cells]
        pl.DataFrame({"prompt": ["What?"] * 3, "pic": texts}).write_csv(tmp_path / form)
    else:
        (tmp_path / form).write_text("\n".join(map(json.dumps, [*rows, {"prompt": "What?", "pic": 5}])))
    keys = ("input.columns={images:pic}", "input.chat=true", f"input.image_root={tmp_path}", f"input.path={tmp_path}/{form}")
    job = open_job(compose([one for one in words(vl, tmp_path, *keys) if not one.endswith("in.parquet")]))
    found = list(job.admission.admit(next(job.source.shards(job.layout, set()))))
    assert [len(one.images) for one in found if isinstance(one, Request)] == [1, 2, 0]
    refused = [one.error.message for one in found if isinstance(one, Completion) and one.error]
    assert len(refused) == (form == "in.jsonl")
    assert all("image 1 must be bytes, {bytes, path}, a path or a data URL" in one for one in refused)


BAD: tuple[tuple[str, Any, Any, str, str], ...] = (
    ("marks", user("<image> <image>"), [A], "image_count", "2 places .* column has 1 image;"),
    ("no mark", user("hello"), [A], "image_count", "0 places .* column has 1 image;"),
    ("no image", user("<image>"), None, "image_count", "1 place for .* column has 0 images"),
    ("null", user("<image>"), [None], "missing_image", "image 1 is null"),
    ("name", user("<image>"), ["cats/1.png"], "missing_image", "'cats/1.png', and input.image_root is not set"),
    ("url", user("<image>"), ["https://x.org/1.png"], "missing_image", "URLs are not downloaded"),
    ("bare", user("<image>"), [url(A).partition(",")[2]], "bad_image", "base64 without a head; write data:image/png;base64,"),
    ("empty", user("<image>"), [""], "missing_image", "image 1 is null or empty"),
    ("base64", user("<image>"), ["data:image/png;base64,!!"], "bad_image", "base64 is not valid"),
    ("text", user("<image>"), ["data:text/plain;base64,aGk="], "bad_image", "is a URL that begins with"),
    ("format", user("<image>"), [url(b"hello")], "bad_image", "begins with 68 65 6c 6c 6f"),
    ("large", user("<image>"), [url(png(20000, 9000))], "large_image", f"exceed the limit of {MOST_PIXELS:,}"),
    ("aspect", user("<image>"), [url(picture(1, 300))], "bad_image", "more than 200 times as long"),
    ("cut", user("<image>"), [url(A[:-200])], "bad_image", "image 1 of 1: Pillow cannot read it .image file is truncated"),
    ("placeholder", user("a <|image_pad|>"), [], "image_count", "1 placeholders .* for 0 images"),
    ("long", user("<image>" + "word " * 900), [url(A)], "too_long", "tokens of text and 24 of images .* no image is cut"),
    ("system", [{"role": "system", "content": "x <image>"}, *user("hi <image>")], [url(A)], "", ""),
    ("video", user([{"type": "video", "video": "a.mp4"}]), None, "bad_messages", "type 'video', and batchspec takes texts"),
    (
        "assistant", [*user("a"), {"role": "assistant", "content": [{"type": "image"}]}, *user("b")], None, "bad_messages",
        "type 'image' with role 'assistant', and images are read of the roles user and tool",
    ),
    *(
        (f"{kind} {key}", user([{"type": kind, **given, key: value}]), [A], "bad_messages", f"has {key}=.* no effect; put")
        for kind, given, key, value in (
            ("image", {}, "url", "https://x.org/1.png"), ("image", {}, "path", "a.png"),
            ("image", {"image": url(B)}, "max_pixels", 64), ("image", {}, "resized_height", 64),
            ("image", {}, "image_url", {"url": url(B)}), ("image_url", {}, "image", url(B)),
        )
    ),
    ("detail", user([{"type": "image_url", "image_url": {"url": url(A), "detail": "low"}}]), [], "bad_messages", "detail='low'"),
    ("auto", user([{"type": "image_url", "image_url": {"url": url(A), "detail": "auto"}}]), [], "", ""),
    ("both", user([{"text": "hi", "image": url(A)}]), [], "bad_messages", "part of type 'None'"),
)  # fmt: skip


@pytest.mark.second
@pytest.mark.parametrize("overlong", ["error", "truncate"])
def test_each_bad_image_costs_its_row_alone_and_says_why(overlong: str, vl: Path, tmp_path: Path) -> None:
    cells = [given for _, _, given, *_ in BAD]
    images = [None if cell is None else [url(one) if isinstance(one, bytes) else one for one in cell] for cell in cells]
    rows = [
        {"id": name, "messages": json.dumps(messages), "images": own}
        for (name, messages, *_), own in zip(BAD, images, strict=True)
    ]
    found = done(vl, tmp_path, rows, "decode.max_new_tokens=4", "input.columns={images:images}", f"input.on_overlong={overlong}")
    for (name, _, _, code, said), row in zip(BAD, found, strict=True):
        own, message = code_of(row)
        assert own == code, (name, message)
        assert pl.Series([message]).str.contains(said).item(), (name, message)
        assert message == "" or f"row {row['row_index']} (id '{name}')" in message


def test_an_image_of_another_type_is_refused(vl: Path) -> None:
    read = PromptImages(load_vision(vl).processor, from_column=False, files=None)
    with pytest.raises(BadRow, match=r"^image 2 must be bytes, \{bytes, path\}, a path or a data URL; correct it$"):
        read.placed(user("hi"), [A, 3], None, adds=False)


@pytest.mark.second
@pytest.mark.parametrize("pattern", ["1", "01", "011"])
def test_jobs_whose_last_rows_have_cut_images_end(pattern: str, vl: Path, tmp_path: Path) -> None:
    """1: a row with a cut image, which is found when it is about to enter a slot; the one slot is free by then."""
    rows = [{"messages": user("<image>"), "images": A[:-200] if bad == "1" else A} for bad in pattern]
    keys = ["input.columns={images:images}", "decode.max_new_tokens=4"]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    assert (run.main(words(vl, tmp_path, *keys, "packing.max_num_seqs=1")) == 0) == ("0" in pattern)
    found = written(tmp_path)
    assert [code_of(row)[0] for row in found] == ["bad_image" if bad == "1" else "" for bad in pattern]
    with batchspec.Engine(overrides=[f"model.path={vl}", "model.dtype=float32", *keys]) as engine:
        assert [code_of(row)[0] for row in engine.generate(rows).to_dicts()] == [code_of(row)[0] for row in found]


@pytest.mark.second
def test_samples_and_options_of_rows_work_beside_images(vl: Path, tmp_path: Path) -> None:
    rows: Rows = [
        {"messages": user("<image>Go"), "images": A, "n": 3, "regex": None},
        {"messages": user("<image>Go"), "images": B, "n": 1, "regex": "[a-c]{5}"},
    ]
    found = done(
        vl, tmp_path, rows, "decode.max_new_tokens=12", "input.columns={images:images,regex:regex}", "decode=sampled",
        "decode.ignore_eos=false", "output.logprobs=2",
    )
    assert [row["sample_index"] for row in found if row["row_index"] == 0] == [0, 1, 2]
    assert [row["error"] for row in found] == [None] * 4
    assert set(found[3]["completion"]) <= set("abc")
    assert len(found[3]["completion"]) == 5
    assert found[1]["usage"]["cached_tokens"] + found[2]["usage"]["cached_tokens"] > 16


ROW = {"messages": user("<image>"), "images": A}


def refused(model: Path, folder: Path, *more: str, row: dict[str, Any] = ROW) -> str:
    pq.write_table(pa.Table.from_pylist([row]), folder / "in.parquet")
    with pytest.raises((ConfigError, CheckpointError, InputError)) as caught:
        open_job(compose(words(model, folder, *more)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("key", ["task=embed", "decode.score=prompts"])
def test_what_is_not_supported_with_images_is_refused_by_name(key: str, vl: Path, tmp_path: Path) -> None:
    embeds = ["decode.max_new_tokens=1024", "decode.ignore_eos=false"]
    assert f"{key} is not supported with images" in refused(vl, tmp_path, key, *embeds, "input.columns={images:images}")


def test_deterministic_jobs_encode_images_one_by_one_and_refuse_those_that_see_themselves(vl: Path, tmp_path: Path) -> None:
    keys = ["input.columns={images:images}", "decode.deterministic=true"]
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "in.parquet")
    for more, ordered in ((keys, True), (keys[:1], False)):
        vision = open_job(compose(words(vl, tmp_path, "model.dtype=float64", *more))).spec.vision
        assert vision is not None
        assert vision.ordered == ordered
    gemma4 = make_image_model(tmp_path / "gemma4", "gemma4")
    said = refused(gemma4, tmp_path, *keys, "model.dtype=float64")
    assert said.startswith("decode.deterministic=true is not supported with images of gemma4"), said


@pytest.mark.second
def test_a_deterministic_job_has_the_tokens_that_drafts_and_few_pages_do_not_change(vl: Path, tmp_path: Path) -> None:
    rows: Rows = [{"messages": user("<image>What is this?"), "images": own} for own in (A, B, A)]
    keys = ["input.columns={images:images}", "decode.deterministic=true", "model.dtype=float64"]
    found = done(vl, tmp_path, rows, *keys, "draft=none", "packing.max_num_seqs=1")
    verified = verify(tmp_path / "out", 3)
    assert (verified.differences, verified.exact) == ([], True)
    (tmp_path / "again").mkdir()
    again = done(vl, tmp_path / "again", rows, *keys, "draft=lookup", "packing.max_num_batched_tokens=23")
    assert [row["token_ids"] for row in again] == [row["token_ids"] for row in found]
    assert [row["image_digest"] for row in again] == [row["image_digest"] for row in found]


@pytest.mark.parametrize(
    ("name", "dtype"), [("weight_packed", torch.int32), ("weight", torch.uint8), ("weight", torch.float8_e4m3fn)]
)
def test_a_vision_encoder_that_is_quantised_is_refused_by_name(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """As INT4, NVFP4 and FP8 are stored."""
    folder = make_image_model(tmp_path / "model", "mistral3")
    tensors = load_file(folder / "model.safetensors")
    for stored in [own for own in tensors if "vision_tower" in own and own.endswith("_proj.weight")]:
        tensors[f"{stored.removesuffix('weight')}{name}"] = tensors.pop(stored).to(dtype)
    save_file(tensors, folder / "model.safetensors")
    said = refused(folder, tmp_path, "input.columns={images:images}")
    assert re.search(rf"the vision encoder is quantised, \S*vision_tower\.\S+{name} \((I32|U8|F8_E4M3)\) and 20 more", said), said


@pytest.mark.second
@pytest.mark.parametrize("how", ["gptq", "model.quantize=fp8", "cache.dtype=fp8"])
def test_jobs_with_quantised_weights_or_keys_have_the_tokens_that_drafts_and_few_pages_do_not_change(
    how: str, tmp_path: Path
) -> None:
    model = make_image_model(tmp_path / "plain", "qwen3_vl", seed=3)
    if how in FOUR_BITS:
        model = quantised(model, tmp_path / how, FOUR_BITS[how].config, FOUR_BITS[how].packer)
    rows: Rows = [{"messages": user("<image>What is this?"), "images": own} for own in (A, B, C, A)]
    keys = ["input.columns={images:images}", *([] if how in FOUR_BITS else [how])]
    found = done(model, tmp_path, rows, *keys, "draft=none", "packing.max_num_seqs=1")
    again = done(model, tmp_path, rows, *keys, "draft=lookup", "packing.pages=12", "output.overwrite=true")
    assert [row["error"] for row in (*found, *again)] == [None] * 8
    assert [row["token_ids"] for row in again] == [row["token_ids"] for row in found]
    plain = done(tmp_path / "plain", tmp_path, rows, keys[0], "output.overwrite=true")
    same = [row["token_ids"] for row in plain] == [row["token_ids"] for row in found]
    assert same == (how in FOUR_BITS)  # this folder has their dequantised weights


def test_passes_that_do_not_hold_an_image_that_is_not_cut_are_refused(tmp_path: Path) -> None:
    folders = {kind: make_image_model(tmp_path / kind, kind, max_len=2048) for kind in ("gemma4", "gemma4_small")}
    keys = ("packing.max_num_batched_tokens=69", "input.columns={images:images}")
    said = refused(folders["gemma4"], tmp_path, *keys)
    assert said.startswith("packing.max_num_batched_tokens=69 is below 70, the tokens of an image")
    said = refused(folders["gemma4"], tmp_path, "input.max_pixels=161280", *keys)
    assert said.startswith("input.max_pixels=161280 is 1120 tokens, and the model's tables of positions hold 70")
    assert "max_pixels=161281 must be one of 10080" in refused(folders["gemma4"], tmp_path, "input.max_pixels=161281", *keys)
    assert open_job(compose(words(folders["gemma4_small"], tmp_path, *keys))).spec.least_pass == 1


@pytest.mark.parametrize("name", ["eagle3", "hybrid"])
def test_a_head_narrower_than_its_model_is_refused(name: str, vl: Path, tmp_path: Path) -> None:
    design = tiny_design(load_spec(vl), hidden=32, own_embedding=True)
    write_head(tmp_path / "head", design, random_tensors(design))
    keys = [f"draft={name}", f"draft.path={tmp_path}/head"]
    said = refused(vl, tmp_path, *keys, "input.columns={images:images}")
    assert "a head of hidden_size 32 reads no embeddings of images, which have the model's 64 numbers" in said
    pq.write_table(pa.Table.from_pylist([{"prompt_ids": [3, 4]}]), tmp_path / "in.parquet")
    assert open_job(compose(words(vl, tmp_path, *keys))).config.draft.name == name


@pytest.mark.second
def test_images_are_files_below_a_folder_and_a_missing_one_may_come_later(vl: Path, tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    (root / "deep").mkdir(parents=True)
    (root / "deep/a.png").write_bytes(A)
    (root / "out.png").symlink_to(tmp_path / "in.parquet")
    (root / "folder.png").mkdir()
    (root / "loop.png").symlink_to(root / "loop.png")
    names = ["deep/a.png", str(root / "deep/a.png"), "b.png", "../in.parquet", "out.png", "folder.png", "loop.png"]
    names.append("https://x.org/a.png")
    rows = [{"messages": user("<image>Go"), "images": {"bytes": None, "path": name}} for name in names]
    keys = ["input.columns={images:images}", f"input.image_root={root}", "decode.max_new_tokens=12"]
    found = done(vl, tmp_path, rows, *keys)
    codes = [(row["error"]["code"], row["error"]["retryable"]) if row["error"] else None for row in found]
    assert codes == [None, None, *(("missing_image", may_come) for may_come in (True, False, False, True, True, False))]
    assert found[0]["token_ids"] == found[1]["token_ids"]
    assert found[0]["image_digest"] == found[1]["image_digest"]
    (root / "b.png").write_bytes(A)
    assert run.main(words(vl, tmp_path, *keys, "resume=error")) == 0
    again = {row["row_index"]: row for path in (tmp_path / "out/data").glob("*") for row in pl.read_parquet(path).to_dicts()}
    assert again[2]["token_ids"] == found[0]["token_ids"]


@pytest.mark.second
def test_limits_on_pixels_of_the_job_and_of_a_row_change_tokens_as_the_processor_of_transformers_does(
    vl: Path, tmp_path: Path
) -> None:
    rows = [{"messages": user("<image>"), "images": C, "most": most} for most in (None, 512, 128, 10, 2048)]
    keys = ["input.columns={images:images,max_pixels:most}", "input.max_pixels=1024", "decode.max_new_tokens=9"]
    found = done(vl, tmp_path, rows, *keys)
    assert code_of(found[3])[0] == "bad_parameter"
    assert "max_pixels=10 must be at least 64" in code_of(found[3])[1]
    assert code_of(found[4])[0] == "bad_parameter"
    assert "max_pixels=2048 exceeds the job's limit of 1024" in code_of(found[4])[1]
    reference = theirs(vl)
    for row, most in zip(found, (1024, 512, 128), strict=False):
        copy = tmp_path / f"model{most}"
        shutil.copytree(vl, copy)
        values = json.loads((copy / "preprocessor_config.json").read_text())
        values["size"]["longest_edge"] = most
        (copy / "preprocessor_config.json").write_text(json.dumps(values))
        assert row["prompt_ids"].count(PAD) <= most // 64
        assert row["token_ids"] == generated(reference, copy, row["prompt_ids"], [C], 9)
    prints = [
        job_fingerprint(open_job(compose(words(vl, tmp_path, "input.columns={images:images}", *more))))["model.vision"]
        for more in ([], ["input.max_pixels=640"], ["input.min_pixels=100"], ["input.max_pixels=4096"])
    ]
    assert [one == prints[0] for one in prints] == [True, False, False, True]


def test_an_image_processor_in_processor_config_has_precedence(vl: Path, tmp_path: Path) -> None:
    model = shutil.copytree(vl, tmp_path / "model")
    nested = PREPROCESSOR | {"size": {"shortest_edge": 64, "longest_edge": 512}}
    (model / "processor_config.json").write_text(json.dumps({"image_processor": nested, "processor_class": "Qwen3VLProcessor"}))
    assert load_vision(model).processor.max_pixels == 512
    assert Qwen2VLImageProcessorPil.from_pretrained(model).size["longest_edge"] == 512
    (model / "preprocessor_config.json").unlink()
    assert load_vision(model).processor.max_pixels == 512
    (model / "processor_config.json").write_text(json.dumps({"image_processor": nested | {"do_pad": True}}))
    with pytest.raises(CheckpointError, match=r"processor_config.json: image_processor: do_pad=true"):
        load_vision(model)
    (model / "processor_config.json").write_text(json.dumps({"image_processor": 3}))
    with pytest.raises(CheckpointError, match="image_processor is not an object"):
        load_vision(model)
    (model / "processor_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no preprocessor_config\.json"):
        load_vision(model)


@pytest.mark.second
@pytest.mark.parametrize(
    ("n", "later", "refused"),
    [(1, None, "missing_image"), (3, None, "missing_image"), (1, b"none", "bad_image"), (3, png(20_000, 9000), "large_image")],
)
def test_a_finished_answer_stays_if_the_file_of_its_image_is_refused_later(
    n: int, later: bytes | None, refused: str, vl: Path, tmp_path: Path
) -> None:
    """Of rows that were not finished each sample is the error."""
    (tmp_path / "a.png").write_bytes(A)
    caps = (3, 3, 3, 80, 3, 80)
    rows = [{"id": f"q{i}", "messages": user(f"<image>{i}"), "images": "a.png", "most": most} for i, most in enumerate(caps)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    cut = words(
        vl, tmp_path, "input.columns={images:images, max_new_tokens:most}", f"input.image_root={tmp_path}", f"decode.n={n}",
        "output.shard_rows=2", f"packing.max_num_seqs={6 * n}", f"decode.temperature={0 if n == 1 else 1}",
    )
    code, said = run_apart(cut, tmp_path / "log", partial(signalled_after_commits, 1, signal.SIGTERM))
    assert code != 0, said
    (tmp_path / "a.png").unlink()
    if later is not None:
        (tmp_path / "a.png").write_bytes(later)
    assert run.main(cut) == 0
    found = [(row["row_index"], code_of(row)[0] or len(row["token_ids"])) for row in written(tmp_path)]
    expected = [[(i, 3)] * n if most == 3 else [(i, refused)] for i, most in enumerate(caps)]
    assert found == [row for rows_of_one in expected for row in rows_of_one]


@pytest.mark.second
@pytest.mark.parametrize(("how", "tokens"), [("resume", "true"), ("resume=length", "true"), ("resume=length", "false")])
def test_tokens_that_were_saved_for_another_image_end_the_run(
    how: str, tokens: str, vl: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The file behind a path has changed since: the rows that are continued, or the samples of a row, would answer about two
    images."""
    (tmp_path / "a.png").write_bytes(A)
    rows = [{"id": f"q{i}", "messages": user(f"<image>{i}"), "images": "a.png"} for i in range(9)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    keys = ["input.columns={images:images}", f"input.image_root={tmp_path}", "output.shard_rows=3", "packing.max_num_seqs=4"]
    keys.append(f"output.token_ids={tokens}")
    cut = words(vl, tmp_path, *keys, "decode.max_new_tokens=12")
    if how == "resume":
        code, said = run_apart(cut, tmp_path / "log", partial(signalled_after_commits, 1, signal.SIGTERM))
        assert code != 0, said
    else:
        assert run.main(cut) == 0
    (tmp_path / "a.png").write_bytes(B)
    capfd.readouterr()
    assert run.main(cut if how == "resume" else words(vl, tmp_path, *keys, "decode.max_new_tokens=20", how)) == 2
    assert "has other images now than when its tokens were saved" in capfd.readouterr().err


def test_prompts_that_are_no_chats_and_models_without_a_vision_encoder_are_refused(vl: Path, tmp_path: Path) -> None:
    plain = {"prompt": "a", "images": A}
    assert "images are read in chats" in refused(vl, tmp_path, "input.columns={images:images}", row=plain)
    assert "images are read in chats" in refused(vl, tmp_path, "model.vision=true", row={"prompt_ids": [1, 2]})
    assert "no such folder" in refused(vl, tmp_path, "input.columns={images:images}", f"input.image_root={tmp_path}/none")
    assert "input.max_pixels=9 has no effect without" in refused(vl, tmp_path, "input.max_pixels=9", row={"prompt": "a"})
    columns = "input.columns={max_pixels:most}"
    assert "max_pixels=most has no effect" in refused(vl, tmp_path, columns, row={"prompt": "a", "most": 9})
    said = refused(vl, tmp_path, "input.columns={images:images}", "input.max_pixels=9")
    assert "input.max_pixels=9 must be at least 64" in said
    assert "has no effect without" in refused(vl, tmp_path, f"input.image_root={tmp_path}", row={"prompt": "a"})
    llama = add_marks(make_checkpoint(tmp_path / "llama", "llama"))
    assert "no vision encoder" in refused(llama, tmp_path, "input.columns={images:images}")
    said = refused(vl, tmp_path, "input.columns={images:images}", row={**ROW, "images": 3})
    assert "allowed: bytes, struct<bytes, path>" in said


def refusal_of(job: Job) -> str:
    """What the error of the only row of the job says."""
    (refused,) = job.admission.admit(next(job.source.shards(job.layout, set())))
    assert isinstance(refused, Completion)
    assert refused.error is not None
    assert refused.error.code == "no_vision"
    return refused.error.message


def test_without_a_vision_encoder_rows_are_what_they_were(vl: Path, tmp_path: Path) -> None:
    """A column `images` that is not named is copied, and a part that is an image is an error of its row: no_vision."""
    pq.write_table(pa.Table.from_pylist([ROW]), tmp_path / "in.parquet")
    job = open_job(compose(words(vl, tmp_path)))
    assert job.spec.vision is None
    assert not job.columns.has_images
    assert "model.vision" not in job_fingerprint(job)
    assert "images" in job.admission.schema_of(job.source.schema, job.columns, job.config.output).names
    own = open_job(compose(words(vl, tmp_path, "input.columns={images:images}")))
    assert "model.vision" in job_fingerprint(own)
    parts = [{"type": "image_url", "image_url": {"url": url(A)}}, {"type": "text", "text": "Go"}]
    pq.write_table(pa.Table.from_pylist([{"messages": json.dumps(user(parts))}]), tmp_path / "in.parquet")
    job = open_job(compose(words(vl, tmp_path)))
    assert "'image_url', and the model's vision encoder is not loaded; set model.vision=true" in refusal_of(job)
    pq.write_table(pa.Table.from_pylist([{"messages": json.dumps(user([{"type": "image"}]))}]), tmp_path / "in.parquet")
    said = refusal_of(open_job(compose(words(vl, tmp_path))))
    assert "not loaded; name the column of its images, input.columns.images=COLUMN, or drop the row" in said


@pytest.mark.second
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_job_goes_on_and_continues_cut_answers_and_verify_finds_no_difference(
    number: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In float64. The rows that were in slots when the run was told to stop go on from their tokens, with their images."""
    model = make_image_model(tmp_path / "model", "qwen3_5", seed=3, dtype=torch.float64)
    rows = [{"id": f"q{i}", "messages": user(f"<image>{i} and <image>"), "images": [A, (B, C)[i % 2]]} for i in range(12)]
    (tmp_path / "plain").mkdir()
    keys = ["input.columns={images:images}", "model.dtype=float64", "output.shard_rows=1", "draft=lookup"]
    keys.append("decode.max_new_tokens=24")
    plain = done(model, tmp_path / "plain", rows, *keys)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    short = words(model, tmp_path, *keys, "packing.max_num_seqs=4", "decode.max_new_tokens=12")
    code, said = run_apart(short, tmp_path / "log", partial(signalled_after_commits, 1, number))
    assert code != 0, said
    assert run.main(short) == 0
    assert [row["token_ids"] for row in written(tmp_path)] == [row["token_ids"][:12] for row in plain]
    assert run.main(words(model, tmp_path, *keys, "resume=length")) == 0
    capfd.readouterr()
    assert cli.main(["verify", f"{tmp_path}/out"]) == 0
    assert re.search(r"12 completions decoded again .* 0 differ", capfd.readouterr().out)
    again = pl.concat([pl.read_parquet(path) for path in (tmp_path / "out").rglob("*.parquet")], how="diagonal_relaxed")
    assert {tuple(row) for row in again["token_ids"]} >= {tuple(row["token_ids"]) for row in plain}


@pytest.mark.second
def test_verify_says_how_far_a_false_token_of_a_row_with_images_is_from_the_right_one(
    vl: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": "q0", "messages": user("<image>Go"), "images": A}]
    (row,) = done(vl, tmp_path, rows, "input.columns={images:images}", "output.logprobs=2", "decode.max_new_tokens=6")
    best, second = row["top_logprobs"][3]

    def second_likeliest(ids: list[Any]) -> None:
        assert ids[0][3] == best["id"]
        ids[0][3] = second["id"]

    rewrite(tmp_path / "out", "token_ids", second_likeliest)
    capfd.readouterr()
    assert cli.main(["verify", "--kv", f"{tmp_path}/out"]) == 2
    assert "verify --kv is not supported for jobs that read images" in capfd.readouterr().err
    assert cli.main(["verify", f"{tmp_path}/out", "--rows", "0"]) == 1
    found = re.search(r"score gap there ([0-9.e-]+) \(median\)", said := capfd.readouterr().out)
    assert found, said
    assert float(found[1]) == pytest.approx(best["logprob"] - second["logprob"], rel=0.02)


@pytest.mark.second
def test_verify_compares_no_answer_to_an_image_that_has_changed_or_is_gone(
    vl: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, data in (("a.png", A), ("b.png", B)):
        (tmp_path / name).write_bytes(data)
    rows: Rows = [{"messages": user("<image>Go"), "images": name} for name in ("a.png", "b.png", "a.png")]
    done(vl, tmp_path, rows, "input.columns={images:images}", f"input.image_root={tmp_path}", "decode.max_new_tokens=6")
    for change in (lambda: (tmp_path / "b.png").write_bytes(C), (tmp_path / "b.png").unlink):
        change()
        capfd.readouterr()
        assert cli.main(["verify", f"{tmp_path}/out", "--rows", "0"]) == 0
        said = capfd.readouterr().out
        assert "2 completions decoded again one at a time and without speculation: 0 differ" in said
        assert "1 more were not: the job refuses their rows now" in said
    (tmp_path / "a.png").write_bytes(C)
    assert cli.main(["verify", f"{tmp_path}/out"]) == 2
    assert "no completion that can be decoded again: its rows are error rows, or images of them changed" in capfd.readouterr().err


@pytest.mark.second
def test_adapters_of_the_language_model_work_beside_images_and_those_of_the_encoder_are_refused(vl: Path, tmp_path: Path) -> None:
    """Merged, as in the weights of transformers' model, and for the rows that name it."""
    own = make_adapter(tmp_path / "own", vl, ["q_proj", "down_proj"])
    reference, delta = theirs(vl), products(own, dict.fromkeys(("q_proj", "down_proj"), 2.0))
    with torch.no_grad():
        for name, change in delta.items():
            weight = reference.get_submodule(name).weight
            weight += change.float()
    rows = [{"messages": user("<image>Go"), "images": one, "adapter": "a" if one is A else None} for one in (A, B)]
    keys = ["input.columns={images:images,adapter:null}", "decode.max_new_tokens=16"]
    merged = done(vl, tmp_path, rows, *keys, f"model.adapter={own}")
    base = done(vl, tmp_path, rows, *keys, "output.overwrite=true")
    of_rows = ["input.columns={images:images}", keys[1], f"model.adapters={{a: {own}}}", "output.overwrite=true"]
    named = done(vl, tmp_path, rows, *of_rows)
    for row, image in zip(merged, (A, B), strict=True):
        assert row["token_ids"] == generated(reference, vl, row["prompt_ids"], [image], 16)
    assert [row["token_ids"] for row in named] == [merged[0]["token_ids"], base[1]["token_ids"]]
    assert merged[0]["token_ids"] != base[0]["token_ids"]
    of_vision = make_adapter(tmp_path / "vision", vl, ["q_proj", "linear_fc1"])
    said = refused(vl, tmp_path, "input.columns={images:images}", f"model.adapter={of_vision}")
    assert "adapters of what encodes images are not supported: merge" in said
    assert open_job(compose(words(vl, tmp_path, f"model.adapter={of_vision}"))).spec.vision is None


@pytest.mark.parametrize(("more", "kept"), [((), False), (("output.passthrough=[images]",), True)])
def test_a_shard_keeps_no_images_after_admission_unless_the_output_copies_them(
    more: tuple[str, ...], kept: bool, vl: Path, tmp_path: Path
) -> None:
    rows: Rows = [{"messages": user("<image>Go"), "images": A}, {"messages": user("Go"), "images": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    job = open_job(compose(words(vl, tmp_path, "input.columns={images:images}", *more)))
    work = ShardWork.of(job)
    (admitted,) = work.admitted(job.source.shards(job.layout))
    first, second = admitted.entries
    assert isinstance(first, Request)
    assert isinstance(second, Completion) or not second.images
    assert [piece.source for piece in first.images] == [A]
    assert admitted.shard.table["images"].to_pylist() == ([A, None] if kept else [None, None])
    failed = [
        Completion(request_id="a", row_index=i, sample_index=0, shard=0, status="error", finish_reason="error", error=NO_ANSWER)
        for i in range(2)
    ]
    found = work.table(admitted.shard, failed)
    assert found["messages"].to_pylist() == [[{"role": "user", "content": text}] for text in ("<image>Go", "Go")]
    assert ("images" in found.column_names) == kept
    if kept:
        assert found["images"].to_pylist() == [A, None]


@pytest.mark.second
@pytest.mark.parametrize("workers", [0, 1])
def test_images_may_be_objects_of_a_store(workers: int, vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in this process, and in one that reads rows."""
    with running_lab() as lab:
        for name, value in lab.environ().items():
            monkeypatch.setenv(name, value)
        lab.put("pictures/deep/a.png", A)
        lab.put("secret.png", A)
        root = f"s3://{BUCKET}/pictures"
        names = ["deep/a.png", f"{root}/deep/a.png", "deep/../deep/a.png", "b.png", "../secret.png", "https://x.org/a.png", A]
        rows = [{"messages": json.dumps(user([{"type": "image", "image": url(A) if name is A else name}]))} for name in names]
        keys = ("model.vision=true", f"input.image_root={root}", "decode.max_new_tokens=6", f"input.num_workers={workers}")
        found = done(vl, tmp_path, rows, *keys)
        said = refused(vl, tmp_path, "input.columns={images:images}", f"input.image_root=s3://{BUCKET}/nothing")
    codes = [(row["error"]["code"], row["error"]["retryable"]) if row["error"] else None for row in found]
    missing = [("missing_image", may_come) for may_come in (True, False, False)]
    assert codes == [None, None, None, *missing, None]
    assert "'../secret.png', which is outside of input.image_root" in found[4]["error"]["message"]
    assert len({tuple(row["token_ids"]) for row in found if row["token_ids"]}) == 1
    assert len({row["image_digest"] for row in found if not row["error"]}) == 1
    assert f"input.image_root=s3://{BUCKET}/nothing: no such folder in the store" in said


@pytest.mark.second
def test_batch_requests_of_openai_may_hold_images(vl: Path, tmp_path: Path) -> None:
    chat = user([{"type": "image_url", "image_url": {"url": url(A)}}, {"type": "text", "text": "What is this?"}])
    (expected,) = done(vl, tmp_path, [{"messages": json.dumps(chat)}], "model.vision=true", "decode.max_new_tokens=12")
    small = user([{"type": "image_url", "image_url": {"url": url(A), "detail": "low"}}])
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": {"messages": messages, "max_tokens": 12}}
        for name, messages in (("a", chat), ("b", small), ("c", user("none")))
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for more, code in ((["model.vision=true"], ""), ([], "no_vision"), (["model.vision=true", "input.drop=[detail]"], "")):
        keys = [*words(vl, tmp_path, *more, "output.overwrite=true"), f"input.path={tmp_path}/in.jsonl"]
        assert run.main([word for word in keys if not word.endswith("/in.parquet")]) == 0
        found = written(tmp_path)
        dropped = "input.drop=[detail]" in more
        assert [code_of(row)[0] for row in found] == [code, "" if dropped else "bad_request", ""]
        assert ("detail='low', which would have no effect" in code_of(found[1])[1]) != dropped
        assert (found[1].get("image_digest") == expected["image_digest"]) == dropped
        assert found[0]["token_ids"] == (None if code else expected["token_ids"])
        assert found[0].get("image_digest") == (None if code else expected["image_digest"])


def test_plan_counts_images_and_their_tokens(
    vl: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_images, "num_cpus", lambda: 40)
    rows = [{"messages": user("<image> and <image>"), "images": [A, C]}, {"messages": user("none"), "images": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    keys = [word for word in words(vl, tmp_path, "input.columns={images:images}") if not word.startswith("output.dir")]
    assert cli.main(["plan", *keys]) == 0
    said = capfd.readouterr().out
    assert re.search(r"\nimages       2, 39 tokens on average, \d+% of all prompt tokens\n", said)
    assert re.search(r"\nencoder      .*; meanwhile 30 processes decode and resize images, ", said)
    assert cli.main(["plan", *keys, "cluster.workers=4"]) == 0
    assert re.search(r"\nencoder      .*; meanwhile 8 processes decode and resize images, ", capfd.readouterr().out)
    assert cli.main(["plan", "--json", *keys, "decode=sampled", "decode.n=2"]) == 0
    facts = json.loads(capfd.readouterr().out)
    assert (facts["images"], facts["image_tokens"]) == (4, 156)
    assert facts["image_worker_s"] == pytest.approx(PREPARE_S * (30 * 50 + 50 * 70))
    seconds = facts["prefill_s"] + facts["decode_s"] + facts["encoder_s"]
    assert facts["encoder_s"] > 0
    assert facts["tok_s"] * seconds == pytest.approx(facts["expected_tokens"])


@pytest.mark.second
def test_plan_of_two_ranks_counts_the_whole_encoder_on_each_and_half_of_its_time(
    vl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With small passes of the encoder: ranks then exchange more than a pass takes."""
    monkeypatch.setattr(vision_spec, "PASS_BYTES", 1 << 20)
    pq.write_table(pa.Table.from_pylist([{"messages": user("<image>Go"), "images": A}]), tmp_path / "in.parquet")
    keys = [word for word in words(vl, tmp_path, "input.columns={images:images}") if not word.startswith("output.dir")]
    one, two = (plan(compose([*keys, f"cluster.tensor_parallel={ranks}"])) for ranks in (1, 2))
    assert one.rates is not None
    assert two.rates is not None
    flop = [found.images.encoder_s * found.rates.full_flop_s for found in (one, two) if found.rates is not None]
    assert flop[1] == pytest.approx(flop[0] / 2)
    assert one.images.worker_s == two.images.worker_s
    spec, whole = two.job.spec, one.job.spec
    assert spec.vision is not None
    assert spec.vision == whole.vision
    without = (replace(spec, vision=None), replace(whole, vision=None))
    of_vision = [
        both.weight_bytes(torch.float32) - own.weight_bytes(torch.float32)
        for both, own in zip((spec, whole), without, strict=True)
    ]
    assert of_vision == [spec.vision.weight_bytes(torch.float32)] * 2
    exchanged = spec.vision.row_bytes(torch.float32) * (2 * GPU_PREFILL + 3 * EXCHANGED)
    assert image_bytes(two.job) - image_bytes(one.job) == exchanged - spec.vision.activation_bytes(torch.float32) > 0
    assert re.search(r"\nmemory       .* \+ [0-9.]+ [GM]B images \+ ", two.text())


@pytest.mark.second
def test_jobs_over_answers_to_images_and_training_on_them_are_refused_without_the_images(vl: Path, tmp_path: Path) -> None:
    rows: Rows = [{"messages": user("<image>Go"), "images": A, "level": 0}, {"messages": user("Go"), "images": None, "level": 1}]
    done(vl, tmp_path, rows, "input.columns={images:images}", "decode.max_new_tokens=4")
    source = open_source(InputConfig(path=str(tmp_path / "out/data")))
    with pytest.raises(InputError, match=r"1 rows had images .column image_digest., which train does not read"):
        read_rows(source, vocab_size=320, max_len=64)
    keys = [f"model.path={vl}", "model.dtype=float32", f"input.from_job={tmp_path}/out", "input.prompt='Why {{ level }}?'"]
    keys.append("decode.max_new_tokens=4")
    with pytest.raises(ConfigError, match="1 of its rows had images, which its chats do not hold; give them in a column"):
        open_job(compose([*keys, f"output.dir={tmp_path}/next"]))
    for more in ("input.columns={messages:null}", "input.from_where=level=1"):
        assert open_job(compose([*keys, f"output.dir={tmp_path}/next", more])).source.num_rows in (1, 2)
    table = pl.read_parquet(tmp_path / "out/data").with_columns(pic=pl.Series([A, None]))
    earlier = batchspec.JobOutput(table, name="old")
    found = batchspec.generate(earlier, overrides=[*keys[:2], *keys[3:], "input.columns={images:pic}"]).to_dicts()
    assert [bool(row["image_digest"]) for row in found] == [True, False]


@pytest.mark.second
def test_rows_in_memory_and_calls_of_a_warm_engine_may_have_images(vl: Path) -> None:
    keys = [f"model.path={vl}", "model.dtype=float32", "decode.max_new_tokens=8", "decode.ignore_eos=true"]
    keys += ["output.token_ids=true", "input.columns={images:images}"]
    rows = [{"messages": user("<image>Go"), "images": one} for one in (A, B, A)]
    plain = [{"messages": user("Go")}]
    tables = [batchspec.generate(data, overrides=keys).to_dicts() for data in (rows, pl.DataFrame(rows))]
    tokens = [[row["token_ids"] for row in table] for table in tables]
    assert tokens[0] == tokens[1]
    assert tokens[0][0] == tokens[0][2]
    assert tokens[0][0] != tokens[0][1]
    alone = batchspec.generate(plain, overrides=keys[:-1])["token_ids"].to_list()
    with batchspec.Engine(overrides=keys) as engine:
        for _ in range(2):
            found = engine.generate(rows)
            assert found["token_ids"].to_list() == tokens[0]
            assert engine.generate([{**plain[0], "images": None}])["token_ids"].to_list() == alone
        opened = [Image.open(io.BytesIO(one)) for one in (A, B, A)]
        columns = {"messages": [one["messages"] for one in rows], "images": opened}
        a, b, _ = opened
        own = [{"bytes": one, "path": None} for one in (A, B)]
        cells: list[list[Any]] = [
            [[one] for one in opened], [a, url(B), [a]], [own[0], own[1], [own[0]]], [[a], [B], [A]], [own[0], b, a],
            [A, [B], A], [url(A), B, a],
        ]
        of_rows = [[{"messages": row["messages"], "images": one} for row, one in zip(rows, own, strict=True)] for own in cells]
        for data in (columns, *of_rows):
            assert engine.generate(data)["token_ids"].to_list() == tokens[0]
        assert found.schema == engine.generate(pl.DataFrame(rows).clear()).schema
        streamed = {one.row_index: one.token_ids.tolist() for one in engine.stream(rows) if one.token_ids is not None}
        assert [streamed[place] for place in range(3)] == tokens[0]
        with pytest.raises(ConfigError, match="conversations are not supported with images"):
            engine.converse(rows, lambda turn: None)
        with pytest.raises(ConfigError, match="load_weights replaces the language model alone"):
            engine.load_weights(vl)
    with pytest.raises(ConfigError, match=r"input\.max_pixels=640 has no effect without"):
        batchspec.Engine(overrides=[*keys[:-1], "input.max_pixels=640"])
    with batchspec.Engine(overrides=keys[:-1]) as engine:
        assert "image_digest" not in engine.generate(plain).columns


@pytest.mark.second
def test_chats_with_data_urls_need_model_vision_in_a_warm_engine(vl: Path) -> None:
    keys = [f"model.path={vl}", "model.dtype=float32", "decode.max_new_tokens=8"]
    rows = [{"messages": json.dumps(user([{"type": "image_url", "image_url": {"url": url(A)}}]))}]
    for more, code in (([], "no_vision"), (["model.vision=true"], None)):
        with batchspec.Engine(overrides=[*keys, *more]) as engine:
            (row,) = engine.generate(rows).to_dicts()
            parts = [{"type": "image", "image": Image.open(io.BytesIO(A))}]
            (of_pillow,) = engine.generate([{"messages": user(parts)}]).to_dicts()
        assert (row["error"] and row["error"]["code"]) == code
        assert of_pillow["token_ids"] == row["token_ids"]
