"""Labels of images: the probabilities of choices are those of transformers, however rows share slots, passes and images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import batchspec
from batchspec import cli, run
from tests.helpers.image_models import PAD, inputs_of, make_image_model, picture, theirs

pytestmark = pytest.mark.second

A, B, C = picture(30, 50, 1), picture(60, 20, 2), picture(50, 70, 3)
LABELS = ["cat", "a dog", "cats"]
COLUMN = "input.columns={images:images}"


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_vl", "qwen2_5_vl", "mistral3", "gemma4", "glm_ocr"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("models") / request.param, request.param, seed=3)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


ROWS: list[dict[str, Any]] = [
    {"messages": user("<image>What is it?"), "images": [A]}, {"messages": user("<image>and<image>"), "images": [B, C]},
    {"messages": user("no picture"), "images": []}, {"messages": user("It is <image>"), "images": [C]},
    {"messages": user("<image>What is it?"), "images": [B]}, {"messages": user("<image>What is it?"), "images": [None]},
]


def scored(model: Path, folder: Path, *more: str) -> pl.DataFrame:
    types = pa.schema([("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))])
    table = pa.Table.from_pylist(ROWS, types.append(pa.field("images", pa.list_(pa.binary()))))
    pq.write_table(table, folder / "in.parquet")
    keys = [
        f"model.path={model}", f"input.path={folder}/in.parquet", f"output.dir={folder}/out", "model.dtype=float32", COLUMN,
        "decode.score=choices", f"decode.choice={LABELS}", "output.overwrite=true", *more,
    ]
    assert run.main(keys) == 0
    return pl.read_parquet(folder / "out/data").sort("row_index")


def logprobs_of(network: Any, model: Path, ids: list[int], images: list[bytes], labels: list[list[int]]) -> list[float]:
    found = list[float]()
    for label in labels:
        logits = network(**inputs_of(model, [*ids, *label], images)).logits[0].log_softmax(-1)
        found.append(sum(float(logits[len(ids) + place - 1, token]) for place, token in enumerate(label)))
    return found


@torch.no_grad()
def test_probabilities_of_labels_are_those_of_transformers(model: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    found, tokenizer, network = scored(model, tmp_path), Tokenizer.from_file(str(model / "tokenizer.json")), theirs(model)
    labels = [tokenizer.encode(label, add_special_tokens=False).ids for label in LABELS]
    assert labels[2][: len(labels[0])] == labels[0]  # so that `cat` counts without `cats`
    for row, given in zip(found.head(5).to_dicts(), ROWS, strict=False):
        ids = [int(one) for one in row["prompt_ids"]]
        values = logprobs_of(network, model, ids, given["images"], labels)
        values[0] += float(np.log1p(-np.exp(values[2] - values[0])))
        assert [one["logprob"] for one in row["choice_probs"]] == pytest.approx(values, abs=1e-4), row["row_index"]
        shares = np.exp(values) / np.exp(values).sum()
        assert [one["prob"] for one in row["choice_probs"]] == pytest.approx(shares.tolist(), abs=1e-4)
        assert row["completion"] == LABELS[int(np.argmax(values))]
        assert row["usage"]["image_tokens"] == sum(one == PAD for one in ids) or model.name == "mistral3"
    assert found["status"].to_list() == ["ok"] * 5 + ["error"]
    assert found["error"].struct.field("code")[5] == "missing_image"
    assert len({probs["prob"] for row in (0, 4) for probs in found["choice_probs"][row].to_list()[:1]}) == 2  # pictures matter


def test_rows_that_share_passes_or_come_one_by_one_have_the_same_probabilities(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = scored(model, tmp_path)["choice_probs"].to_list()
    tokens = 70 if model.name == "gemma4" else 16  # images are cut into passes, but those of Gemma 4, whose tokens see each other
    few: tuple[str, ...] = ("packing.max_num_seqs=1", f"packing.max_num_batched_tokens={tokens}")
    for more in (few, ("packing.max_num_seqs=2", "output.shard_rows=1"), ("input.num_workers=2",)):
        other = scored(model, tmp_path, *more)["choice_probs"].to_list()
        for one, two in zip(plain[:5], other[:5], strict=True):
            assert [own["logprob"] for own in one] == pytest.approx([own["logprob"] for own in two], abs=1e-4)
    keys = [f"model.path={model}", f"input.path={tmp_path}/in.parquet", COLUMN, "model.dtype=float32"]
    labels = ["decode.score=choices", f"decode.choice={LABELS}"]
    capfd.readouterr()
    assert cli.main(["plan", *keys, *labels, f"output.dir={tmp_path}/new"]) == 0
    assert "images       5" in capfd.readouterr().out
    assert cli.main(["stats", f"{tmp_path}/out"]) == 0
    with batchspec.Engine(overrides=[*keys[:1], *keys[2:], *labels]) as engine:
        called = engine.generate([{**row, "images": row["images"] or None} for row in ROWS[:2]])["choice_probs"].to_list()
    assert [own["logprob"] for own in called[1]] == pytest.approx([own["logprob"] for own in plain[1]], abs=1e-4)


def test_a_picture_that_cannot_be_decoded_is_an_error_row_and_labels_stop_no_other(model: Path, tmp_path: Path) -> None:
    cut = picture(40, 40, 5)[:-60]
    rows = [{"messages": user("<image>"), "images": [one]} for one in (A, cut, B)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    keys = [f"model.path={model}", f"input.path={tmp_path}/in.parquet", f"output.dir={tmp_path}/out", "model.dtype=float32"]
    assert run.main([*keys, COLUMN, "decode.score=choices", "decode.choice=[x,y]"]) == 0
    found = pl.read_parquet(tmp_path / "out/data").sort("row_index")
    assert found["status"].to_list() == ["ok", "error", "ok"]
    assert found["error"].struct.field("code")[1] == "bad_image"
    assert found["choice_probs"].is_null().to_list() == [False, True, False]
