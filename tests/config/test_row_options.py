"""An option of a row is declared once: what reads the declarations agrees about every one of them."""

from __future__ import annotations

from batchspec.config.row_options import ROW_OPTIONS
from batchspec.data.dataset.column_types import COLUMN_TYPES
from batchspec.data.dataset.columns import TYPES
from batchspec.data.dataset.openai_keys import NUMBERS as OF_REQUESTS
from batchspec.packing.row_settings import NUMBERS, READERS, SAMPLING

PROMPT_COLUMNS = {"id", "messages", "prompt", "prompt_ids", "images"}


def test_the_columns_of_the_input_are_the_prompts_and_the_options_of_rows() -> None:
    assert set(TYPES) == PROMPT_COLUMNS | set(ROW_OPTIONS)
    assert {option.column.type for option in ROW_OPTIONS.values()} <= set(COLUMN_TYPES)


def test_every_number_of_a_row_has_a_range() -> None:
    assert {name for name, option in ROW_OPTIONS.items() if option.is_number and not option.declared.advice} == set()


def test_every_option_that_chooses_tokens_is_read_as_a_number_or_by_a_reader_of_its_own() -> None:
    assert set(SAMPLING) <= set(NUMBERS) | set(READERS)
    assert not set(NUMBERS) & set(READERS)


def test_numbers_of_requests_fill_columns_of_numbers() -> None:
    assert all(ROW_OPTIONS[column].is_number for column in OF_REQUESTS.values())
    assert OF_REQUESTS["max_tokens"] == OF_REQUESTS["max_completion_tokens"] == "max_new_tokens"
