"""draft=mtp with an assistant of Gemma 4: drafts are those of transformers' class, tokens those of the model alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from batchspec import run as batchspec_run
from batchspec.checkpoint.files import LocalFiles
from batchspec.distributed.collectives import Collectives
from batchspec.draft.assistant import AssistantDrafter
from batchspec.draft.assistant_head import Assistant
from batchspec.draft.none import NoDrafter
from batchspec.errors import CheckpointError, ConfigError
from batchspec.model.kv_calibration import calibrate
from batchspec.model.target import Target
from batchspec.model.weights import judge_model
from batchspec.packing.kv_memory import KVMemory
from batchspec.records import Request, SamplingParams
from tests.helpers.assistants import CLUSTERS, SIZE, load_pair, make_assistant, make_target, opened, reference_logits
from tests.helpers.drafting import Proposals, Recording, synthetic
from tests.helpers.engines import DEVICE
from tests.helpers.models import make_tokenizer
from tests.helpers.mtp_drafting import Ran, mixed_requests, run, trusting, wide_batch
from tests.helpers.ranks import start_ranks

BF16 = torch.bfloat16
class Recorded(Recording, AssistantDrafter):
    """Keeps what it proposed."""


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    target: Target
    weights: Assistant

    def run(self, requests: Sequence[Request], draft_len: int, *, slots: int = 3, **options: Any) -> tuple[Ran, Proposals]:
        """draft_len 0: without drafts."""
        drafter = Recorded(self.weights, self.target, draft_len, slots=slots) if draft_len else NoDrafter()
        batch = wide_batch(slots, draft_len, **options.pop("batch", {}))
        return run(self.target, requests, batch, drafter, **options), getattr(drafter, "seen", [])


def loaded(target: Path, assistant: Path, ranks: Collectives | None = None, *, fp8_kv: bool = False) -> Pair:
    model, weights = load_pair(target, assistant, ranks)
    if fp8_kv:
        model.use_kv_scales(calibrate(model, [[3, 1, 4, 1, 5, 9, 2, 6]]).values)
        model.spec = model.spec.with_fp8_kv()
    return Pair(model, weights)


@pytest.mark.second
@pytest.mark.parametrize(
    ("name", "config"), [("dense", {}), ("experts", {}), ("late layers", CLUSTERS), ("own values", {}), ("dense", CLUSTERS)]
)
def test_drafts_are_those_of_transformers_and_tokens_those_of_the_model(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """Of rows whose drafts are accepted at random, and by the model; rows are longer than the window."""
    target = make_target(tmp_path / "target", name)
    assistant = make_assistant(tmp_path / "assistant", target, **config)
    pair, logits_of = loaded(target, assistant), reference_logits(target, assistant)
    requests = mixed_requests(cap=16)
    ways: tuple[dict[str, Any], ...] = ({"options": synthetic(3)}, {})
    for options in ways:
        ran, seen = pair.run(requests, 3, **options)
        assert len(seen) > 20
        assert len({token for _, drafts in seen for token in drafts}) > SIZE // 4
        for row, drafts in seen:
            assert drafts == [int(logits.argmax()) for logits in logits_of(row, drafts)], row
    assert ran.tokens == pair.run(requests, 0)[0].tokens


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = make_target(folder / "target", "late layers")
    return target, make_assistant(folder / "assistant", target, **CLUSTERS)


@pytest.mark.second
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    "options",
    [{"fp8_kv": True}, {"sampling": SamplingParams(temperature=0.9, top_k=12, top_p=0.9, repetition_penalty=1.3)}, {"pages": 42}],
    ids=["K and V in e4m3", "drawn", "few pages"],
)
def test_drafts_change_no_token(options: dict[str, Any], folders: tuple[Path, Path]) -> None:
    pair = loaded(*folders, fp8_kv=options.get("fp8_kv", False))
    requests, batch = mixed_requests(cap=20, sampling=options.get("sampling")), {}
    if "pages" in options:
        batch = {"page_size": 4, "num_pages": options["pages"], "more_pages": (options["pages"],), "prefill_tokens": 20}
    with trusting():
        ran, seen = pair.run(requests, 4, batch=batch)
    assert len(seen) > 10
    assert ran.tokens == pair.run(requests, 0)[0].tokens
    if batch:
        assert ran.engine.totals.preempted > 0


def drafted(pair: Pair) -> list[tuple[dict[str, list[int]], Proposals]]:
    found = []
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0)):
        ran, seen = pair.run(mixed_requests(4, cap=10, sampling=sampling), 3)
        found.append((ran.tokens, seen))
    return found


def save_drafted(ranks: Collectives, folder: Path) -> None:
    torch.save(drafted(loaded(folder / "target", folder / "assistant", ranks)), folder / str(ranks.rank))


@pytest.mark.second
def test_processes_over_gloo_draft_and_write_what_one_process_does(folders: tuple[Path, Path]) -> None:
    """The target's layers have one K/V head or two."""
    start_ranks(2, save_drafted, folder := folders[0].parent)
    expected = drafted(loaded(*folders))
    assert [torch.load(folder / str(rank)) for rank in range(2)] == [expected, expected]


@pytest.mark.second
def test_a_job_writes_what_one_without_drafts_does(tmp_path: Path) -> None:
    target = make_tokenizer(make_target(tmp_path / "target", "dense", vocab_size=320))
    assistant = make_assistant(tmp_path / "assistant", target)
    rows = [{"prompt": f"The quick brown fox. Say word{i}", "regex": "[A-Z][a-z ,]{3,30}" if i % 2 else None} for i in range(6)]
    pl.DataFrame(rows).write_parquet(tmp_path / "in.parquet")
    found = {}
    for name, keys in {"none": ["draft=none"], "mtp": ["draft=mtp", f"draft.path={assistant}"]}.items():
        out = tmp_path / name
        assert batchspec_run.main([
            f"model.path={target}", "model.dtype=float64", f"input.path={tmp_path / 'in.parquet'}", f"output.dir={out}",
            "decode.max_new_tokens=16", "output.token_ids=true", "input.columns.regex=regex", "packing.memory_gb=0.05", *keys,
        ]) == 0
        found[name] = pl.read_parquet(out / "data")
    assert found["mtp"]["token_ids"].to_list() == found["none"]["token_ids"].to_list()
    assert found["mtp"]["spec_decode"].struct.field("num_draft_tokens").sum() > 50


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "draft", "named"),
    [
        ({"backbone_hidden_size": 9}, {}, "backbone_hidden_size is 9, that of the model is 64; it is the assistant of another"),
        ({"text_config": {"vocab_size": 31}}, {}, "vocab_size is 31, that of the model is 32"),
        ({"text_config": {"head_dim": 8}}, {}, "layer 0 reads 2 K/V heads of 8, layer 1 of the model has 2 of 12"),
        ({"text_config": {"num_kv_shared_layers": 1}}, {}, "num_kv_shared_layers=1 of 3 layers: an assistant keeps no K and V"),
        ({"text_config": {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 32}}, {}, "with inputs of layers"),
        ({"tie_word_embeddings": False}, {}, "with an output matrix of its own, is not supported"),
        ({"num_centroids": 7}, {}, "num_centroids 7 and centroid_intermediate_top_k 3: vocab_size 32 must be a multiple"),
        ({"centroid_intermediate_top_k": 9}, {}, "num_centroids 8 and centroid_intermediate_top_k 9"),
        ({"architectures": ["Other"]}, {}, 'architectures=["Other"] is not supported; gemma4_assistant needs'),
        ({"text_config": {"hidden_size": 24}}, {}, "the weights do not fit config.json"),
        ({}, {"vocab_size": 9}, "draft.vocab_size=9 is not used by the assistant"),
        ({}, {"window": 9}, "draft.window=9 is not used by the assistant"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    changes: dict[str, Any], draft: dict[str, Any], named: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target, assistant = folders
    shutil.copy(assistant / "model.safetensors", tmp_path)
    values = json.loads((assistant / "config.json").read_text())
    text = values["text_config"] | changes.get("text_config", {})
    (tmp_path / "config.json").write_text(json.dumps(values | changes | {"text_config": text}))
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        opened(target, tmp_path, **draft)
    assert named in str(caught.value)


def test_an_assistant_is_no_model(folders: tuple[Path, Path]) -> None:
    with pytest.raises(CheckpointError, match=r"drafts for another model; give its folder as draft.path, with draft=mtp"):
        judge_model(LocalFiles(folders[1]))


def test_a_model_without_an_mtp_layer_names_the_assistant(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigError, match=r"has no MTP layer .* set draft.path to an assistant made for it"):
        opened(folders[0], folders[0])


def test_the_planner_counts_the_state_of_each_slot_and_no_k_and_v(folders: tuple[Path, Path]) -> None:
    spec, own = opened(*folders)
    states = own.layer_states(BF16, 4)
    without, with_drafts = (
        KVMemory.of(spec, BF16, layers, page_size=4, max_len=64, max_tokens=64, lookahead=1, pass_tokens=1, num_verified=3)
        for layers in ((), states)
    )
    assert with_drafts == replace(without, slot_bytes=without.slot_bytes + 2 * spec.hidden_size)
    stored = load_file(folders[1] / "model.safetensors")
    products = sum(tensor.numel() for name, tensor in stored.items() if tensor.dim() == 2)
    assert own.weight_bytes(dtype=BF16, device=DEVICE) == 2 * products
