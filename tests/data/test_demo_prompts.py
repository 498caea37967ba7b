"""The shipped prompts: what the demo promises to show is in them."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchspec.config.compose import compose
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.reader import open_source
from batchspec.data.dataset.row_ids import check_ids
from batchspec.packing.admit import Admission
from batchspec.records import Completion
from tests.helpers.stand_ins import ByteTokenizer, small_spec

FOLDER = Path(__file__).parents[2] / "conf" / "prompts"


def prompts() -> pa.Table:
    return pq.read_table(FOLDER / "demo.parquet")


def test_the_file_is_what_its_script_writes() -> None:
    made = runpy.run_path(str(FOLDER / "make_demo.py"))["table"]()
    assert made.equals(prompts())


def test_there_are_enough_prompts_of_every_kind() -> None:
    kinds = Counter(prompts()["kind"].to_pylist())
    assert kinds.pop("bad") == 4
    assert kinds.total() >= 64
    assert len(kinds) >= 6
    assert kinds["extraction"] == kinds["code_edit"] == 14
    assert kinds["multi_turn"] >= 6


def test_copying_tasks_have_long_texts_of_their_own() -> None:
    requests = [item["messages"][-1]["content"] for item in prompts().to_pylist() if item["kind"] in ("extraction", "code_edit")]
    assert len(set(requests)) == len(requests)
    assert min(len(request) for request in requests) >= 440  # so that an answer runs past 128 tokens
    assert max(len(request) for request in requests) <= 1400  # a prompt of 420 tokens or less


def test_some_rows_have_values_of_their_own() -> None:
    table = prompts()
    for name in ("max_new_tokens", "temperature", "n", "stop", "seed"):
        assert 2 <= pc.count(table[name]).as_py() < table.num_rows
    assert set(table["n"].to_pylist()) == {None, 2, 3}


def test_four_bad_rows_show_four_errors_and_all_others_are_admitted() -> None:
    config = compose(["+job=demo"])
    source = open_source(config.input)
    columns = map_columns(source.schema, config.input.columns)
    check_ids(source, columns)
    admission = Admission(
        config, source=source, columns=columns, spec=small_spec(max_len=2048), tokenizer=cast(Any, ByteTokenizer())
    )
    made = [item for shard in source.shards(16) for item in admission.admit(shard)]
    bad = {item.request_id: item.error.code for item in made if isinstance(item, Completion) and item.error}
    assert bad == {"bad-00": "empty_prompt", "bad-01": "null_prompt", "bad-02": "bad_parameter", "bad-03": "too_long"}
    assert len({item.row_index for item in made}) == source.num_rows
