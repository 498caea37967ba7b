"""The table of tuned products: lookups, the files that it is read from, and how the tuner fills it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from batchspec.draft.head import products as head_products
from batchspec.draft.weights import dummy_spec
from batchspec.engine.ranks.messages import Load, decode, encode
from batchspec.errors import ConfigError
from batchspec.kernels.gemm import autotune as trial
from batchspec.kernels.gemm import four_bit_trial
from batchspec.kernels.gemm.tiles import Tile
from batchspec.model.families.shapes import shape_spec
from batchspec.model.layers.attention.rope_config import RopeSpec
from batchspec.model.products import products
from batchspec.model.quant.plain import Linear
from batchspec.tuning import table as tuning
from batchspec.tuning.policy import gemm_tile
from batchspec.tuning.table import save, tune
from tests.helpers.stand_ins import dense_spec
from tests.kernels.covering import covering

GPU = "NVIDIA H200"
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
FOUR_BIT_TILE = Tile(16, 32, 128, 2, 4, False)
TILE, OTHER = Tile(64, 128, 64, 4, 4, True), Tile(64, 64, 64, 3, 4, False, 2)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with this GPU, a cache folder and a shipped table of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: GPU)
    (tmp_path / "conf").mkdir()
    monkeypatch.setattr(tuning, "files", lambda package: tmp_path / "conf")
    tuning.forget_tables()
    yield tmp_path / "cache" / "batchspec" / "tuned"
    tuning.forget_tables()


def entry(op: str, rows: int, k: int, tokens: int, tile: Tile | None) -> dict[str, Any]:
    tile_json = None if tile is None else tile._asdict()
    return {"op": op, "rows": rows, "k": k, "tokens": tokens, "us": 1.0, "library_us": 2.0, "tile": tile_json}


def test_a_rank_makes_the_choices_of_its_leader_whatever_its_own_files_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the message that the leader sends, as it is encoded: no product and no choice is lost."""
    monkeypatch.setattr(tuning, "_adopted", {})
    save([entry("linear", 960, 576, 64, TILE), entry("linear", 960, 576, 128, None), entry("swiglu", 8, 16, 32, OTHER)], GPU)
    counts = {("linear", 960, 576): (1, 64, 65, 128, 129), ("swiglu", 8, 16): (32, 33), ("lm_head", 4, 4): (1,)}

    def choices() -> dict[tuple[str, int, int, int], Tile | None]:
        return {(op, rows, k, n): gemm_tile(op, n, rows, k, CUDA) for (op, rows, k), own in counts.items() for n in own}

    of_leader = choices()
    assert set(of_leader.values()) == {TILE, OTHER, None}
    message = decode(encode(Load("a GPU", tuning.table_in_use(CUDA))))
    save([entry("linear", 960, 576, 64, OTHER), entry("swiglu", 8, 16, 32, None), entry("lm_head", 4, 4, 9, TILE)], GPU)
    assert all(
        choices()[key] != of_leader[key] for key in (("linear", 960, 576, 64), ("swiglu", 8, 16, 32), ("lm_head", 4, 4, 1))
    )
    assert isinstance(message, Load)
    tuning.adopt(message.tuned, CUDA)
    assert choices() == of_leader
    assert (tuning.table_in_use(CUDA), tuning.table_in_use(CPU)) == (message.tuned, {})


def test_nothing_known_is_the_library() -> None:
    assert gemm_tile("linear", 64, 6144, 4096, CUDA) is None
    assert gemm_tile("linear", 64, 6144, 4096, CPU) is None


def test_the_choice_for_the_next_larger_number_of_tokens() -> None:
    save([entry("linear", 960, 576, 128, None), entry("linear", 960, 576, 256, OTHER), entry("linear", 960, 576, 64, TILE)], GPU)
    choices = {tokens: gemm_tile("linear", tokens, 960, 576, CUDA) for tokens in (1, 64, 65, 128, 129, 256, 257)}
    assert choices == {1: TILE, 64: TILE, 65: None, 128: None, 129: OTHER, 256: OTHER, 257: None}
    assert gemm_tile("swiglu", 64, 960, 576, CUDA) is None
    assert gemm_tile("linear", 64, 960, 577, CUDA) is None
    assert gemm_tile("linear", 64, 960, 576, CPU) is None


def test_the_users_table_goes_before_the_shipped_one(cache_folder: Path) -> None:
    shipped = cache_folder.parents[2] / "conf" / "tuned" / "nvidia_h200.json"
    save([entry("linear", 960, 576, 64, TILE), entry("lm_head", 960, 576, 64, TILE)], GPU, shipped)
    assert gemm_tile("linear", 64, 960, 576, CUDA) == TILE
    assert save([entry("linear", 960, 576, 64, OTHER)], GPU) == cache_folder / "nvidia_h200.json"
    assert gemm_tile("linear", 64, 960, 576, CUDA) == OTHER
    assert gemm_tile("lm_head", 64, 960, 576, CUDA) == TILE


def test_new_entries_replace_those_of_their_product_only(cache_folder: Path) -> None:
    save([entry("linear", 960, 576, 64, TILE), entry("linear", 960, 576, 128, TILE), entry("swiglu", 8, 8, 64, TILE)], GPU)
    path = save([entry("linear", 960, 576, 64, None)], GPU)
    written = json.loads(path.read_text())
    assert written["gpu"] == GPU
    assert [(e["op"], e["tokens"], e["tile"]) for e in written["products"]] == [
        ("linear", 64, None), ("swiglu", 64, TILE._asdict()),
    ]
    assert [p.name for p in cache_folder.iterdir()] == ["nvidia_h200.json"]


UNKNOWN_FIELD = '{"products": [{"op": "linear", "rows": 1, "k": 1, "tokens": 1, "tile": {"block": 1}}]}'


@pytest.mark.parametrize("text", ["{", "[]", '{"products": 3}', '{"products": [{"op": "linear"}]}', UNKNOWN_FIELD])
def test_a_broken_table_is_named(text: str, cache_folder: Path) -> None:
    cache_folder.mkdir(parents=True)
    (cache_folder / "nvidia_h200.json").write_text(text)
    with pytest.raises(ConfigError, match=r"nvidia_h200.json: not a table of tuned products: .*; delete the file"):
        gemm_tile("linear", 64, 960, 576, CUDA)


def test_the_products_of_a_model() -> None:
    spec = dense_spec(
        family="llama", hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=96,
        vocab_size=500, rms_eps=1e-5, rope=RopeSpec(type="default", theta=1e4), windows=(None, None), tie=True,
        eos_ids=(1,), max_len=128, dtype="bfloat16", generation={},
    )
    assert set(products(spec)) == {
        ("linear", 256, 64), ("linear", 64, 128), ("linear", 192, 64), ("linear", 64, 96), ("swiglu", 192, 64),
        ("linear_add", 64, 128), ("linear_add", 64, 96), ("norm_linear", 256, 64), ("norm_swiglu", 192, 64),
        ("lm_head", 500, 64),
    }


def test_the_products_of_an_eagle_head() -> None:
    small = dummy_spec(shape_spec("llama1b"))
    assert set(head_products(small)) == {
        ("linear", 2048, 6144), ("linear", 3072, 4096), ("linear", 1024, 4096), ("linear", 2048, 2048), ("linear", 2048, 8192),
        ("linear", 16384, 2048), ("swiglu", 16384, 2048), ("linear_add", 2048, 2048), ("norm_swiglu", 16384, 2048),
        ("lm_head", 32000, 2048),
    }
    assert ("linear", 3072, 2048) in head_products(replace(small, num_layers=2, windows=(None, None)))
    large = head_products(dummy_spec(shape_spec("llama8b")))
    assert {op for op, _, _ in large} == {"linear", "swiglu", "lm_head"}


class FakeClock:
    """Runs each call once; the product of the tile that `wins` is the fastest."""

    wins: Tile | None = None

    def __init__(self, device: torch.device) -> None: ...

    def us(self, calls: Sequence[Callable[[], Any]], *, repeats: int = 3) -> float:
        calls[0]()
        keywords = getattr(calls[0], "keywords", {})
        if "tile" not in keywords:
            return 5.0 if self.wins is None else 50.0
        return 2.0 if keywords["tile"] == self.wins else 10.0


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials in fp32 by the interpreter, with three small candidates."""
    if torch.cuda.is_available():
        pytest.skip("a GPU runs trials itself")
    monkeypatch.setattr(trial, "GraphClock", FakeClock)
    monkeypatch.setattr(trial, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(trial, "candidates", lambda *_: [Tile(16, 32, 32, 2, 4, False), Tile(16, 32, 16, 2, 4, True)])
    monkeypatch.setattr(trial, "MAX_COPIES", 2)
    monkeypatch.setattr(trial, "DTYPE", torch.float32)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    ("op", "wins"),
    covering(["linear", "linear_add", "swiglu", "norm_linear", "norm_swiglu", "lm_head"], [Tile(16, 32, 16, 2, 4, True), None]),
)
def test_tuning_stores_the_fastest_correct_tile(
    op: str, wins: Tile | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeClock, "wins", wins)
    entries = tune([(op, 64, 32)], CPU, token_counts=(5, 17))
    assert [(e["op"], e["rows"], e["k"], e["tokens"]) for e in entries] == [(op, 64, 32, 5), (op, 64, 32, 17)]
    assert all(e["tile"] == (None if wins is None else wins._asdict()) for e in entries)
    assert "WRONG" not in capsys.readouterr().out
    save(entries, GPU)
    assert gemm_tile(op, 6, 64, 32, CUDA) == wins


@pytest.mark.parametrize(
    ("op", "wins"), covering(["four_bit_linear_g32", "four_bit_swiglu_g0", "four_bit_linear_g16"], [FOUR_BIT_TILE, None])
)
def test_four_bit_products_are_tuned_against_dequantising_the_weight(
    op: str, wins: Tile | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for numbers of tokens beyond which the library is always faster."""
    if torch.cuda.is_available():
        pytest.skip("a GPU runs trials itself")
    monkeypatch.setattr(trial, "GraphClock", FakeClock)
    monkeypatch.setattr(trial, "compile_ahead", lambda *_: None)
    tiles = [FOUR_BIT_TILE, FOUR_BIT_TILE._replace(tma=True, split=2)]
    monkeypatch.setattr(four_bit_trial, "candidates", lambda *_, gated: tiles)
    monkeypatch.setattr(four_bit_trial, "MAX_COPIES", 2)
    monkeypatch.setattr(four_bit_trial.FourBitTrial, "more_tokens", (18,))
    monkeypatch.setattr(FakeClock, "wins", wins)
    entries = tune([(op, 64, 160)], CPU, token_counts=(5,))
    assert [(e["op"], e["tokens"], e["tile"] and Tile(**e["tile"])) for e in entries] == [(op, 5, wins), (op, 18, wins)]
    assert "WRONG" not in capsys.readouterr().out
    save(entries, GPU)
    assert tuning.is_measured(op, 64, 160, CUDA)
    assert gemm_tile(op, 17, 64, 160, CUDA) == wins


@pytest.mark.usefixtures("on_cpu")
def test_a_wrong_or_failing_tile_is_never_chosen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong, right, failing = Tile(16, 32, 16, 2, 4, True), Tile(16, 32, 32, 2, 4, False), Tile(16, 16, 16, 2, 4, False)

    def launch(x: torch.Tensor, w: torch.Tensor, *, out: torch.Tensor, tile: Tile, **_: Any) -> None:
        if tile == failing:
            raise RuntimeError("out of resources\nand more")
        out.copy_(F.linear(x, w) + (tile == wrong))

    monkeypatch.setattr(trial, "launch", launch)
    monkeypatch.setattr(trial, "candidates", lambda *_: [wrong, right, failing])
    monkeypatch.setattr(FakeClock, "wins", wrong)
    assert tune([("linear", 64, 32)], CPU, token_counts=(5,))[0]["tile"] == right._asdict()
    out = capsys.readouterr().out
    assert "WRONG, error" in out
    assert "RuntimeError: out of resources" in out
    assert "and more" not in out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_linear_map_on_a_gpu_is_cut_as_tuned() -> None:
    save([entry("linear", 192, 512, 64, OTHER)], GPU)
    x, weight = torch.randn(40, 512, device=CUDA).bfloat16(), torch.randn(192, 512, device=CUDA).bfloat16()
    torch.testing.assert_close(Linear(weight)(x), F.linear(x, weight), atol=0.3, rtol=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "op",
    ["linear", "linear_add", "swiglu", "norm_linear", "norm_swiglu", "lm_head", "four_bit_linear_g64", "four_bit_swiglu_g0",
     "four_bit_swiglu_g16"],
)
def test_a_real_trial_finds_a_correct_tile(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(tune([(op, 960, 576)], CUDA, token_counts=(64, 200))) == (4 if op.startswith("four_bit") else 2)
    out = capsys.readouterr().out
    assert "WRONG" not in out
    assert "Error" not in out
