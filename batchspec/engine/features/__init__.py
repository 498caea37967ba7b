"""What rows may ask for beyond tokens, and what jobs that decode nothing read. Each is a `RowFeature`
(`engine/slots/row_feature.py`) in a file of its own; `RowFeatures` below has those of a job that decodes.

  stop_strings.py       stop strings in the answer
  thinking.py           thinking budgets, and the parts of an output
  token_kinds.py        kinds of an output's tokens; channels.py: in a model with channels (harmony)
  constraints.py        what finite and lazy constraints share, and finite ones; automaton_places.py: their memory on the device
  lazy_constraints.py   lazy ones: rows that wait for states; lazy_places.py: where these are on the device
  tokens_left.py        rows that have no token left, because of a constraint and of other rules
  last_check.py         a row with a constraint is checked before it becomes a completion
  texts.py              the texts of a finished row, tool calls too; channel_calls.py: those of a model with channels
  logprobs.py           log-probabilities of output tokens
  scoring.py            log-probabilities of prompt tokens, in a batch that does not decode
  states.py             values of hidden states, in such a batch; without_rounds.py: which of the two a task reads
  images.py             images of prompts: their pixels, made by processes before the row enters its slot
  repetition.py         a stop where tokens repeat themselves
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from batchspec.automata.lazy_automaton import Expanding
from batchspec.automata.token_automaton import TokenSymbols
from batchspec.batch.automata import Automata, AutomataCapacity
from batchspec.batch.device_batch import DeviceBatch
from batchspec.batch.images import ImageEncoder, ImagesOnDevice
from batchspec.cache.page_tables import PagePools
from batchspec.engine.features.constraints import FiniteConstraints
from batchspec.engine.features.images import RowImages, examples, expect
from batchspec.engine.features.last_check import LastCheck
from batchspec.engine.features.lazy_constraints import LazyConstraints
from batchspec.engine.features.lazy_places import LazyPlaces
from batchspec.engine.features.logprobs import LogprobReader, Logprobs
from batchspec.engine.features.repetition import RepetitionStop
from batchspec.engine.features.stop_strings import Decode, StopStrings
from batchspec.engine.features.texts import Texts, decode_of_answer
from batchspec.engine.features.thinking import ThinkingBudgets
from batchspec.engine.rounds.records import LogitReader
from batchspec.engine.slots.row_feature import Features, RowFeature
from batchspec.engine.slots.slot_table import SlotTable
from batchspec.images.prepared_images import PreparedImages
from batchspec.packed_batch import ExampleRow
from batchspec.records import Request
from batchspec.tool_calls.split import CallParser


@dataclass(kw_only=True)
class RowFeatures(Features):
    """The features of the rows of a job that decodes.

    decode     token ids -> text; None without a tokenizer
    defers_text  leave the decoding of text to the maker of the table (`Completion.num_undecoded`)
    num_top    log-probabilities are written, with those of so many of the likeliest tokens; None: they are not
    symbols    of the vocabulary: set if rows may have constraints; capacity: the device's memory for these, None for the default
    expanding  set if rows may have lazy constraints
    call_parser  finds the tool calls in answers; None: calls stay text
    image_encoder  encodes images: set if rows may have some; kept_images: embeddings of them that stay on the device;
               prepared: where their pixels come from
    """

    decode: Decode | None = None
    defers_text: bool = False
    num_top: int | None = None
    symbols: TokenSymbols | None = None
    capacity: AutomataCapacity | None = None
    expanding: Expanding | None = None
    call_parser: CallParser | None = None
    image_encoder: ImageEncoder | None = None
    kept_images: int = 0
    prepared: PreparedImages | None = None
    lazy: LazyConstraints | None = field(default=None, init=False)
    """Rows of the present run that follow lazy automata."""

    def __post_init__(self) -> None:
        assert self.expanding is None or self.symbols is not None, "lazy automata need a vocabulary"
        assert (self.image_encoder is None) == (self.prepared is None), "an encoder of images needs pixels"
        if self.symbols is not None and self.capacity is None:
            self.capacity = AutomataCapacity(num_tokens=self.symbols.num_tokens)
        self._places = None if self.capacity is None else LazyPlaces(self.capacity)

    @property
    def reader(self) -> LogitReader | None:
        return None if self.num_top is None else LogprobReader(self.num_top)

    def allocate(self, rows: DeviceBatch) -> None:
        if self.symbols is not None and self.capacity is not None:
            rows.automata = Automata(self.symbols, self.capacity, rows.live.device)
        if self.image_encoder is not None:
            rows.images = ImagesOnDevice(self.image_encoder, rows.live.device, most_rows=self.kept_images)

    def expect(self, requests: Iterable[Request]) -> None:
        if self.prepared is not None:
            expect(self.prepared, requests)

    def examples(self, rows: DeviceBatch, most_tokens: int) -> Iterable[ExampleRow]:
        return examples(rows, most_tokens)

    def begin(self, slots: SlotTable, pools: PagePools) -> tuple[RowFeature, ...]:
        check = None if self.symbols is None else LastCheck(self.symbols, self.expanding)
        stops = StopStrings(self._decode_of)
        features: list[RowFeature] = [ThinkingBudgets(), stops, RepetitionStop()]
        self.lazy = None
        if check is not None and self.capacity is not None:
            features.append(FiniteConstraints(check, self.capacity))
            if self.expanding is not None and self.symbols is not None and self._places is not None:
                self.lazy = LazyConstraints(check, self.expanding, self.symbols, self._places)
                features.append(self.lazy)
        features.append(Texts(self.decode, self.symbols, stops, check, self.call_parser, defers=self.defers_text))
        if self.num_top is not None:
            features.append(Logprobs(slots, self.num_top))
        if self.prepared is not None:  # last: pixels are taken by rows that wait for nothing else
            features.append(RowImages(self.prepared))
        return tuple(features)

    def _decode_of(self, request: Request) -> Decode | None:
        return decode_of_answer(request, self.decode, self.symbols)
