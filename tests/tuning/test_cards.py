"""Cards by name: `plan --card`, `doctor --card`, the rates of the cost model; what has no bf16 is refused. No GPU is needed."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from batchspec import cli
from batchspec.commands.plan import taken
from batchspec.errors import ConfigError
from batchspec.job.prepare import choose_device
from batchspec.kernels.common import card
from batchspec.kernels.common.card import assumed
from batchspec.model.families.shapes import COMMON, SHAPES
from batchspec.packing import rates
from batchspec.packing.rates import card_rates, device_rates
from batchspec.tuning.cards import KnownCard, check_card, entry_of, known_card, known_cards

GPU, BF16 = torch.device("cuda"), torch.bfloat16
NAMES = [known.card.name for known in known_cards()]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A job of Llama-8B in FP8 with dummy weights, but for its model."""
    folder = tmp_path_factory.mktemp("job")
    for shape in ("llama8b-fp8", "llama8b", "llama70b"):
        (folder / shape).mkdir()
        (folder / shape / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
    pq.write_table(pa.table({"prompt_ids": [[1] * 1024] * 400}), folder / "in.parquet")
    return [f"input.path={folder / 'in.parquet'}", "model.load_format=dummy", "output.token_ids=true", "draft=none",
            "decode.max_new_tokens=512", f"model.path={folder}/"]


def planned(name: str, words: list[str], *more: str, model: str = "llama8b-fp8") -> int:
    return cli.main(["plan", "--card", name, *words[:-1], words[-1] + model, *more])


def lines_of(text: str) -> dict[str, str]:
    return {label: rest.strip() for label, _, rest in (line.partition(" ") for line in text.splitlines())}


def test_every_card_is_whole() -> None:
    assert len(NAMES) == len({name.lower() for name in NAMES})
    assert [known.card.capability for known in known_cards()] == sorted(known.card.capability for known in known_cards())
    for known in known_cards():
        own = known.card
        assert own.num_sms > 30
        assert 10e9 < own.memory_bytes < 300e9
        assert 2e11 < own.bytes_s < 1e13
        if own.computes_bf16:
            assert 20 < own.flop_s / own.bytes_s < 500
            assert (own.fp8_flop_s > own.flop_s) == own.has_e4m3


@pytest.mark.parametrize(
    ("names", "card"),
    [
        (("RTX-4090", "RTX 4090", "rtx4090", "4090", "GeForce RTX 4090", "NVIDIA GeForce RTX 4090"), "RTX-4090"),
        (("H100-80GB", "h100 80 gb", "H100 SXM", "H100-SXM5", "NVIDIA H100 80GB HBM3"), "H100-80GB"),
        (("H100 PCIe", "NVIDIA H100 PCIe"), "H100-PCIe"),
        (("A100-80GB", "a100_80g", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), "A100-80GB"),
        (("A100-40GB", "NVIDIA A100-PCIE-40GB"), "A100-40GB"),
        (("l40s", "NVIDIA L40S"), "L40S"),
        (("NVIDIA L4",), "L4"),
        (("A10G",), "A10"),
        (("Tesla T4",), "T4"),
        (("RTX 6000 Ada", "rtx6000ada"), "RTX-6000-Ada"),
        (("RTX PRO 6000 Blackwell", "rtxpro6000"), "RTX-PRO-6000"),
        (("GH200 96GB", "NVIDIA GH200 480GB"), "GH200-96GB"),
        (("NVIDIA GH200 144G HBM3e",), "GH200-144GB"),
    ],
)
def test_names_are_understood_as_people_and_nvidia_write_them(names: tuple[str, ...], card: str) -> None:
    assert {name: known_card(name).card.name for name in names} == dict.fromkeys(names, card)


def test_the_full_names_of_a_card_are_no_other_cards() -> None:
    for known in known_cards():
        assert all(entry_of(name) is known for name in known.names)
    assert entry_of("NVIDIA Imaginary 100") is None


@pytest.mark.parametrize(
    ("name", "which"),
    [
        ("A100", "A100-40GB (42 GB) or A100-80GB (85 GB)"),
        ("nvidia a100 pcie", "A100-40GB (42 GB) or A100-80GB (85 GB)"),
        ("H100", "H100-80GB (85 GB) or H100-PCIe (85 GB) or H100-NVL (100 GB)"),
        ("GH200", "GH200-96GB (102 GB) or GH200-144GB (153 GB)"),
        ("RTX 6000", "RTX-6000-Ada (51 GB) or RTX-PRO-6000 (102 GB)"),
        ("V100", "V100-16GB (17 GB) or V100-32GB (34 GB)"),
    ],
)
def test_a_name_that_several_cards_share_is_refused_with_these(name: str, which: str) -> None:
    with pytest.raises(ConfigError) as raised:
        known_card(name)
    first = which.partition(" ")[0]
    assert str(raised.value) == f"--card {name} may be {which}; write the one that you mean, as in --card {first}"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("H300", " nearest is H200;"), ("L40", " nearest is L40S;"), ("RTX 3090 Ti", " nearest is RTX-3090;"),
        ("RTX 4090 Laptop GPU", " nearest is RTX-4090;"), ("quantum", ""), ("NVIDIA", ""),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_and_all(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as raised:
        known_card(name)
    assert str(raised.value) == f"--card {name} is not known;{nearest} all: {', '.join(NAMES)}"


def test_commands_take_a_name_of_several_words_and_refuse_an_unknown_one_in_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert taken(["--card", "RTX", "4090", "model.path=m"]) == taken(["model.path=m", "--card=RTX 4090"]) == (
        "RTX 4090", ["model.path=m"]
    )
    assert taken(["--card", "L40S", "--full", "+job=demo"]) == ("L40S", ["--full", "+job=demo"])
    for argv in (["plan", "--card=H300", *words], ["doctor", "--card", "H300"]):
        assert cli.main(argv) == 2
        said = capsys.readouterr().err
        assert said.startswith("batchspec: --card H300 is not known; nearest is H200; all: V100-16GB, ")
        assert said.count("\n") == 1


def test_a_job_whose_products_have_unknown_times_is_refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert planned("L40S", words, "model.dtype=float32", model="llama8b") == 2
    said = capsys.readouterr().err
    assert said == (
        "batchspec: model.dtype=float32: the times of L40S are known in bfloat16 alone; add model.dtype=bfloat16, or run plan "
        "on a machine with that card\n"
    )


def test_a_card_without_a_name_and_a_job_for_a_cpu_are_refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert cli.main(["plan", *words, "--card"]) == 2
    assert "--card needs the name of a card" in capsys.readouterr().err
    assert planned("L40S", words, "device=cpu") == 2
    assert "--card L40S plans for a GPU, and the job has device=cpu; remove one" in capsys.readouterr().err
    assert cli.main(["doctor", "--card", "L40S", "--tune", "llama8b"]) == 2
    assert "not on a L40S; remove --card or --tune" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "weights", "way", "rate"),
    [
        ("A100-80GB", "16.06 GB in bfloat16", "weights are converted to bf16 at load", 2.04e12),
        ("L40S", "9.08 GB (FP8 weights and activations", "weights stay FP8", 0.864e12),
        ("B200", "9.08 GB (FP8 weights and activations", "weights stay FP8", 7.7e12),
    ],
)
def test_a_job_is_planned_for_a_card_that_is_not_there(
    name: str, weights: str, way: str, rate: float, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert planned(name, words, "packing.max_num_seqs=64") == 0
    said = capsys.readouterr().out
    found = lines_of(said)
    assert found["card"].startswith(f"{name}, compute capability ")
    assert found["paths"].startswith(way)
    assert weights in found["model"]
    assert found["shape"].startswith("64 slots, ")
    assert found["memory"].endswith(f"of {(known_card(name).card.memory_bytes - 1e9) / 1e9:.2f} GB that are free")
    assert f"device: {name}, computed, not measured" in found["assumed"]
    assert found["computed"].startswith("not measured: ")
    round_ms = float(found["rounds"].split(" of ")[1].split(" ms")[0])
    read_s = (8.03e9 if "FP8" in weights else 15.01e9) / rate
    assert 1 < round_ms / 1e3 / read_s < 3, "a round of 64 rows reads the weights, and K/V"


def test_memory_that_a_card_lacks_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert planned("L40S", words, model="llama70b") == 2
    assert "the weights take 141.1 GB as torch.bfloat16, and this GPU has 47.7 GB" in capsys.readouterr().err


def test_an_fp8_cache_is_refused_for_a_card_without_e4m3(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert planned("A100-80GB", words, "cache.dtype=fp8") == 2
    assert "cache.dtype=fp8 needs a GPU of compute capability 8.9 or newer, A100-80GB has 8.0" in capsys.readouterr().err


def test_doctor_tells_what_runs_on_a_card_by_which_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--card", "RTX-4090", "gpt-oss-20b"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("card      RTX-4090, compute capability 8.9, 25.4 GB, 128 SMs with 99 KB of shared memory per block;")
    assert "\nexperts   by kernels in bf16, FP8, MXFP4, INT4 and NVFP4; blocks are loaded by pointers (no TMA)\n" in said
    assert "weights of 13.98 GB (MXFP4 experts, the rest bfloat16); 10.4 GB are left" in said
    assert said.endswith("\ncomputed, not measured\n")
    assert cli.main(["doctor", "--card", "H200"]) == 0
    said = capsys.readouterr().out
    assert "; measured\n" in said
    assert "tuned for this card, the others by cuBLAS" in said


@pytest.mark.parametrize("name", ["T4", "V100-32GB"])
def test_a_card_without_bf16_is_refused_with_the_reason(name: str, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    reason = f"{name} has compute capability 7.[05], so no tensor cores for bf16 .* float16 is not supported; use a GPU of .* 8.0"
    for device in ("cuda", "auto"):
        with assumed(known_card(name).card), pytest.raises(ConfigError, match=reason):
            choose_device(device)
    with assumed(known_card(name).card):
        assert choose_device("cpu").type == "cpu"
    for argv in (["plan", "--card", name, *words], ["doctor", "--card", name]):
        assert cli.main(argv) == 2
        assert f"{name} has compute capability 7." in capsys.readouterr().err


def test_a_card_that_torch_sees_is_refused_by_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "_read", card._read.__wrapped__)  # which would keep what a test says of a device
    properties = SimpleNamespace(
        name="Tesla T4", major=7, minor=5, multi_processor_count=40, shared_memory_per_multiprocessor=64 << 10,
        L2_cache_size=4 << 20, total_memory=15_700_000_000,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    with pytest.raises(ConfigError, match=r"^Tesla T4 has compute capability 7\.5"):
        choose_device("auto")


def test_computed_rates_are_close_to_those_measured() -> None:
    """Of the one card whose rates were measured: its flop/s at each number of tokens."""
    known = known_card("H200")
    measured, computed = card_rates(known), card_rates(KnownCard(card=known.card, gpus=(), rates=None))
    assert computed.bytes_s == pytest.approx(measured.bytes_s, rel=0.01)
    assert computed.fp8_speedup == pytest.approx(measured.fp8_speedup, rel=0.01)
    for tokens, rate in measured.gemm:
        assert computed.flop_s(tokens) == pytest.approx(rate, rel=0.13), tokens


def test_a_known_card_needs_no_measurement_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "calibrate", lambda *_, **__: pytest.fail("measured"))
    for name in ("L40S", "H200"):
        with assumed(known_card(name).card):
            assert device_rates(GPU, BF16) == card_rates(known_card(name))


def test_only_cards_with_bf16_pass() -> None:
    refused = set()
    for known in known_cards():
        try:
            check_card(known.card)
        except ConfigError:
            refused.add(known.card.name)
    assert refused == {"T4", "V100-16GB", "V100-32GB"}
