"""`batchspec.Engine`: a model that is loaded once and serves call after call, in this process or in ranks that it starts.

The shape of its batch is planned once, without rows to survey: from the keys of `packing` that are set, and otherwise as the
planner of jobs does for endless rows of at most model.max_len tokens (`loading.expected_demand`). Longer rows become error rows.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import polars as pl
import pyarrow as pa
import torch
from torch import Tensor

from batchspec.checkpoint.hub import find_model
from batchspec.config.overrides import Options, overrides_of
from batchspec.console import terminal
from batchspec.data.dataset.in_memory import table_of
from batchspec.data.dataset.job_rows import JobOutput
from batchspec.engine.loop.engine import Engine as BatchEngine
from batchspec.engine.loop.totals import EngineTotals
from batchspec.errors import CheckpointError, ConfigError, EngineInUse
from batchspec.job.images import of_engine
from batchspec.job.load.loaded_engine import LoadedEngine
from batchspec.job.prepare import JobModel, open_model, open_output
from batchspec.model.dtype import dtype_name
from batchspec.model.given import GivenWeights
from batchspec.model.kv_calibration import give_scales
from batchspec.model.lora import adapted
from batchspec.model.quant.base import Weights
from batchspec.model.spec import load_spec
from batchspec.model.weights import Checkpoint, judge_model
from batchspec.packed_batch import PackedBatch
from batchspec.packing.input_notes import dropped_note, input_notes
from batchspec.packing.unused import check_samples
from batchspec.process.own_process import OwnProcess
from batchspec.records import Completion
from batchspec.tasks.registry import task_of
from batchspec.warm.call import Call, empty_frame
from batchspec.warm.call_arguments import explains_arguments
from batchspec.warm.conversations import Conversations, NextTurn, with_turns
from batchspec.warm.loading import load, open_warm
from batchspec.warm.options import warm_config
from batchspec.warm.ranks import EngineOfRanks
from batchspec.warm.stream import Stream
from batchspec.warm.tasks import Part, open_part
from batchspec.warm.weights import check_scales, written

KEYS = "batchspec.Engine"
"""What takes the keys of a job, in messages about arguments of calls."""


class Engine:
    """A warm engine; a context manager that closes it.

    overrides  keys of a job: a list, ["model.path=smollm2-135m", "decode.n=4"], or a dictionary, nested or dotted,
               {"model.path": "smollm2-135m", "decode": {"n": 4}}
    job        name of a recipe; its own input, output, cluster and resume keys are not read
    config_dir  folder of recipes of your own, job/NAME.yaml, and groups
    keys       more keys: model={"path": "smollm2-135m"}, draft="eagle3"

    With cluster.tensor_parallel the model is cut over that many GPUs. Each has a process; this process holds no GPU memory. If
    one of them ends or hangs, the call raises RankLost with its name, and the engine has ended.

    The keys are those of a job, and so are columns, error rows and tokens. It serves one call at a time: another one, from any
    thread, raises EngineInUse. Raises ConfigError, CheckpointError and CapacityError as `batchspec run` does.
    """

    @explains_arguments("batchspec.Engine", KEYS)
    def __init__(
        self, overrides: Options = (), *, job: str | None = None, config_dir: str | PathLike[str] | None = None, **keys: Any
    ) -> None:
        config = of_engine(warm_config(overrides_of(overrides, **keys), job, config_dir))
        self._in_use, self._half_loaded, self._own = threading.Lock(), False, OwnProcess()
        self._running: Call | None = None
        self._noted = set[str]()
        self._open_model = open_model(config)
        self._opened = opened = open_warm(self._model)
        self._loaded: LoadedEngine[BatchEngine | EngineOfRanks] | None = None
        self._other: tuple[str, Part] | None = None
        """The task of the last call that gave one, as text, and what that call needed."""
        self._loaded = load(opened) if config.cluster.tensor_parallel == 1 else LoadedEngine(EngineOfRanks(config), opened)

    @property
    def _model(self) -> JobModel:
        """What every call needs before anything else. Raises EngineInUse in a process that was forked from the engine's."""
        self._own.check("this engine")
        return self._open_model

    def __repr__(self) -> str:
        model = self._open_model
        facts = f"model={model.config.model.path!r}, dtype={dtype_name(model.dtype)}, device={model.device.type}"
        if self._loaded is None:
            return f"<batchspec.Engine {facts}, closed>"
        batch = self._loaded.batch
        return f"<batchspec.Engine {facts}, draft={model.config.draft.name}, slots={batch.num_slots}, max_len={batch.max_len}>"

    def __reduce__(self) -> NoReturn:
        # datasets' map would pickle all weights, for a hash.
        raise TypeError("batchspec.Engine is not pickled: it holds a loaded model; make one in each process")

    @property
    def shape(self) -> PackedBatch:
        """The static batch: slots, pages, the longest row."""
        return self._usable.batch

    @property
    def totals(self) -> EngineTotals:
        """Rounds and tokens of all calls, added up while they run."""
        return self._usable.totals

    @explains_arguments("Engine.generate", KEYS)
    def generate(self, data: Any, *, task: str | Options | None = None) -> pl.DataFrame:
        """Completions of every row, in the order of the rows, in the output columns of a job; bad rows are rows with an error.

        data  a table, a list of dictionaries, of texts or of chats; the columns of a job's input; or a `JobOutput`
        task  another one than the engine's, for this call: "rerank", "embed", or keys, {"decode.score": "choices",
              "decode.choice": ["yes", "no"]}. It reads the same weights, and has K/V pages of its own: on a GPU leave memory for
              them by packing.memory_gb
        Raises InputError and ConfigError for a table that a job would refuse, and for a task that needs other weights.
        """
        part = self._part(task)
        table, named = self._rows(data, part)
        if not table.num_rows:
            return empty_frame(part.model, table, part.opened.admission)
        call = self._call(table, named, part, samples=True)
        with self._exclusive(call, part) as engine:
            return call.frame(list(call.run(engine)))

    def _part(self, task: str | Options | None) -> Part:
        """What a call with this task needs. Raises as `generate`, and EngineInUse while another call runs."""
        own = Part(model=self._model, opened=self._opened, loaded=self._usable)
        if task is None:
            return own
        other = self._other
        if other is None or other[0] != repr(task):
            with self._exclusive():
                other = self._other = None  # its memory first
                gc.collect()
                other = self._other = repr(task), open_part(own, task)
        return other[1]

    def __call__(self, table: pa.Table) -> pa.Table:
        """The same for Arrow tables: what `map_batches` of Ray Data calls, with batch_format="pyarrow"."""
        return self.generate(table).to_arrow(compat_level=pl.CompatLevel.oldest())

    @explains_arguments("Engine.stream", KEYS)
    def stream(self, data: Any) -> Stream:
        """The completions as they end, for `for` or `async for`, not in the order of the rows (`row_index`, `sample_index`).

        Raises as `generate`; EngineInUse when iteration begins.
        """
        part = self._part(None)
        table, named = self._rows(data, part)
        if not table.num_rows:
            self._no_rows(table)
            return Stream((_ for _ in ()), lambda: None)
        call = self._call(table, named, part, samples=True)
        stream = Stream(self._completions(call), call.cancelled.set)
        call.stream = weakref.ref(stream)
        return stream

    def _completions(self, call: Call) -> Generator[Completion]:
        with self._exclusive(call) as engine:
            yield from call.run(engine)

    @explains_arguments("Engine.converse", KEYS)
    def converse(self, data: Any, next_turn: NextTurn, *, threads: int = 1) -> pl.DataFrame:
        """Conversations that begin with these rows, all decoded as one stream; one row for each turn, with a column `turn`.

        next_turn  gets a `Turn` (completion, messages, row, number), returns the chat of the next one, or a dictionary of input
                   columns with the chat as `messages`, or None. It is not called after an error. decode.n, or a column n, begins
                   as many conversations with a row
        threads    number of threads that call it while rows decode; with more than one it must be thread-safe
        Raises what next_turn raises, and as `generate`.
        """
        if not (task := task_of(self._model.config)).decodes:
            raise ConfigError(f"{task.asked} writes no answers, which a conversation needs; make another engine")
        part = self._part(None)
        table, named = self._rows(data, part)
        if not table.num_rows:
            return with_turns(self._no_rows(table), [])
        conversations = Conversations(self._call(table, named, part), next_turn, threads)
        with self._exclusive(conversations.call) as engine:
            return conversations.frame(engine)

    def load_weights(self, weights: str | Path | Mapping[str, Tensor]) -> None:
        """Replace the target's weights in place, by others of the same shapes; compiled kernels and captured graphs stay.

        weights  a model folder or hub id with the same config.json, or all tensors by their names in a checkpoint, such as a
                 trainer's state_dict(), on any device
        With model.adapter the weights are those of its base model, and the adapter is merged into them again.
        K/V of earlier calls are dropped; the drafter is not changed. Memory for one more layer is needed meanwhile.
        Raises CheckpointError for other names, shapes or configurations, before anything is changed.
        """
        if self._model.spec.vision is not None:
            raise ConfigError("load_weights replaces the language model alone, and this one reads images; make a new engine")
        with self._exclusive(loads=True) as loaded, ExitStack() as stack:
            engine, self._other = loaded.engine, None  # K/V of the other task are of the old weights too
            if isinstance(engine, EngineOfRanks):
                given = stack.enter_context(self._folder_of(weights))
                engine.rewrite(given, is_checkpoint=not isinstance(weights, Mapping))
                return
            model, scales = self._model, self._model.config.cache.scales
            source: Weights
            if isinstance(weights, Mapping):
                folder = None
                check_scales(model)
                source = GivenWeights(weights, model.spec, dtype=model.dtype, device=model.device)
            else:
                folder = self._same_model(str(weights))
                source = stack.enter_context(Checkpoint(folder, model.spec, dtype=model.dtype, device=model.device))
            source = adapted(source, model.adapter, model.spec)
            self._half_loaded = True
            with engine.changing_target():
                engine.target.rewrite(source)
                if model.spec.has_kv_scales:
                    give_scales(engine.target, None, scales, folder, self._opened.tokenizer)
            self._half_loaded = False

    @contextmanager
    def _folder_of(self, weights: str | Path | Mapping[str, Tensor]) -> Iterator[Path]:
        """A folder from which other processes can read these weights. Raises as `load_weights`."""
        if isinstance(weights, Mapping):
            check_scales(self._model)
            GivenWeights(weights, self._model.spec, dtype=self._model.dtype, device=torch.device("cpu"))
            with written(weights, self._model.folder) as folder:
                yield folder
        else:
            yield self._same_model(str(weights))

    def _same_model(self, path: str) -> Path:
        """The folder of a checkpoint whose config.json equals that of model.path. Raises CheckpointError."""
        files = find_model(path, key="load_weights")
        judge_model(files)
        old, new = load_spec(self._model.folder), load_spec(files.folder)
        different = [item.name for item in fields(old) if getattr(old, item.name) != getattr(new, item.name)]
        different = [name for name in different if name not in ("dtype", "generation")]
        if different:
            raise CheckpointError(
                f"{files.where}: its config.json differs from that of model.path={self._model.config.model.path} in "
                f"{', '.join(different)}; only weights of the same model can be swapped: make an engine from this one"
            )
        files.fetch()
        return files.folder

    def close(self) -> None:
        """Cancel running calls and free the memory; the engine cannot be used again. A second call does nothing, nor does one in
        a process that was forked from the engine's."""
        if not self._own.is_this():
            return
        if (call := self._running) is not None:
            call.give_up()
        with self._in_use:
            if self._loaded is not None and isinstance(self._loaded.engine, EngineOfRanks):
                self._loaded.engine.close()
            self._loaded = self._other = None
        gc.collect()
        if self._model.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _rows(self, data: Any, part: Part) -> tuple[pa.Table, Mapping[str, str | None] | None]:
        """The rows of a call; and input.columns, if it is not the engine's. Raises InputError and ConfigError."""
        if not isinstance(data, JobOutput):
            return table_of(data, part.opened.admission.templates.no_rows), None
        rows = open_output(data, part.model.config)
        self._note(rows.note)
        (shard,) = rows.source.shards(rows.source.num_rows)
        return shard.table, rows.input.columns

    def _call(
        self, table: pa.Table, named: Mapping[str, str | None] | None, part: Part, *, samples: bool = False
    ) -> Call:
        """samples: refuse several completions of a row that would be equal. Conversations may begin with equal answers."""
        call = Call(part.model, part.opened, table, named)
        for _, note in input_notes(call.job.config, call.job.admission, call.job.source, part.opened.tokenizer):
            self._note(note)
        if samples:
            check_samples(call.job.config, call.job.columns, call.job.source)
        return call

    def _note(self, note: str) -> None:
        """Print a line about the input, once and not in each call."""
        if note and note not in self._noted:
            self._noted.add(note)
            terminal.notice(note)

    def _no_rows(self, table: pa.Table) -> pl.DataFrame:
        return empty_frame(self._model, table, self._opened.admission)

    @property
    def _usable(self) -> LoadedEngine[BatchEngine | EngineOfRanks]:
        """What was loaded. Raises EngineInUse if it is closed, has ended as a rank is gone, or belongs to another process."""
        self._own.check("this engine")
        if self._loaded is None:
            raise EngineInUse("this engine is closed; make another one")
        if isinstance(self._loaded.engine, EngineOfRanks):
            self._loaded.engine.check()
        return self._loaded

    @contextmanager
    def _exclusive(
        self, call: Call | None = None, part: Part | None = None, *, loads: bool = False
    ) -> Iterator[LoadedEngine[BatchEngine | EngineOfRanks]]:
        """Within this block the engine, or its part of the call's task, serves this call only. Raises EngineInUse if it is not
        free, and as `_usable`."""
        self._own.check("this engine")  # a fork has a copy of the lock
        if not self._in_use.acquire(blocking=False):
            raise EngineInUse("a call is running or a stream is open; finish or close it: an engine does one call at a time")
        try:
            if self._half_loaded and not loads:
                raise EngineInUse("load_weights failed half-way, and the weights are of two models; load some again")
            usable = self._usable
            other = None if self._other is None else self._other[1].loaded
            if part is not None and part.loaded is not usable and part.loaded is not other:
                raise EngineInUse("another thread changed the weights or the task while this call began; make the call again")
            self._running = call
            yield usable if part is None else part.loaded
        finally:
            self._running = None
            self._in_use.release()
            self._note(dropped_note(self._opened.tokenizer))
