"""How the GPUs of a machine are divided between copies of a model, and what exchanges between ranks cost."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from batchspec.cluster import devices
from batchspec.commands import planning as plan_command
from batchspec.commands import ranks as ranks_command
from batchspec.commands import submit
from batchspec.commands.plan_text import Plan
from batchspec.config.draft_schema import DraftConfig
from batchspec.config.schema import PackingConfig, RunConfig
from batchspec.config.typed import to_json
from batchspec.draft.formats import HeadSpec
from batchspec.errors import CapacityError, ConfigError
from batchspec.job.prepare import open_model
from batchspec.model.families.shapes import shape_spec
from batchspec.model.layers.base import WHOLE, Shard
from batchspec.model.spec import ModelSpec, load_spec
from batchspec.packed_batch import PackedBatch
from batchspec.packing.cost import num_multiplied, read_bytes, round_seconds
from batchspec.packing.exchange import exchange_seconds, sum_seconds
from batchspec.packing.expected_drafts import ExpectedDrafts
from batchspec.packing.planner import Demand, Forecast, choose_batch, forecast
from batchspec.packing.replicas import GpuLayout, best, gpu_layouts
from batchspec.process.child_process import python_command
from batchspec.tuning import exchange as tuning
from tests.commands.test_plan import MODEL, planned, write
from tests.commands.test_plan import job as job  # a fixture
from tests.distributed.test_shard import FP8_BLOCK
from tests.helpers.attentions import attentions
from tests.helpers.heads import random_tensors, tiny_design, write_head
from tests.helpers.stand_ins import H200, LLAMA_8B, small_spec

BF16, GPU = torch.bfloat16, torch.device("cuda")
LLAMA_70B = small_spec(
    hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128, intermediate_size=28672, vocab_size=128256,
    windows=(None,) * 80, tie=False, max_len=131_072, dtype="bfloat16",
)
MEMORY = 140 * 10**9
PLAIN = ExpectedDrafts((0,), 0.0)


def predicted(spec: Any, ranks: int, replicas: int, demand: Demand) -> tuple[PackedBatch, Forecast]:
    part = spec.sharded(Shard(0, ranks))
    share = replace(demand, num_completions=demand.num_completions // replicas)
    free = MEMORY - part.weight_bytes(BF16)
    if free < 0:
        raise CapacityError("the weights do not fit")
    batch = choose_batch(PackingConfig(), part, H200, share, device=GPU, dtype=BF16, drafts=PLAIN, free_bytes=max(0, free))
    return batch, forecast(batch, part, H200, share, PLAIN, dtype=BF16)


def compared(spec: Any, num_gpus: int, **demand: Any) -> list[GpuLayout]:
    asked = Demand(**{"num_completions": 20_000, "prompt_tokens": 1024, "output_tokens": 512, "max_tokens": 1536} | demand)
    return gpu_layouts((1, 2, 4, 8), num_gpus, lambda ranks, replicas: predicted(spec, ranks, replicas, asked))


def test_a_model_that_one_gpu_holds_easily_is_copied() -> None:
    found = compared(LLAMA_8B, 4)
    assert [(layout.ranks, layout.replicas) for layout in found] == [(1, 4), (2, 2), (4, 1)]
    assert best(found).ranks == 1


def test_a_model_that_one_gpu_does_not_hold_is_cut() -> None:
    found = compared(LLAMA_70B, 4)
    assert (found[0].seconds, found[0].reason) == (None, "the weights do not fit")
    assert best(found).ranks in (2, 4)
    with pytest.raises(CapacityError, match="the weights do not fit"):
        best(compared(LLAMA_70B, 1))


def gpt_oss_120b() -> ModelSpec:
    """Its spec with the weight formats of a GPU."""
    spec = shape_spec("gpt-oss-120b")
    assert spec.formats.quantised is not None
    return replace(spec, formats=replace(spec.formats, quantised=spec.formats.quantised.for_kernels()))


@pytest.mark.second
def test_gpt_oss_120b_is_cut_for_few_rows_and_copied_for_many() -> None:
    """On two GPUs: with few rows what is read is weights, most experts by both copies. `figures.sh ranks` measures it."""
    spec = gpt_oss_120b()
    asked = {"prompt_tokens": 1024, "output_tokens": 256, "max_tokens": 1280}
    assert {rows: best(compared(spec, 2, num_completions=rows, **asked)).ranks for rows in (64, 256, 512, 20_000)} == {
        64: 2, 256: 2, 512: 2, 20_000: 1
    }


@pytest.mark.second
def test_that_choice_stands_if_ranks_save_none_of_the_time_that_the_cost_model_leaves_out() -> None:
    """Rounds and prefill on one H200 take longer than the cost model predicts (PERFORMANCE.md, NOTEBOOK.md, without drafts).
    The rest may be latencies, which two GPUs do not halve."""
    spec, left_out_s, left_out_prefill_s = gpt_oss_120b(), 0.0, 0.0
    for rows, prompt, tokens_s, prefill_s in ((256, 1024, 9883, 4.86), (64, 8192, 2735, 10.42)):
        demand = Demand(num_completions=rows, prompt_tokens=prompt, output_tokens=512, max_tokens=prompt + 512)
        _, ahead = predicted(spec, 1, 1, demand)
        assert 0.85 * rows / tokens_s < ahead.round_s < rows / tokens_s
        assert 0.7 * prefill_s < ahead.prefill_s < prefill_s
        left_out_s = max(left_out_s, rows / tokens_s - ahead.round_s)
        left_out_prefill_s = max(left_out_prefill_s, (prefill_s - ahead.prefill_s) / rows / prompt)
    for rows in (64, 256, 512):
        seconds = {}
        for ranks in (1, 2):
            demand = Demand(num_completions=rows, prompt_tokens=1024, output_tokens=256, max_tokens=1280)
            _, ahead = predicted(spec, ranks, 2 // ranks, demand)
            own_rows = rows * ranks // 2
            more_s = ahead.rounds * left_out_s + own_rows * 1024 * left_out_prefill_s
            seconds[ranks] = ahead.prefill_s + ahead.decode_s + more_s
        assert seconds[2] < seconds[1]


def test_short_rows_of_an_8b_go_to_copies() -> None:
    asked = {"num_completions": 38_000, "prompt_tokens": 120, "output_tokens": 135, "max_tokens": 564}
    found = compared(LLAMA_8B, 4, **asked)
    assert best(found).ranks == 1
    one, four = compared(LLAMA_8B, 1, **asked)[0], found[0]
    assert one.seconds is not None
    assert four.seconds is not None
    assert one.seconds / four.seconds > 3.6


def test_a_tie_goes_to_fewer_ranks() -> None:
    found = [GpuLayout(ranks=1, replicas=2, seconds=101.0), GpuLayout(ranks=2, replicas=1, seconds=100.0)]
    assert best(found).ranks == 1
    assert best([replace(found[0], seconds=103.0), found[1]]).ranks == 2


def test_ranks_read_and_multiply_their_part_and_exchange() -> None:
    half = LLAMA_70B.sharded(Shard(1, 2))
    assert num_multiplied(half) == num_multiplied(LLAMA_70B) / 2
    assert read_bytes(half, BF16, 64) == read_bytes(LLAMA_70B, BF16, 64) / 2
    assert half.weight_bytes(BF16) - 128256 * 8192 * 2 == (LLAMA_70B.weight_bytes(BF16) - 128256 * 8192 * 2) / 2
    whole_s, half_s = (
        round_seconds(spec, H200, dtype=BF16, rows=64, context_tokens=1280, tokens_per_row=1) for spec in (LLAMA_70B, half)
    )
    assert exchange_seconds(LLAMA_70B, BF16, 64) == 0
    exchange = exchange_seconds(half, BF16, 64)
    assert half_s == pytest.approx((whole_s - H200.overhead_s) / 2 + H200.overhead_s + exchange, rel=0.03)
    assert exchange == pytest.approx(160 * 8.2e-6, rel=0.05)  # 160 sums of 64 x 8192 bf16, 1 MB
    assert 21.6e-3 < half_s < 30e-3  # the limit of 64 rows x 1024 + 512 on two H200, and what measured products add to it


def measured(name: str) -> dict[tuple[int, int], float]:
    """(ranks, bytes of one) -> microseconds of a sum with a norm: a column of the table in `tuning/exchange.py`."""
    column = {"library": 3, "one-shot": 4, "two-shot": 5}[name]
    lines = [line.split() for line in str(tuning.__doc__).splitlines()]
    rows = [[float(cell) for cell in cells] for cells in lines if len(cells) == 13 and cells[0].isdigit()]
    assert len(rows) == 8
    return {(ranks, int(row[0]) << 10): row[1 + 6 * half + column] for row in rows for half, ranks in enumerate((2, 4))}


def test_the_cost_of_a_sum_is_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of the exchange that is chosen, and of the others if they were chosen."""
    ways_taken = {"one-shot": (1 << 62, 1 << 62), "two-shot": (0, 1 << 62), "library": (0, 0)}
    times = {name: measured(name) for name in ways_taken}
    for (ranks, num_bytes), one_us in times["one-shot"].items():
        two_us = times["two-shot"][ranks, num_bytes]
        taken_us = two_us if tuning.takes_two_shots(ranks, num_bytes) else one_us
        assert taken_us == min(one_us, two_us)
        assert sum_seconds(ranks, num_bytes) == pytest.approx(taken_us * 1e-6, rel=0.12)
    for name, (one_shot, library) in ways_taken.items():
        monkeypatch.setattr(tuning, "ONE_SHOT_BYTES", dict.fromkeys((2, 4), one_shot))
        monkeypatch.setattr("batchspec.packing.exchange.LIBRARY_BYTES", dict.fromkeys((2, 4), library))
        for (ranks, num_bytes), us in times[name].items():
            if name != "library" or num_bytes >= 1 << 20:
                assert sum_seconds(ranks, num_bytes) == pytest.approx(us * 1e-6, rel=0.3 if name == "library" else 0.12)


def test_many_tokens_are_exchanged_by_the_library() -> None:
    half = LLAMA_70B.sharded(Shard(0, 2))
    assert exchange_seconds(half, BF16, 16384) == pytest.approx(160 * (15e-6 + 16384 * 8192 * 2 / 230e9), rel=0.01)


def test_plan_compares_the_gpu_layouts_and_chooses_the_fastest(job: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with four GPUs; the model and the rows are tiny."""
    write(job, prompt=["x" * 10, "y" * 24])
    made = planned(job)
    assert "GPUs" not in made.text()
    found = plan_command.layouts_of(made.job, made.survey, H200, 4)
    assert [(layout.ranks, layout.replicas) for layout in found] == [(1, 4), (2, 2), (4, 1)]
    said = replace(made, layouts=found).text()
    assert "GPUs         4; cluster.tensor_parallel=1 is fastest\n" in said
    assert "\n  4 copies on 1 GPU: " in said
    assert "\n  1 copy on 4 GPUs: " in said
    job.cluster.tensor_parallel = 2
    assert attentions(planned(job).job.spec)[0].num_heads == 2


def test_a_model_that_cannot_be_sharded_keeps_the_other_layouts(job: RunConfig) -> None:
    write(job, prompt=["x" * 10])
    made = planned(job)
    found = plan_command.layouts_of(made.job, made.survey, H200, 8)
    assert found[-1].reason == "num_attention_heads 4 cannot be cut into 8 equal parts; lower cluster.tensor_parallel"
    assert best(found).ranks < 8


EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.mark.parametrize(
    ("changes", "possible"),
    [
        ({}, [1, 2, 4]),
        ({"intermediate_size": 30}, [1, 2]),
        (EIGHT_HEADS, [1, 2, 4, 8]),
        ({"model_type": "phi3"}, [1, 2, 4]),
        ({"intermediate_size": 384, "head_dim": 128, "quantization_config": FP8_BLOCK}, [1, 2]),
        ({"intermediate_size": 384, "head_dim": 64, "quantization_config": FP8_BLOCK}, [1]),
    ],
)
def test_plan_and_auto_take_what_every_rank_of_a_run_takes(changes: dict[str, Any], possible: list[int], job: RunConfig) -> None:
    found, _ = layouts_on_eight(job, changes)
    assert [layout.ranks for layout in found if layout.seconds is not None] == possible
    for layout in found:
        for rank in range(layout.ranks):
            group: Any = None if layout.ranks == 1 else SimpleNamespace(rank=rank, ranks=layout.ranks)
            if layout.seconds is not None:
                assert open_model(job, group=group).spec.shard == Shard(rank, layout.ranks)
                continue
            with pytest.raises(ConfigError) as refused:
                open_model(job, group=group)
            assert str(refused.value) == layout.reason
            job.cluster.tensor_parallel = layout.ranks
            with pytest.raises(ConfigError) as planned_so:
                planned(job)
            assert str(planned_so.value) == layout.reason


def layouts_on_eight(job: RunConfig, changes: dict[str, Any]) -> tuple[list[GpuLayout], Plan]:
    """Ways to divide eight GPUs for a tiny model of noise."""
    assert job.model.path is not None
    write(job, prompt=["x" * 10])
    (Path(job.model.path) / "config.json").write_text(json.dumps({**MODEL, **changes}))
    job.model.load_format = "dummy"
    made = planned(job)
    return plan_command.layouts_of(made.job, made.survey, H200, 8), made


@pytest.mark.parametrize(
    ("asked", "expected"), [("auto", [(1, 8), (2, 4), (4, 2), (8, 1)]), (2, [(1, 2), (2, 2), (4, 2)]), (9, [])]
)
def test_as_many_copies_are_compared_as_the_job_asks_for(
    asked: str | int, expected: list[tuple[int, int]], job: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cluster.workers`: more of them than the GPUs suffice for is refused by the run."""
    job.cluster.workers = asked
    found, _ = layouts_on_eight(job, EIGHT_HEADS)
    assert [(layout.ranks, layout.replicas) for layout in found] == expected
    monkeypatch.setattr(devices, "visible_gpus", lambda: list("01234567"))
    for ranks in (1, 2, 4, 8):
        config = replace(job, device="cuda", cluster=replace(job.cluster, tensor_parallel=ranks))
        if ranks in dict(expected):
            assert len(devices.devices_of(config)) == ranks * dict(expected)[ranks]
        else:
            with pytest.raises(ConfigError, match=rf"cluster\.workers={asked}: this machine shows 8 GPUs"):
                devices.devices_of(config)


def test_auto_asks_plan_in_a_process_of_its_own(
    job: RunConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = RunConfig()
    config.cluster.tensor_parallel = "auto"
    assert devices.choose_ranks(replace(config, device="cpu")) == 1
    monkeypatch.setattr(devices, "visible_gpus", lambda: ["0", "1"])
    asked: list[list[str]] = []

    def answer(words: list[str], **rest: Any) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        assert json.loads(rest["input"])["cluster"]["tensor_parallel"] == "auto"
        return subprocess.CompletedProcess(words, 0, "a line of a library\n2\n", "")

    monkeypatch.setattr(subprocess, "run", answer)
    assert devices.choose_ranks(config) == 2
    assert asked == [[*python_command("-m", "batchspec.commands.ranks"), "2"]]
    assert "cluster.tensor_parallel=auto: 2 of 2 GPUs for each copy of the model" in capsys.readouterr().err
    refused = subprocess.CompletedProcess([], 2, "", "a warning\nbatchspec: the weights take 300 GB\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: refused)
    with pytest.raises(ConfigError, match=r"^cluster\.tensor_parallel=auto: the weights take 300 GB$"):
        devices.choose_ranks(config)


def test_the_process_that_is_asked_prints_the_number(
    job: RunConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(job, prompt_ids=[[5, 6, 7]] * 3)
    job.output.dir = str(tmp_path / "out")
    assert ranks_command.main(to_json(job), 2) == 0
    assert capsys.readouterr().out == "1\n"


def test_a_layout_that_shards_the_head_is_planned_with_one_rank_s_part(job: RunConfig) -> None:
    """Its weights, and its layer of K/V: as many bytes of a cut head's pages are more pages."""
    write(job, prompt=["x" * 10, "y" * 24])
    job.model.load_format, job.packing.memory_gb, job.packing.max_num_seqs = "dummy", 31_000e-9, 2
    job.draft = DraftConfig(name="eagle3", num_speculative_tokens=3)
    pages, weights = {}, {}
    for cut in (True, False):
        job.ablation.sharded_draft, job.cluster.tensor_parallel = cut, "auto"
        made = planned(job)
        (layout,) = (layout for layout in plan_command.layouts_of(made.job, made.survey, H200, 2) if layout.ranks == 2)
        assert layout.batch is not None
        job.cluster.tensor_parallel = 2
        of_two = planned(job)
        assert of_two.batch is not None
        assert of_two.batch.num_pages == layout.batch.num_pages
        pages[cut] = layout.batch.num_pages
        weights[cut] = of_two.job.drafter.weight_bytes(dtype=torch.float32, device=of_two.job.device)
        group: Any = SimpleNamespace(rank=1, ranks=2)
        held = open_model(job, group=group).drafter.checkpoint
        assert isinstance(held, HeadSpec)
        assert held.shard == (Shard(1, 2) if cut else WHOLE)
    layer = 32 * (2 * (32 + 16 + 16) + 32) + 3 * 32 * 64 + 300 * 32
    assert weights[False] - weights[True] == layer * 4 // 2
    assert pages == {True: 9, False: 7}  # of 3,072 and of 4,096 bytes; nine are enough for both rows


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (8, "num_attention_heads 4 cannot be cut into 8 equal parts; lower cluster.tensor_parallel"),
        (2, "ablation.sharded_draft=true: of the draft head, num_key_value_heads 3 and 2 ranks: "),
    ],
)
def test_plan_and_submit_refuse_what_the_ranks_of_a_run_would(
    ranks: int, said: str, job: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert job.model.path is not None
    write(job, prompt_ids=[[5, 6, 7]])
    design = tiny_design(load_spec(Path(job.model.path)), heads=3, kv_heads=3)
    head = write_head(tmp_path / "head", design, random_tensors(design))
    job.draft = DraftConfig(name="eagle3", num_speculative_tokens=3, path=str(head))
    job.cluster.tensor_parallel, job.ablation.sharded_draft = ranks, True
    for refuse in (planned, partial(open_model, group=cast(Any, SimpleNamespace(rank=1, ranks=ranks)))):
        with pytest.raises(ConfigError) as refused:
            refuse(job)
        assert str(refused.value).startswith(said)
    words = [f"model.path={job.model.path}", f"input.path={job.input.path}", f"output.dir={tmp_path / 'out'}", "draft=eagle3"]
    words += [f"draft.path={head}", f"cluster.tensor_parallel={ranks}", f"cluster.gpus={ranks}", "ablation.sharded_draft=true"]
    assert submit.main(words) == 2
    assert said in capsys.readouterr().err


def test_a_task_of_slurm_has_as_many_gpus_as_its_model_needs(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.path=m", "input.path=i", "output.dir=o", "cluster.tensor_parallel=4", "cluster.gpus=2", "--unseen"]
    assert submit.main(words) == 2
    assert "cluster.gpus=2 is less than cluster.tensor_parallel=4; raise cluster.gpus" in capsys.readouterr().err
