"""Every row of the input becomes n requests or one row that says why not; no row raises and none is lost."""

from __future__ import annotations

import copy
import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from subprocess import PIPE, Popen
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.config.decode_schema import NoRepeatNgramConfig
from batchspec.config.schema import RunConfig
from batchspec.data.dataset.columns import map_columns
from batchspec.data.dataset.reader import table_source
from batchspec.errors import BadRow, CapacityError, ConfigError, RendererKilled, TokenizerFails
from batchspec.packing.admit import Admission, hash64
from batchspec.packing.predict import PRIOR_ROWS, SHORT_TOKENS, LengthPredictor
from batchspec.packing.prompt_encoder import _refused_as
from batchspec.process.child_process import start_module
from batchspec.process.out_of_memory import OutOfMemoryGuard
from batchspec.records import Completion, Request
from batchspec.text import templates as templates_module
from batchspec.text.templates import Templates
from batchspec.text.tokenizer import Tokenizer
from tests.helpers.models import make_tokenizer
from tests.helpers.stand_ins import ByteTokenizer, small_spec

CHAT = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def job(**changes: Any) -> RunConfig:
    """A job with 64 tokens of room and 16 new tokens; decode__n=2 changes decode.n."""
    config = RunConfig()
    config.model.max_len, config.decode.max_new_tokens = 64, 16
    for name, value in changes.items():
        group, leaf = name.split("__")
        setattr(getattr(config, group), leaf, value)
    return config


def admit(
    table: pa.Table, config: RunConfig | None = None, *, tokenizer: Tokenizer | None = None, **changes: Any
) -> list[Request | Completion]:
    config = config or job(**changes)
    source = table_source(table)
    used = tokenizer or cast(Any, ByteTokenizer())
    columns = map_columns(source.schema, config.input.columns)
    admission = Admission(config, source=source, columns=columns, spec=small_spec(), tokenizer=used)
    return [made for shard in source.shards(2) for made in admission.admit(shard)]


def one_bad(table: pa.Table, **changes: Any) -> Completion:
    """The only outcome of a one-row table, which must be an error row."""
    (made,) = admit(table, **changes)
    assert isinstance(made, Completion)
    assert made.error is not None
    assert made.error.stage == "admission"
    assert "\n" not in made.error.message
    return made


def requests(table: pa.Table, **changes: Any) -> list[Request]:
    made = admit(table, **changes)
    assert all(isinstance(item, Request) for item in made), [item for item in made if isinstance(item, Completion)]
    return cast(list[Request], made)


def prompts(*texts: str | None, **columns: Any) -> pa.Table:
    return pa.table({"id": [f"q{i}" for i in range(len(texts))], "prompt": pa.array(texts, pa.string()), **columns})


def chats(*turns: Any, **columns: Any) -> pa.Table:
    return pa.table({"messages": pa.array(turns, CHAT), **columns})


def user(text: str | None) -> list[dict[str, str | None]]:
    return [{"role": "user", "content": text}]


def test_a_row_becomes_a_request_a_sample_that_shares_its_prompt() -> None:
    first, second, other = requests(prompts("abc", "d", n=pa.array([2, None])), decode__temperature=0.5)
    assert (first.request_id, first.row_index, first.sample_index, first.shard) == ("q0", 0, 0, 0)
    assert (second.request_id, second.sample_index) == ("q0", 1)
    assert first.prompt_ids is second.prompt_ids
    assert first.prompt_ids.dtype == np.int32
    assert first.prompt_ids.tolist() == list(b"abc")
    assert (other.row_index, other.sample_index, other.sampling.temperature) == (1, 0, 0.5)


def test_a_row_s_own_values_have_precedence_over_the_job_s() -> None:
    table = prompts(
        "a", "b", max_new_tokens=pa.array([5, None]), temperature=pa.array([0.7, None]), top_p=pa.array([0.9, None]),
        top_k=pa.array([3, None]), min_p=pa.array([0.1, None]), stop=pa.array([["x"], None]),
    )
    own, usual = requests(table, decode__top_k=7, decode__stop=["END"])
    assert (own.max_new_tokens, own.stop) == (5, ("x",))
    assert (own.sampling.temperature, own.sampling.top_p, own.sampling.top_k, own.sampling.min_p) == (0.7, 0.9, 3, 0.1)
    assert (usual.max_new_tokens, usual.stop, usual.sampling.top_k) == (16, ("END",), 7)


BIAS_KINDS = {
    "text": pa.array(['{"65": -3, "7": 2.5}', None, "{}"]),
    "map": pa.array([[("65", -3.0), ("7", 2.5)], None, []], pa.map_(pa.string(), pa.float64())),
    "map of ids": pa.array([[(65, -3.0), (7, 2.5)], None, []], pa.map_(pa.int64(), pa.float64())),
    "struct": pa.array([{"65": -3.0, "7": 2.5}, None, {}]),
}


@pytest.mark.parametrize("kind", BIAS_KINDS)
def test_penalties_and_biases_of_a_row_replace_the_job_s(kind: str) -> None:
    numbers = {
        "frequency_penalty": pa.array([0.5, None, 0]), "presence_penalty": pa.array([1, None, None]),
        "repetition_penalty": pa.array([1.2, None, None]),
    }
    table = prompts("a", "b", "c", logit_bias=BIAS_KINDS[kind], **numbers)
    own, usual, off = requests(table, decode__logit_bias={9: 1, 8: 0}, decode__frequency_penalty=0.25)
    assert own.sampling.logit_bias == ((7, 2.5), (65, -3.0))
    assert (own.sampling.frequency_penalty, own.sampling.presence_penalty, own.sampling.repetition_penalty) == (0.5, 1, 1.2)
    assert (usual.sampling.logit_bias, usual.sampling.frequency_penalty) == (((9, 1.0),), 0.25)
    assert (off.sampling.logit_bias, off.sampling.frequency_penalty) == ((), 0)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ('{"x": 1}', "logit_bias names 'x', which is not a token id"),
        ('{"-1": 1}', "logit_bias names '-1', which is not a token id"),
        ('{"5": 100.5}', "logit_bias adds 100.5 to token 5, which must be in -100 .. 100"),
        ('{"5": NaN}', "logit_bias adds nan to token 5"),
        ('{"5": true}', "logit_bias adds True to token 5"),
        ('{"5": null}', "logit_bias adds None to token 5"),
        ('{"999999": 1}', "logit_bias names token 999999, outside the vocabulary 0 .. "),
        ("[5]", "logit_bias must be an object, not"),
        (str({str(i): 1 for i in range(1025)}).replace("'", '"'), "logit_bias names 1,025 tokens, and at most 1,024 fit"),
    ],
)
def test_a_bias_that_cannot_be_honoured_is_an_error_row(value: str, said: str) -> None:
    bad = one_bad(prompts("a", logit_bias=pa.array([value])))
    assert bad.error is not None
    assert bad.error.code == "bad_parameter"
    assert said in bad.error.message


def test_biases_of_a_job_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^decode.logit_bias names token 999999, outside the vocabulary"):
        admit(prompts("a"), decode__logit_bias={"999999": 1})


NGRAMS: dict[str, Any] = {
    "text": pa.array(["20", None, '{"ngram_size": 3, "window_size": 50, "whitelist_token_ids": [9, 7]}', "0"]),
    "integers": pa.array([20, None, 3, 0]),
    "floats": pa.array([20.0, None, 3.0, 0.0]),
    "structs": pa.array([
        {"ngram_size": 20, "window_size": None, "whitelist_token_ids": None}, None,
        {"ngram_size": 3, "window_size": 50, "whitelist_token_ids": [9, 7]}, {"ngram_size": 0},
    ]),
}


@pytest.mark.parametrize("kind", NGRAMS)
def test_ngrams_of_a_row_replace_the_whole_group_of_the_job(kind: str) -> None:
    """Keys that a row leaves out have their defaults, not the job's values."""
    table = prompts("a", "b", "c", "d", no_repeat_ngram=NGRAMS[kind])
    group = NoRepeatNgramConfig(ngram_size=8, window_size=300, whitelist_token_ids=[5])
    own, usual, other, off = (one.sampling.no_repeat_ngram for one in requests(table, decode__no_repeat_ngram=group))
    assert own == (20, 100, ())
    assert usual == (8, 300, (5,))
    assert other == ((3, 50, (7, 9)) if kind in ("text", "structs") else (3, 100, ()))
    assert off is None


def test_a_synthetic_end_is_known_to_the_device_alone() -> None:
    ends, capped, usual = requests(prompts("a", "b", "c", synthetic_len=pa.array([5, 99, None])))
    assert [item.synthetic_len for item in (ends, capped, usual)] == [5, 99, None]
    assert [item.device_limit for item in (ends, capped, usual)] == [5, 16, 16]
    assert [(item.max_new_tokens, item.predicted_tokens) for item in (ends, capped)] == [(16, 16)] * 2


def test_a_row_without_stop_ids_is_predicted_at_its_cap() -> None:
    caps = pa.array([200, 300])
    long, longer = requests(prompts("a", "b", max_new_tokens=caps), model__max_len=400, decode__ignore_eos=True)
    assert (long.predicted_tokens, longer.predicted_tokens) == (200, 300)
    for ends in ({"decode__stop": ["END"]}, {"decode__stop_ids": [9]}):
        (early, _) = requests(prompts("a", "b", max_new_tokens=caps), model__max_len=400, decode__ignore_eos=True, **ends)
        assert early.predicted_tokens == 100
    hidden = prompts("a", "b", max_new_tokens=caps, synthetic_len=pa.array([7, 8]))
    assert [item.predicted_tokens for item in requests(hidden, model__max_len=400, decode__ignore_eos=True)] == [100, 150]


def test_min_new_tokens_never_exceeds_the_row_s_own_limit() -> None:
    table = prompts("a", "b", "c", max_new_tokens=[3, 3, None], min_new_tokens=[None, 2, 0])
    assert [request.min_new_tokens for request in requests(table, decode__min_new_tokens=8)] == [3, 2, 0]


@pytest.mark.parametrize(
    ("table", "code", "said"),
    [
        (prompts(None), "null_prompt", "prompt is null"),
        (prompts(""), "empty_prompt", "prompt is empty"),
        (chats(None), "null_prompt", "messages is null"),
        (chats([]), "empty_prompt", "messages is empty"),
        (chats(user(None)), "bad_messages", "message 0 has content None"),
        (chats([{"role": None, "content": "x"}]), "bad_messages", "message 0 has role None"),
        (chats([*user("a"), *user("b")]), "template_error", "roles must alternate"),
        (prompts("a", temperature=[-1.0]), "bad_parameter", "temperature=-1.0 must be in 0 .. 100"),
        (prompts("a", top_p=[float("nan")]), "bad_parameter", "top_p=nan"),
        (prompts("a", max_new_tokens=[0]), "bad_parameter", "max_new_tokens=0 must be at least 1"),
        (prompts("a", max_new_tokens=[64]), "bad_parameter", "leaves no room for a prompt in model.max_len=64"),
        (prompts("a", n=[0]), "bad_parameter", "n=0"),
        (prompts("a", min_new_tokens=[-1]), "bad_parameter", "min_new_tokens=-1 must be at least 0"),
        (prompts("a", min_new_tokens=[17]), "bad_parameter", "min_new_tokens=17 exceeds max_new_tokens=16; lower it"),
        (prompts("a", synthetic_len=[0]), "bad_parameter", "synthetic_len=0 must be at least 1"),
        (prompts("a", synthetic_len=[1.5]), "bad_parameter", "synthetic_len=1.5 must be a whole number"),
        (prompts("a", stop=[[""]]), "bad_parameter", "non-empty strings"),
        (prompts("a", system=["be brief"]), "bad_parameter", "input.chat=true"),
        (prompts("a", template_kwargs=['{"x": 1}']), "bad_parameter", "template_kwargs and final_assistant need a chat"),
        (chats(user("a"), tools=["{"]), "bad_parameter", "tools is text, and it is not JSON"),
        (chats(user("a"), tools=["{}"]), "bad_parameter", "tools must be a list"),
        (prompts("x" * 49), "too_long", "49 prompt tokens + 16 new tokens exceed model.max_len=64"),
        (pa.table({"prompt_ids": [[1, None]]}), "bad_ids", "holds a null"),
        (pa.table({"prompt_ids": [[1.0, 2.5]]}), "bad_ids", "prompt_ids is not a list of whole numbers"),
        (pa.table({"prompt_ids": [[1.0, float("nan")]]}), "bad_ids", "prompt_ids is not a list of whole numbers"),
        (pa.table({"prompt_ids": [[1.0, float("inf")]]}), "bad_ids", "holds inf, outside the vocabulary 0 .. 299"),
        (pa.table({"prompt_ids": [[1, 300]]}), "bad_ids", "holds 300, outside the vocabulary 0 .. 299"),
        (pa.table({"prompt_ids": [[-1]]}), "bad_ids", "holds -1"),
        (pa.table({"prompt_ids": pa.array([[]], pa.list_(pa.int32()))}), "empty_prompt", "prompt_ids is empty"),
        (pa.table({"prompt_ids": pa.array([None], pa.list_(pa.int32()))}), "null_prompt", "prompt_ids is null"),
    ],
)
def test_what_is_wrong_with_a_row_has_a_code_and_a_line(table: pa.Table, code: str, said: str) -> None:
    made = one_bad(table)
    assert made.error is not None
    assert (made.error.code, made.status, made.finish_reason) == (code, "error", "error")
    assert said in made.error.message
    assert made.error.message.startswith("table row 0 (id ")


def test_text_that_is_not_unicode_is_a_bad_row_and_its_neighbours_are_fine() -> None:
    ends = pa.py_buffer(np.array([0, 1, 3], np.int32))
    broken = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"a\xff\xfe")])
    good, bad = admit(pa.table({"prompt": broken}))
    assert isinstance(good, Request)
    assert isinstance(bad, Completion)
    assert bad.error is not None
    assert bad.error.code == "bad_text"


@pytest.fixture(scope="module")
def slow_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Its regular expression takes 2**n steps for n letters a, and the library gives up."""
    folder = make_tokenizer(tmp_path_factory.mktemp("slow"), vocab=290)
    facts = json.loads((folder / "tokenizer.json").read_text())
    slow = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    facts["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [slow, facts["pre_tokenizer"]]}
    (folder / "tokenizer.json").write_text(json.dumps(facts))
    return Tokenizer(folder)


MANY = "a" * 60
"""A text on which slow_tokenizer fails."""


@pytest.mark.parametrize(
    ("table", "more"),
    [
        (prompts("x", MANY), {}),
        (prompts("x", MANY), {"input__chat": True}),
        (prompts("x", "x", bad_words=["y", MANY]), {}),
        (prompts("x", "x", options=[["y"], [MANY]]), {"decode__score": "choices", "input__columns": {"choice": "options"}}),
    ],
    ids=["prompt", "chat", "bad_words", "choice"],
)
def test_a_text_on_which_the_tokenizer_fails_is_a_bad_row_whichever_column_has_it(
    table: pa.Table, more: dict[str, Any], slow_tokenizer: Tokenizer
) -> None:
    good, bad = admit(table, tokenizer=slow_tokenizer, **more)
    assert isinstance(good, Request)
    assert isinstance(bad, Completion)
    assert bad.error is not None
    assert (bad.error.code, bad.error.retryable) == ("bad_text", False)
    assert "retry-limit-in-match" in bad.error.message


@pytest.mark.parametrize("more", [{"decode__bad_words": [MANY]}, {"decode__score": "choices", "decode__choice": ["x", MANY]}])
def test_a_key_on_which_the_tokenizer_fails_refuses_the_job(more: dict[str, Any], slow_tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerFails, match=r"the tokenizer fails on the text .*; correct the text$"):
        admit(prompts("x"), tokenizer=slow_tokenizer, **more)


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_a_machine_without_memory_is_no_reason_to_refuse_a_row(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(self: ByteTokenizer, text: str, **room: Any) -> list[int]:
        raise error

    monkeypatch.setattr(ByteTokenizer, "encode", short)
    with OutOfMemoryGuard() as guard:
        admit(prompts("x"))
    assert guard.message  # so a run goes on with a smaller batch


def test_a_killed_renderer_is_started_again_and_a_row_that_fails_by_it_can_be_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    templates, kills = Templates({"default": "{{ text }}"}, "here"), [1]
    ask = templates._ask

    def killed(line: bytes) -> dict[str, Any]:
        if b"variables" in line and kills[0]:
            kills[0] -= 1
            assert templates._process is not None
            os.kill(templates._process.pid, signal.SIGKILL)
        return ask(line)

    monkeypatch.setattr(templates, "_ask", killed)
    assert templates.render("default", {"text": "hello"}) == "hello"
    kills[0] = 2
    with pytest.raises(RendererKilled, match="the machine has too little memory"):
        templates.render("default", {"text": "hello"})
    assert templates.render("default", {"text": "hello"}) == "hello"

    def encode(self: ByteTokenizer, text: str, **room: Any) -> list[int]:
        raise RendererKilled("the machine has too little memory")

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    bad = one_bad(prompts("x"))
    assert bad.error is not None
    assert (bad.error.code, bad.error.retryable) == ("template_error", True)


def killed_at_start(process: Popen[bytes]) -> Popen[bytes]:
    process.kill()
    process.wait()
    return process


def without_memory(process: Popen[bytes]) -> Popen[bytes]:
    """It ends as Python does when an import raises MemoryError."""
    killed_at_start(process)
    return Popen([sys.executable, "-c", "raise SystemExit(1)"], stdin=PIPE, stdout=PIPE)


def killed_in_its_answer(process: Popen[bytes]) -> Popen[bytes]:
    killed_at_start(process)
    program = """
import os, sys
print("{}", flush=True)
for answer in ('{"errors": {}}\\n', '{"text": "hel'):
    sys.stdin.readline()
    print(answer, end="", flush=True)
os.kill(os.getpid(), 9)
"""
    return Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE)


@pytest.mark.parametrize("fate", [killed_at_start, without_memory, killed_in_its_answer])
def test_a_renderer_that_cannot_start_again_fails_no_row_for_good(
    fate: Callable[[Popen[bytes]], Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The templates compiled at the job's start, in this process or in the one that started it."""
    first, fates = Templates({"default": "{{ text }}"}, "here"), list[Any]()
    first.check()
    templates = copy.copy(first)

    def fated(module: str) -> Popen[bytes]:
        process = start_module(module)
        return fates.pop()(process) if fates else process

    monkeypatch.setattr(templates_module, "start_module", fated)
    fates += [fate]
    assert templates.render("default", {"text": "hello"}) == "hello"
    killed_at_start(cast(Any, templates._process))
    fates += [fate] * 4
    with pytest.raises(BadRow) as caught, _refused_as("chat template"):
        templates.render("default", {"text": "hello"})
    assert (caught.value.retryable, "try resume=error" in str(caught.value)) == (True, True)
    fates.clear()
    assert templates.render("default", {"text": "hello"}) == "hello"


def test_a_renderer_that_is_killed_at_the_start_of_a_job_is_started_again_and_then_ends_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kills = [1]

    def fated(module: str) -> Popen[bytes]:
        kills[0] -= 1
        return killed_at_start(start_module(module)) if kills[0] >= 0 else start_module(module)

    monkeypatch.setattr(templates_module, "start_module", fated)
    Templates({"default": "{{ text }}"}, "here").check()
    kills[0] = 2
    with pytest.raises(CapacityError, match=r"here: .*could not start \(at its start it was killed, probably because .*\); look"):
        Templates({"default": "{{ text }}"}, "here").check()


@pytest.mark.parametrize("code", [1, -signal.SIGSEGV])
def test_no_template_is_blamed_for_a_renderer_that_ends_while_it_starts(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    end = f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
    made = partial(Popen, [sys.executable, "-S", "-c", end], stdin=PIPE, stdout=PIPE)
    monkeypatch.setattr(templates_module, "start_module", lambda _: made())
    with pytest.raises(CapacityError, match=rf"could not start \(at its start its process ended with {code}\); look for a"):
        Templates({"default": "{{ text }}"}, "here").check()


def test_too_long_prompts_are_refused_cut_or_skipped_and_the_cap_is_never_lowered() -> None:
    table = prompts("".join(chr(97 + i % 26) for i in range(60)))
    refused = one_bad(table)
    assert refused.prompt_ids is not None
    assert len(refused.prompt_ids) == 60
    assert one_bad(table, input__on_overlong="skip").status == "skipped"
    (cut,) = requests(table, input__on_overlong="truncate")
    assert cut.max_new_tokens == 16
    assert bytes(cut.prompt_ids.tolist()).decode() == table["prompt"][0].as_py()[-48:]


def test_the_system_column_replaces_or_precedes_and_tools_reach_the_template() -> None:
    tokenizer, table = ByteTokenizer(), chats(
        [{"role": "system", "content": "old"}, *user("a")], user("b"), user("c"),
        system=["new", "new", None], tools=['[{"name": "f"}]', None, None], template_kwargs=[{"k": 1}, None, None],
    )
    config = job(input__template_kwargs={"k": 0, "j": 2})
    source = table_source(table)
    admission = Admission(
        config, source=source, columns=map_columns(source.schema, {}), spec=small_spec(), tokenizer=cast(Any, tokenizer)
    )
    seen = [dict(tokenizer.seen) for shard in source.shards(1) for _ in admission.admit(shard)]
    system = [[turn["content"] for turn in one["messages"] if turn["role"] == "system"] for one in seen]
    assert system == [["new"], ["new"], []]
    assert [one["tools"] for one in seen] == [[{"name": "f"}], None, None]
    assert [one["template_kwargs"] for one in seen] == [{"k": 1, "j": 2}, {"k": 0, "j": 2}, {"k": 0, "j": 2}]


def test_a_prompt_is_one_user_turn_if_the_job_asks_for_chats() -> None:
    (plain,), (wrapped,) = requests(prompts("a")), requests(prompts("a"), input__chat=True)
    assert plain.prompt_ids.tolist() == [97]
    assert wrapped.prompt_ids.tolist() == [256, 97, 257, 256]


def test_stop_ids_are_the_model_s_ends_and_stop_strings_that_are_one_special_token() -> None:
    (request,) = requests(prompts("a"), decode__stop=["<turn>", "\n"], decode__stop_ids=[9])
    assert (request.stop_ids, request.stop) == ((9, 256, 257), ("\n",))
    (request,) = requests(prompts("a"), decode__ignore_eos=True, decode__stop_ids=[9])
    assert request.stop_ids == (9,)


def test_token_ids_need_no_tokenizer_and_stop_strings_do() -> None:
    source = table_source(pa.table({"prompt_ids": [[5, 6]], "stop": pa.array([["x"]])}))
    columns = map_columns(source.schema, {"stop": None})
    admission = Admission(job(), source=source, columns=columns, spec=small_spec(), tokenizer=None)
    ((request,),) = [list(admission.admit(shard)) for shard in source.shards(8)]
    assert isinstance(request, Request)
    assert request.prompt_ids.tolist() == [5, 6]
    admission = Admission(job(), source=source, columns=map_columns(source.schema, {}), spec=small_spec(), tokenizer=None)
    ((made,),) = [list(admission.admit(shard)) for shard in source.shards(8)]
    assert isinstance(made, Completion)
    with pytest.raises(ConfigError, match="need a tokenizer"):
        Admission(job(decode__stop=["x"]), source=source, columns=columns, spec=small_spec(), tokenizer=None)


def test_a_configuration_that_the_model_cannot_serve_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"model.max_len=1024 exceeds the model's own limit of 512"):
        admit(prompts("a"), model__max_len=1024)
    with pytest.raises(ConfigError, match=r"decode.max_new_tokens=600 leaves no room"):
        admit(prompts("a"), model__max_len=None, decode__max_new_tokens=600)
    with pytest.raises(ConfigError, match=r"are 2\d stop ids, at most 16 fit"):
        admit(prompts("a"), decode__stop_ids=list(range(20)))
    with pytest.raises(ConfigError, match=r"stop_ids=\[300\] exceed the vocabulary of 300"):
        admit(prompts("a"), decode__stop_ids=[300])


def test_a_chat_without_a_template_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "has_chat_template", False)
    assert len(requests(prompts("a"))) == 1
    for table, chat in [(chats(user("a")), False), (prompts("a"), True)]:
        with pytest.raises(ConfigError, match=r"set model\.chat_template"):
            admit(table, input__chat=chat)


def test_a_seed_given_back_repeats_each_sample_whatever_the_place_of_the_row() -> None:
    samples = requests(prompts("a", "b"), decode__n=3)
    assert len({request.seed for request in samples}) == 6
    assert [request.seed for request in samples[:3]] == [(base := hash64(0, "q0")), hash64(base, 1), hash64(base, 2)]
    again = requests(prompts(*"aaa", seed=[request.seed for request in samples[:3]]))
    assert [request.seed for request in again] == [request.seed for request in samples[:3]]
    assert requests(prompts("a"), decode__seed=1)[0].seed != samples[0].seed


@given(st.integers(-(2**63), 2**63 - 1), st.text(max_size=8), st.text(max_size=8))
def test_keys_are_int64_and_differ_where_the_parts_differ(seed: int, one: str, other: str) -> None:
    assert -(2**63) <= hash64(seed, one) < 2**63
    assert (hash64(seed, one) == hash64(seed, other)) == (one == other)
    assert hash64(seed, one + other) != hash64(seed, one, other)


row = st.fixed_dictionaries(
    {
        "prompt": st.none() | st.text(max_size=80),
        "n": st.none() | st.integers(-1, 3),
        "max_new_tokens": st.none() | st.integers(-2, 70),
        "temperature": st.none() | st.floats(),
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(row, min_size=1, max_size=5), st.sampled_from(["error", "truncate", "skip"]))
def test_every_row_is_written_once_in_order_whatever_it_holds(rows: list[dict[str, Any]], overlong: str) -> None:
    schema = pa.schema({"prompt": pa.string(), "n": pa.int64(), "max_new_tokens": pa.int64(), "temperature": pa.float64()})
    made = admit(pa.Table.from_pylist(rows, schema), input__on_overlong=overlong)
    places = [(item.row_index, item.sample_index) for item in made]
    assert places == sorted(set(places))
    assert {place for place, _ in places} == set(range(len(rows)))
    for item in made:
        if isinstance(item, Completion):
            assert places.count((item.row_index, 0)) == 1
            assert (item.row_index, 1) not in places
        else:
            assert len(item.prompt_ids) >= 1
            assert len(item.prompt_ids) + item.max_new_tokens <= 64
            assert 1 <= item.predicted_tokens <= item.max_new_tokens


def test_predictions_follow_what_finished_rows_did() -> None:
    predictor = LengthPredictor()
    assert predictor.predict(10) == 10
    assert predictor.predict(1000) == 500
    done = Completion(
        request_id="a", row_index=0, sample_index=0, shard=0, status="ok", finish_reason="stop",
        token_ids=np.zeros(100, np.int32), predicted_tokens=500,
    )
    for _ in range(PRIOR_ROWS):
        predictor.observe(done)
    assert predictor.predict(1000) == 300
    assert predictor.predict(10) == 10
    for nothing in (done.replace(predicted_tokens=SHORT_TOKENS), done.replace(status="error", token_ids=None)):
        predictor.observe(nothing)
    assert predictor.predict(1000) == 300, "rows with a short cap and error rows say nothing"
    for _ in range(200 * PRIOR_ROWS):
        predictor.observe(done.replace(token_ids=np.zeros(1, np.int32)))
    assert predictor.predict(1000) == SHORT_TOKENS + 1, "a row with a long cap is never taken for one with a short cap"


def test_a_prompt_that_just_fits_is_admitted() -> None:
    (fits,) = requests(prompts("x" * 48))
    assert len(fits.prompt_ids) + fits.max_new_tokens == 64
    assert one_bad(prompts("x" * 49)).error.code == "too_long"  # type: ignore[union-attr]


def test_a_seed_of_zero_is_a_seed() -> None:
    (made,) = requests(prompts("a", seed=[0]))
    assert made.seed == 0


def test_a_seed_that_a_float_column_may_have_rounded_is_refused() -> None:
    bad = one_bad(prompts("a", seed=[2.0**60]))
    assert bad.error is not None
    assert "may have lost digits" in bad.error.message


def test_what_the_model_cannot_hold_never_reaches_it() -> None:
    (made,) = requests(prompts("a", top_k=[2**40]))
    assert made.sampling.top_k == small_spec().vocab_size
    small = replace(small_spec(), vocab_size=98)
    source = table_source(prompts("a", "b"))
    admission = Admission(
        job(), source=source, columns=map_columns(source.schema, {}), spec=small, tokenizer=cast(Any, ByteTokenizer())
    )
    first, second = admission.admit(next(source.shards(2)))
    assert isinstance(first, Request)
    assert first.stop_ids == ()  # the tokenizer's end ids lie outside the model
    assert isinstance(second, Completion)
    assert second.error is not None
    assert (second.error.code, "holds 98" in second.error.message) == ("bad_ids", True)


def test_fields_that_only_other_rows_have_are_absent_and_not_null() -> None:
    kwargs = pa.array([{"a": 1, "b": None}, {"a": None, "b": {"c": None, "d": 2}}])
    seen: list[Any] = []

    class Recording(ByteTokenizer):
        def encode_chat(self, messages: Any, *, tools: Any = None, template_kwargs: Any = None, **more: Any) -> list[int]:
            seen.append(template_kwargs)
            return [1]

    table = pa.table({"prompt": ["x", "y"], "template_kwargs": kwargs})
    config, source = job(input__chat=True, input__template_kwargs={"b": 7}), table_source(table)
    admission = Admission(
        config, source=source, columns=map_columns(source.schema, {}), spec=small_spec(), tokenizer=cast(Any, Recording())
    )
    assert len(list(admission.admit(next(source.shards(2))))) == 2
    assert seen == [{"a": 1, "b": 7}, {"b": {"d": 2}}]
