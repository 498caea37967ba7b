"""`batchspec doctor`: what it says of a machine, and which products it tunes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchspec import cli
from batchspec.commands import doctor
from batchspec.draft.block_head import dummy_block_spec
from batchspec.draft.block_tensors import products as block_products
from batchspec.draft.head import products as head_products
from batchspec.draft.weights import dummy_spec
from batchspec.kernels.common import card
from batchspec.kernels.gemm.tiles import Tile
from batchspec.model.families.shapes import shape_spec
from batchspec.model.products import products
from batchspec.tuning import table as tuning
from batchspec.tuning.table import Product, save
from tests.helpers.block_heads import BlockDesign, random_block, write_block
from tests.helpers.image_models import make_image_model

GPU = "NVIDIA Imaginary 100"
TILE = Tile(64, 128, 64, 4, 4, True)


def entry(product: Product, tokens: int = 64) -> dict[str, Any]:
    op, rows, k = product
    return {"op": op, "rows": rows, "k": k, "tokens": tokens, "us": 1.0, "library_us": 2.0, "tile": TILE._asdict()}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with an unknown GPU, FlashInfer and an empty cache folder."""
    monkeypatch.setattr(card, "_read", card._read.__wrapped__)  # which would keep what a test says of a device
    properties = SimpleNamespace(
        name=GPU, major=9, minor=0, multi_processor_count=132, shared_memory_per_multiprocessor=228 << 10,
        L2_cache_size=50 << 20, total_memory=150_000_000_000,
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in (
        ("is_available", True), ("current_device", 0), ("get_device_name", GPU), ("get_device_properties", properties),
        ("mem_get_info", (148_000_000_000, 150_000_000_000)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(doctor, "flashinfer", lambda: object())
    tuning.forget_tables()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> list[Product]:
    """What `tune` was asked for; it finds one tile for everything."""
    asked: list[Product] = []

    def tune(shapes: Sequence[Product], device: torch.device) -> list[dict[str, Any]]:
        assert device.index == 0
        asked.extend(shapes)
        return [entry(product) for product in shapes]

    monkeypatch.setattr(doctor, "tune", tune)
    return asked


TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}


def usual(shape: str, draft_vocab: int) -> list[Product]:
    """The products of a shape and of typical heads."""
    spec = shape_spec(shape)
    heads = [*head_products(dummy_spec(spec, draft_vocab_size=draft_vocab))]
    blocks = (dummy_block_spec(spec, draft_vocab_size=draft_vocab, dflash2=dflash2) for dflash2 in (False, True))
    return [*products(spec), *heads, *(product for block in blocks for product in block_products(block))]


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_a_gpu_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "llama8b"]) == 0
    line, model = capsys.readouterr().out.splitlines()
    assert line.startswith(f"no GPU that torch {torch.__version__} sees: jobs run on the CPU")
    assert re.fullmatch(r"model llama8b: weights of (16\.06 GB in bfloat16|32\.12 GB in float32); .* GB .*", model)
    assert cli.main(["doctor", "--tune", "llama8b"]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith("batchspec: doctor --tune times matrix products on a GPU, and torch sees none")
    assert refused.count("\n") == 1


@pytest.mark.second
@pytest.mark.parametrize("machine", ["gpu", "no_gpu"])
def test_what_a_model_of_images_lacks_is_named(
    machine: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request.getfixturevalue(machine)
    text, vl = tmp_path / "text", make_image_model(tmp_path / "vl", "qwen3_vl")
    text.mkdir()
    (text / "config.json").write_text(json.dumps(TINY))

    def said(folder: Path) -> list[str]:
        assert cli.main(["doctor", str(folder)]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("images")]

    assert said(text) == []
    assert [line.split(maxsplit=1)[1] for line in said(vl)] == ["those of rows and pages of PDFs are read"]
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "pypdfium2" else name)
    assert [line.split(maxsplit=1)[1] for line in said(vl)] == [doctor._OF_IMAGES["pypdfium2"]]
    monkeypatch.setattr(doctor, "find_spec", lambda _: None)
    assert all(one in said(vl)[0] for one in doctor._OF_IMAGES.values())
    (vl / "preprocessor_config.json").unlink()
    assert re.search(r"not read: .*no preprocessor_config\.json, which says how images are resized", said(vl)[0])
    extras = (Path(doctor.__file__).parents[2] / "pyproject.toml").read_text()
    for line in doctor._OF_IMAGES.values():
        assert f'"{line.split("pip install ")[1].strip(chr(39))}"' in extras


@pytest.mark.usefixtures("gpu")
def test_an_unknown_card_is_named_with_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"card      {GPU}, compute capability 9.0, 148.0 GB free of 150.0 GB"
    assert f"torch {torch.__version__}" in said[1]
    assert said[2:] == [
        "prefill   attention by torch up to 2,048 keys per row, by FlashInfer above",
        "products  none tuned for this card: all by cuBLAS, none fused; batchspec doctor --tune MODEL times them",
    ]


@pytest.mark.usefixtures("gpu")
def test_what_is_missing_is_named_with_what_it_costs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "flashinfer", lambda: None)
    torch.cuda.get_device_properties(0).major = 8
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "by torch, slower above 2,048 keys: FlashInfer is missing; pip install 'flashinfer-python>=0.6.13'" in said
    assert "launches  one after another" in said


@pytest.mark.usefixtures("gpu")
def test_the_products_of_a_model_that_the_table_lacks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = usual("llama8b", 32000)
    known = set(wanted) - {("lm_head", 32000, 4096)}
    save([entry(product) for product in known], GPU)
    assert cli.main(["doctor", "llama8b"]) == 0
    *_, count, model = capsys.readouterr().out.splitlines()
    assert count == f"products  {len(known)} tuned for this card"
    total = len(known) + 1
    assert model.startswith(
        "model     llama8b: weights of 16.06 GB in bfloat16; 131.9 GB are left; "
        f"{total - 1} of {total} products tuned; by cuBLAS: lm_head 32000x4096;"
    )


@pytest.mark.usefixtures("gpu")
def test_tuning_a_shape_covers_a_usual_head_of_it(
    tuned: list[Product], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "table.json"
    assert cli.main(["doctor", "--tune", "smol135m", "--out", str(path)]) == 0
    spec = shape_spec("smol135m")
    assert set(tuned) == {*usual("smol135m", 16384)}
    assert {*block_products(dummy_block_spec(spec, draft_vocab_size=16384))} < {*tuned}
    of_dflash2 = {("linear", 256, 576), ("linear", 4 * 36, 576)}  # the selector, and a convolution's taps of 36 groups
    assert of_dflash2 < {*block_products(dummy_block_spec(spec, dflash2=True))} < {*tuned}
    assert len(tuned) == len(set(tuned))
    written = json.loads(path.read_text())
    assert written["gpu"] == GPU
    assert {(e["op"], e["rows"], e["k"]) for e in written["products"]} == set(tuned)
    assert capsys.readouterr().out == f"{len(tuned)} products written to {path}\n"


@pytest.mark.usefixtures("gpu")
def test_a_model_folder_is_tuned_into_the_users_table_and_known_from_then_on(
    tuned: list[Product], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    assert cli.main(["doctor", "--tune", str(folder)]) == 0
    assert ("linear", 64, 96) in tuned
    assert ("lm_head", 500, 64) in tuned
    assert ("linear", 64, 192) not in tuned, "no head was asked for"
    assert (tmp_path / "batchspec" / "tuned" / "nvidia_imaginary_100.json").is_file()
    capsys.readouterr()
    assert cli.main(["doctor", str(folder)]) == 0
    model = capsys.readouterr().out.splitlines()[-1]
    assert model.startswith(f"model     {folder}: weights of ")
    assert model.endswith(f"; {len(tuned)} of {len(tuned)} products tuned")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("draft_vocab", [None, 100])
def test_the_products_of_a_head_that_drafts_a_block_are_those_that_it_computes(
    draft_vocab: int | None, tuned: list[Product], tmp_path: Path
) -> None:
    design = BlockDesign(
        hidden=64, vocab=500, taps=(0, 1), mask_id=499, draft_vocab=draft_vocab, rank=8, confidence="markov", heads=4,
        kv_heads=2, head_dim=16, inner=80,
    )
    write_block(tmp_path / "head", design, random_block(design))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    assert cli.main(["doctor", "--tune", str(tmp_path / "model"), "--draft-path", str(tmp_path / "head")]) == 0
    of_head = {
        ("linear", 64, 128), ("linear", 2 * 2 * 32, 64), ("linear", 64 + 2 * 32, 64), ("linear", 64, 64), ("linear", 160, 64),
        ("swiglu", 160, 64), ("linear", 64, 80),
    }
    assert of_head <= {*tuned}
    assert {product for product in tuned if product[0] == "lm_head"} == {
        ("lm_head", 500, 64), *([] if draft_vocab is None else [("lm_head", draft_vocab, 64)])
    }


def test_a_shape_of_latent_attention_has_no_usual_head() -> None:
    assert cli.main(["doctor", "glm-4.7-flash"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tune"], "doctor --tune needs MODEL: a folder, a hub id, a config.json or one of llama8b"),
        (["--draft-path", "head"], "doctor --draft-path needs MODEL"),
        (["llama8b", "--out", "x.json"], "doctor --out x.json is only written by --tune"),
    ],
)
def test_words_that_do_nothing_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("machine", ["gpu", "no_gpu"])
def test_a_model_that_is_none_is_refused(
    machine: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    request.getfixturevalue(machine)
    assert cli.main(["doctor", "./nowhere"]) == 2
    assert capsys.readouterr().err.startswith("batchspec: MODEL=./nowhere: no such folder")
