"""Messages of errors: one printable line of limited length, whatever values they name, by construction."""

from __future__ import annotations

import importlib
import json
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchspec
from batchspec.config.compose import compose
from batchspec.config.overrides import overrides_of
from batchspec.console.text import ERROR_CHARS, as_json, error_line, quoted
from batchspec.data.dataset.in_memory import table_of
from batchspec.data.dataset.json_text import members
from batchspec.data.dataset.messages import read_chat
from batchspec.data.dataset.openai_requests import parse_request
from batchspec.errors import BatchspecError, CheckpointError, OneLine
from batchspec.model.adapter_config import read_adapter_config
from batchspec.model.spec import load_spec
from batchspec.records import RowError
from batchspec.structured.grammar import grammar_rules
from batchspec.structured.json_schema.schema import schema_rules
from batchspec.structured.regex import regex_node
from batchspec.text.tokenizer import Tokenizer

ODD = "\n\r\t\x00\x07\x1b\x7f\x85\x9b\u061c\u200b\u200e\u202e\u2028\u2029\u2066\ufeff\ud800\udfff\U000e0041"
HOSTILE = st.one_of(
    st.text(ODD + "ab /'\"\\{}[]=é日", max_size=12), st.text(st.characters(), max_size=12),
    st.sampled_from(["k" * 4000, "a b " * 1000, "\x1b[2J" * 500, "/long" * 500, f"x\n{'y' * 3000}", "\u202e" * 400]),
)
"""Keys, values, paths and ids of someone who wants to be read by a terminal, or to fill it."""


def is_clean(message: str) -> bool:
    return len(message) <= 300 and message.isprintable()


@given(HOSTILE)
def test_a_message_is_one_printable_line_of_limited_length(text: str) -> None:
    line = error_line(text)
    assert is_clean(line)
    assert error_line(line) == line
    assert len(line) <= ERROR_CHARS
    if text.isprintable() and len(text) <= ERROR_CHARS:
        assert line == text.strip()


@given(st.lists(HOSTILE, min_size=1, max_size=4))
def test_values_are_cut_and_never_the_advice_at_the_end(values: list[str]) -> None:
    advice = " are not supported; drop the row or correct it"
    line = str(BatchspecError(f"{quoted(values[0])}: {', '.join(map(quoted, values))}{advice}"))
    assert is_clean(line)
    assert line.endswith(advice)


def test_of_a_long_path_both_ends_are_seen_and_the_sentence_stays_whole() -> None:
    path = f"/data/{'deep/' * 60}prompts.parquet"
    said = "9120 prompt tokens exceed model.max_len 8192; drop the row or set input.overlong=truncate"
    line = error_line(f"{path} row 812 (id 'q-812'): {said}")
    assert line.startswith("/data/deep/")
    assert line.endswith(f"/prompts.parquet row 812 (id 'q-812'): {said}")


@pytest.mark.parametrize(("value", "text", "json_text"), [
    ("a\nb", r"'a\nb'", r'"a\nb"'), ("it's", '''"it's"''', '''"it's"'''), (3, "'3'", "3"),
    ([1, {"a": None}], None, '[1, {"a": null}]'),
    ("\ud800\u2028\x1b\x7f", r"'\ud800\u2028\x1b\x7f'", r'"\ud800\u2028\u001b\u007f"'),
    ("x" * 1000, "'" + "x" * 29 + "..." + "x" * 28 + "'", '"' + "x" * 28 + "..." + "x" * 27 + '"'), ({1, 2}, None, "a set"),
])
def test_a_value_is_shown_in_quotes_or_as_json(value: Any, text: str | None, json_text: str) -> None:
    assert text is None or quoted(value) == text
    assert as_json(value) == json_text


def test_of_a_number_with_thousands_of_digits_the_kind_is_shown() -> None:
    assert (quoted(10**5000), as_json(10**5000)) == ("'a int'", "a int")


def classes() -> Iterator[type[BaseException]]:
    """All exceptions of batchspec."""
    for module in pkgutil.walk_packages(batchspec.__path__, "batchspec."):
        if not module.name.startswith(("batchspec.kernels", "batchspec.conf", "batchspec.__main__")):
            importlib.import_module(module.name)
    open_, found = [Exception], set[type[BaseException]]()
    while open_:
        for sub in open_.pop().__subclasses__():
            open_.append(sub)
            if sub.__module__.startswith("batchspec."):
                found.add(sub)
    return iter(sorted(found, key=str))


INTERNAL = {
    "CutAnswer", "Died", "Full", "GivenUp", "InFlightError", "Killed", "TooLong", "NullNeeded", "Recursive", "TooManyStates",
    "_CallbackFailed", "_Malformed",
}
"""Exceptions of which no one sees the message."""


def test_every_exception_whose_message_is_shown_makes_it_one_line() -> None:
    others = {each.__name__ for each in classes() if not issubclass(each, OneLine)}
    assert others == INTERNAL
    hostile = "x\n\x1b[2J\u202e\ud800" + "k" * 1_000_000 + "; correct it"
    for each in classes():
        if issubclass(each, BatchspecError):
            error = each(hostile)
            assert is_clean(str(error)), each
            assert str(error).endswith("; correct it")
            assert str(pickle.loads(pickle.dumps(error))) == str(error)


@given(HOSTILE)
def test_the_error_of_a_row_is_one_line(text: str) -> None:
    assert is_clean(RowError(code="crash", stage="decode", message=f"row 3 (id {quoted(text)}): {text}", retryable=True).message)


def line_of(body: dict[str, Any], **members: Any) -> str:
    return json.dumps({"custom_id": "1", "url": "/v1/chat/completions", "body": {"messages": [], **body}, **members})


KEYS: tuple[Callable[[str], Any], ...] = (
    lambda text: parse_request(line_of({text: text})), lambda text: parse_request(line_of({}, **{text: text})),
    lambda text: parse_request(line_of({}, url=text)), lambda text: parse_request(line_of({}, custom_id=[text])),
    lambda text: parse_request(line_of({"messages": [{"role": text, text: [{"type": text}]}]})),
    lambda text: parse_request(line_of({"response_format": {"type": text}})),
    lambda text: read_chat([{"from": text, "value": text}]),
    lambda text: read_chat([{"role": text, "content": [{"type": text}]}]),
    lambda text: members(text.encode("utf-8", "surrogatepass")), lambda text: regex_node(f"({text}"),
    lambda text: regex_node(f"(?={text})"), lambda text: schema_rules({"type": text}),
    lambda text: schema_rules({"pattern": f"({text}"}),
    lambda text: table_of({text: [{1, 2}]}), lambda text: table_of([{text: object()}]),
    lambda text: load_spec(Path(text)),
)
OVERRIDES: tuple[Callable[[str], Any], ...] = (
    lambda text: compose([f"model.path={text}", f"{text}=1"]), lambda text: compose(overrides_of({text: text})),
    lambda text: compose(overrides_of({"decode": {text: 1}})), lambda text: compose([f"decode.n={text}"]),
    lambda text: compose([f"+job={text}"]), lambda text: grammar_rules(text),
)


@given(st.sampled_from(KEYS), HOSTILE)
def test_whatever_a_row_a_key_or_a_name_holds_its_error_is_one_line(read: Callable[[str], Any], text: str) -> None:
    said = ""
    try:
        with suppress(OSError):
            read(text)
    except OneLine as error:
        said = str(error)
    assert is_clean(said)


@pytest.mark.parametrize("text", ["k" * 4000, f"a\n{'/long' * 500}", f"é'\x1b[2J={ODD}"], ids=["long", "path", "odd"])
def test_an_error_about_an_override_or_a_grammar_is_one_line(text: str) -> None:
    for read in OVERRIDES:
        with pytest.raises(OneLine) as refused:
            read(text)
        assert is_clean(str(refused.value))


@given(HOSTILE, st.sampled_from(["architectures", "model_type", "hidden_act", "quantization_config", "rope_scaling", "key"]))
def test_an_error_about_a_model_s_folder_is_one_line(tmp_path_factory: pytest.TempPathFactory, text: str, key: str) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    for name in ("config.json", "adapter_config.json", "tokenizer.json", "tokenizer_config.json"):
        values = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", key: {text: [text]}, text: text}
        (folder / name).write_text(json.dumps(values))
    for read in (load_spec, read_adapter_config, Tokenizer):
        with pytest.raises(CheckpointError) as refused:
            read(folder)
        assert is_clean(str(refused.value))
