"""Text and chats to ids and back: the same as transformers' AutoTokenizer on the same folder."""

from __future__ import annotations

import json
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from batchspec.errors import CheckpointError, TokenizerFails
from batchspec.text import chat_templates, templates
from batchspec.text import tokenizer as tokenizer_module
from batchspec.text.tokenizer import Tokenizer
from tests.helpers.models import CHAT_TEMPLATE, make_tokenizer

TEXTS = [
    "",
    "Hello  world 2024!\n\tdéjà vu – 你好 😀",
    "  leading and trailing  ",
    "1234567890 3.14 1,000",
    "def f(x):\n        return x\r\n",
    "e\u0301 \u00a0 \u200b \U0001f469\u200d\U0001f4bb",
    "<|im_start|>user\nforged<|im_end|>",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And \u00e9\u00e8 \U0001f600?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "a <b> & 'c' \u00e9", "parameters": {}}}]


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tokenizer here has a process of its own for its templates, as outside the tests (tests/helpers/runs.py)."""
    monkeypatch.setattr(chat_templates, "Templates", templates.Templates)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path)


def byte_fallback(folder: Path) -> Path:
    """A tokenizer in the manner of Llama 2 and Mistral: U+2581 for spaces, bytes for unknown characters, a BOS added."""
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Fast

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"Helowrd", "\u2581H", "lo"]
    merges = [("\u2581", "H"), ("l", "o")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Fast(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in pieces[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    named = {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def oracle(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def oracle_chat(folder: Path, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    ids = oracle(folder).apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **options)["input_ids"]
    return list(ids)


def set_template(folder: Path, template: Any) -> Tokenizer:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return Tokenizer(folder)


# --- text


@pytest.mark.parametrize("make", [make_tokenizer, byte_fallback])
@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_are_those_of_transformers(text: str, make: Any, tmp_path: Path) -> None:
    tokenizer, reference = Tokenizer(make(tmp_path)), oracle(tmp_path)
    ids = tokenizer.encode(text)
    assert ids == reference(text)["input_ids"]
    for skip in (True, False):
        expected = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip_special=skip) == expected


@pytest.mark.parametrize("make", [make_tokenizer, byte_fallback])
def test_text_comes_back_from_its_ids(make: Any, tmp_path: Path) -> None:
    tokenizer = Tokenizer(make(tmp_path))
    for text in TEXTS[1:6]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_half_a_character_is_the_replacement_character(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("\U0001f600")
    assert tokenizer.decode(ids[:-1]).endswith("\ufffd")


def test_truncation_and_padding_saved_with_a_tokenizer_are_off(folder: Path) -> None:
    from tokenizers import Tokenizer as Fast

    fast = Fast.from_file(str(folder / "tokenizer.json"))
    fast.enable_truncation(3)
    fast.enable_padding(length=50)
    fast.save(str(folder / "tokenizer.json"))
    assert Tokenizer(folder).decode(Tokenizer(folder).encode(TEXTS[1])) == TEXTS[1]


def test_special_tokens_by_name(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.special_ids == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.encode("<|im_start|>") == [1]
    assert (tokenizer.decode([1, 2]), tokenizer.decode([1, 2], skip_special=False)) == ("", "<|im_start|><|im_end|>")


def test_a_tokenizer_without_an_end_token(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer(folder)
    assert (tokenizer.eos_ids, tokenizer.has_chat_template) == ((), False)


def changed(folder: Path, **keys: Any) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    return folder


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **plain, "special": True, **flags}


DECLARED: list[dict[str, Any]] = [
    {"added_tokens_decoder": {"320": token("<|new|>")}},
    {"added_tokens_decoder": {"321": token("<|b|>"), "320": token("<|new|>", special=False)}},
    {"added_tokens_decoder": {"2": token("<|im_end|>", lstrip=True, rstrip=True)}},
    {"added_tokens_decoder": {"2": token("<|im_end|>", special=False)}},
    {"additional_special_tokens": ["<|new|>"]},
    {"extra_special_tokens": {"image_token": "<|new|>"}},
    {"pad_token": "<|new|>"},
]


@pytest.mark.parametrize("keys", DECLARED)
def test_tokens_that_the_config_declares_are_tokens_as_for_transformers(keys: dict[str, Any], folder: Path) -> None:
    text, theirs = "a <|new|> b <|im_end|>  c", oracle(changed(folder, **keys))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode(text) == theirs(text).input_ids
    assert tokenizer.decode(tokenizer.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)


@pytest.mark.parametrize("declared", [None, {"2": token("<|im_end|>", special=False)}])
def test_a_token_with_a_name_is_special_whatever_its_flag(declared: Any, folder: Path) -> None:
    """So the end of an answer is not in its text. Its other flags stay."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][2] |= {"special": False, "rstrip": True}
    path.write_text(json.dumps(content))
    theirs = oracle(folder if declared is None else changed(folder, added_tokens_decoder=declared))
    tokenizer, text = Tokenizer(folder), "a <|im_end|>  b<|im_start|>"
    assert tokenizer.encode(text) == theirs(text).input_ids
    assert tokenizer.decode([67, 2]) == theirs.decode([67, 2], skip_special_tokens=True) == "a"


def test_older_files_declare_tokens_too(folder: Path) -> None:
    (folder / "added_tokens.json").write_text(json.dumps({"<|new|>": 320, "<|im_end|>": 2}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|new|>"}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("a<|new|>b") == oracle(folder)("a<|new|>b").input_ids
    assert tokenizer.eos_ids == (oracle(folder).eos_token_id,) == (320,)
    older = Tokenizer(changed(folder, added_tokens_decoder={}))
    assert older.eos_ids == (oracle(folder).eos_token_id,) == (2,)


class OtherVersion:
    """The package tokenizers, but for the form in which it writes a tokenizer."""

    __version__ = "9"

    class Tokenizer:
        def __init__(self, same: Any) -> None:
            self._same = same

        @classmethod
        def from_str(cls, text: str) -> OtherVersion.Tokenizer:
            return cls(tokenizers.Tokenizer.from_str(text))

        def to_str(self) -> str:
            return json.dumps(json.loads(self._same.to_str()), indent=3)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._same, name)


def test_a_declared_token_changes_the_fingerprint(folder: Path) -> None:
    before = Tokenizer(folder).fingerprint
    assert Tokenizer(changed(folder, added_tokens_decoder={"2": token("<|im_end|>")})).fingerprint == before
    after = Tokenizer(changed(folder, added_tokens_decoder={"320": token("<|new|>")})).fingerprint
    assert after != before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "tokenizers", OtherVersion)
        assert Tokenizer(folder).fingerprint == after, "another version of tokenizers writes the same tokenizer in another form"
    assert Tokenizer(changed(folder, added_tokens_decoder={"320": token("<|new|>", rstrip=True)})).fingerprint != after


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        (
            {"330": token("<|new|>")},
            'the token "<|new|>" is declared with id 330, but with tokenizer.json it has 320; save the tokenizer',
        ),
        ({"x": token("<|new|>")}, "added_tokens_decoder or added_tokens.json is malformed"),
        ({"320": "<|new|>"}, "added_tokens_decoder or added_tokens.json is malformed"),
        ({"320": {"special": True}}, "added_tokens_decoder or added_tokens.json is malformed"),
        ([1], "added_tokens_decoder or added_tokens.json is malformed"),
    ],
)
def test_a_declaration_that_cannot_be_followed_is_refused_in_one_line(declared: Any, said: str, folder: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer(changed(folder, added_tokens_decoder=declared))
    assert said in str(caught.value)
    assert str(caught.value).isprintable()


NAMES = pytest.mark.parametrize("key", ["eos_token", "pad_token", "additional_special_tokens"])


@NAMES
@pytest.mark.parametrize("value", [{"content": 5}, {"content": ["x"]}, 5, [], {}, [5, None, {}], ""])
def test_a_special_token_that_is_no_text_is_ignored(key: str, value: Any, folder: Path) -> None:
    before = Tokenizer(folder).encode("a 5 ['x'] {}")
    assert Tokenizer(changed(folder, **{key: value})).encode("a 5 ['x'] {}") == before


@NAMES
def test_a_special_token_that_cannot_be_encoded_is_refused_in_one_line(key: str, folder: Path) -> None:
    value = ["\ud800"] if key.startswith("additional") else "\ud800"
    with pytest.raises(CheckpointError, match="is no valid text; correct it"):
        Tokenizer(changed(folder, **{key: value}))


# --- chats


def test_a_chat_is_that_of_transformers(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    assert tokenizer.has_chat_template
    assert tokenizer.encode_chat(CHAT) == oracle_chat(folder, CHAT)
    assert tokenizer.render_chat(CHAT[:2]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_bos_of_a_template_is_not_doubled(tmp_path: Path) -> None:
    tokenizer = Tokenizer(byte_fallback(tmp_path))
    ids = tokenizer.encode_chat(CHAT[1:2])
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert ids == oracle_chat(tmp_path, CHAT[1:2])


@pytest.mark.parametrize(
    "template",
    [
        "{{ tools | tojson }} {{ tools | tojson(indent=2) }}",
        "{% for m in messages %}\n  {% if m.role == 'system' %}\n {% continue %}\n  {% endif %}\n{{ m.content }}\n{% endfor %}",
        "{%- for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}{% endfor %}{{ x }}",
        "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.role %}{% endfor %}{{ ns.last }}",
        "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ sep_token }}{{ documents is none }}{{ tools is none }}{{ mode }}",
        "{{ messages[0].content.upper().split() }}{{ messages | length }}{{ messages[-1]['content'] | trim }}",
        "{{ strftime_now('%%') }}{{ add_generation_prompt }}",
        "{{ dict(a=1) }}{{ range(3) | list }}",
    ],
)
def test_templates_mean_what_they_mean_to_transformers(template: str, folder: Path) -> None:
    tokenizer = set_template(folder, template)
    expected = oracle(folder).apply_chat_template(CHAT, tools=TOOLS, tokenize=False, add_generation_prompt=True, mode="fast")
    assert tokenizer.render_chat(CHAT, tools=TOOLS, template_kwargs={"mode": "fast"}) == expected


def test_a_template_that_refuses_a_chat_is_a_value_error_with_its_message(folder: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ 'a' + 1 }}"
    tokenizer = set_template(folder, template)
    with pytest.raises(ValueError, match=r"^no system role$"):
        tokenizer.encode_chat(CHAT)
    with pytest.raises(ValueError, match="can only concatenate str"):
        tokenizer.encode_chat(CHAT[1:])
    with pytest.raises(ValueError, match="list object has no element 0"):
        tokenizer.encode_chat([])


def test_a_template_cannot_leave_its_sandbox(folder: Path) -> None:
    tokenizer = set_template(folder, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="unsafe"):
        tokenizer.encode_chat(CHAT)
    changed = [dict(message) for message in CHAT]
    with pytest.raises(ValueError, match="unsafe"):
        set_template(folder, "{{ messages.append(1) }}").encode_chat(changed)
    assert changed == CHAT


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''|attr('__class__') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ '{0.__class__.__init__}'.format(messages) }}",
    "{% set f = '{0.__class__.__init__}'.format %}{{ f(messages) }}",
    "{{ ['{0.__class__.__init__}']|map('format', messages)|list }}{{ ('{0.__class__}'|attr('format'))(messages) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}{{ strftime_now.__code__ }}",
    "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context }}",
]


def test_a_template_cannot_reach_python(folder: Path) -> None:
    names = {str(i): template for i, template in enumerate(ESCAPES)}
    sandboxed = templates.Templates(names, "here")
    for name, template in names.items():
        text = ""
        with suppress(ValueError):
            text = sandboxed.render(name, {"messages": CHAT})
        assert not re.search(r"class|function|module|method|code object|Context", text.replace(template, "")), template


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
POWER = "{{ (messages | length + 8) ** 99999999 }}"
DOUBLES = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"


@pytest.mark.second
@pytest.mark.parametrize(
    ("content", "cpu_s", "said"),
    [("loop", 0, "computes for more than"), ("power", 0, "computes for more than"), ("double", 20, "1024 MiB of memory")],
)
def test_a_template_that_loops_or_grows_costs_its_chat_in_bounded_time_and_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, content: str, cpu_s: int, said: str
) -> None:
    monkeypatch.setattr(templates, "CPU_S", cpu_s)
    switch = "{% if messages[0].content == 'loop' %}" + LOOPS + "{% elif messages[0].content == 'power' %}" + POWER
    switch += "{% elif messages[0].content == 'double' %}" + DOUBLES + "{% endif %}fine"
    tokenizer = set_template(folder, switch)
    began = time.monotonic()
    with pytest.raises(ValueError, match=said):
        tokenizer.encode_chat([{"role": "user", "content": content}])
    assert time.monotonic() - began < 60
    assert tokenizer.render_chat(CHAT) == "fine"


def test_the_process_of_templates_has_no_credentials_and_outlives_signals_to_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    tokenizer = Tokenizer(folder)
    before = tokenizer.render_chat(CHAT)
    process = tokenizer.chats._templates._process
    assert process is not None
    assert b"canary" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        process.send_signal(number)
    assert tokenizer.render_chat(CHAT) == before
    assert tokenizer.chats._templates._process is process


@pytest.mark.second
@pytest.mark.parametrize("template", ["{{ x | no_such_filter }}", "{{ 9 ** 99999999 }}"])
def test_a_template_that_cannot_be_compiled_is_refused_before_any_row(
    template: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "CPU_S", 0)
    tokenizer = set_template(folder, template)
    with pytest.raises(CheckpointError, match=r"chat template 'default'.*(no_such_filter|computes).*; set model\.chat_template"):
        assert tokenizer.has_chat_template


def test_without_a_template_a_chat_is_refused(folder: Path) -> None:
    tokenizer = set_template(folder, None)
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match=r"no chat template; set model\.chat_template"):
        tokenizer.encode_chat(CHAT)


TOOL_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}"
    "{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris", "days": [1, None]}])
def test_tools_and_calls_are_rendered_as_transformers_does(arguments: Any, folder: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "tool", "tool_call_id": "c", "content": "x"}
    chat: list[dict[str, Any]] = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [call]}, answer]
    tokenizer = set_template(folder, TOOL_TEMPLATE)
    from transformers import AutoTokenizer

    auto: Any = AutoTokenizer
    as_object = json.loads(arguments) if isinstance(arguments, str) else arguments  # as vLLM gives it to every template
    given = [chat[0], {**chat[1], "tool_calls": [{**call, "function": {"name": "f", "arguments": as_object}}]}, answer]
    expected = auto.from_pretrained(folder).apply_chat_template(given, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert tokenizer.render_chat(chat, tools=TOOLS) == expected
    assert tokenizer.encode_chat(chat, tools=TOOLS) == tokenizer.encode_part(str(expected))


@pytest.mark.parametrize(
    ("written", "rendered"),
    [
        ("{{ c.function.arguments | tojson }}", '{"city": "Paris"}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "city=Paris"),
        ("{% for k, v in c.function.arguments|items %}{{ k }}={{ v }}{% endfor %}", "city=Paris"),
        ("{{ c.function.arguments }}", '{ "city":"Paris"}'),
        (
            "{% set f = c.function %}{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}"
            "{% endif %}",
            '{"city": "Paris"}',
        ),
    ],
)
def test_arguments_that_are_json_text_are_encoded_once(written: str, rendered: str, folder: Path) -> None:
    """OpenAI writes them as text. A template that can write an object gets one, any other one the text."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{ "city":"Paris"}'}}
    chat: list[dict[str, Any]] = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [call]}, CHAT[1]]
    template = "{% for m in messages %}{% for c in m.tool_calls or [] %}" + written + "{% endfor %}{% endfor %}"
    tokenizer = set_template(folder, template)
    assert tokenizer.render_chat(chat) == rendered


def test_variables_that_a_template_ignores_or_that_replace_the_chat_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{% if enable_thinking %}on{% endif %}{{ messages[0].content }}")
    tokenizer = Tokenizer(folder, tmp_path / "own.jinja")
    assert tokenizer.render_chat(CHAT, template_kwargs={"enable_thinking": True, "other": None}) == "onBe brief."
    for wrong in ("enable_thinkng", "thinking", "messages", "tools"):
        with pytest.raises(ValueError, match=wrong):
            tokenizer.encode_chat(CHAT, template_kwargs={wrong: []})
        assert wrong in str(tokenizer.problem_of({wrong: True}))


def test_a_template_without_a_place_for_tools_refuses_them(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    advice = "take them out of the row, or set model.chat_template to a template that writes them"
    with pytest.raises(ValueError, match=f"^it leaves out the tools; {advice}$"):
        tokenizer.encode_chat(CHAT[1:2], tools=TOOLS)
    call = {"role": "assistant", "content": "x", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
    with pytest.raises(ValueError, match=r"it leaves out the tool calls of message 1 \(role assistant\); take"):
        tokenizer.encode_chat([CHAT[1], call, CHAT[1]])
    assert tokenizer.encode_chat(CHAT[1:2], tools=[]) == tokenizer.encode_chat(CHAT[1:2])


@pytest.mark.parametrize("content", ["One, two,", "One, ", "a <|im_end|> b", "\n"])
def test_an_answer_continues_the_last_message(content: str, folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    chat = [CHAT[1], {"role": "assistant", "content": content}]
    before = tokenizer.render_chat(chat[:1])
    assert tokenizer.render_chat(chat, continue_final=True) == before + content
    assert tokenizer.encode_chat(chat, continue_final=True) == tokenizer.encode_part(before + content)
    leaves_out = set_template(folder, "{{ messages[0].content }}")
    with pytest.raises(ValueError, match="leaves out the last message"):
        leaves_out.encode_chat(chat, continue_final=True)


def test_of_several_templates_tools_take_tool_use(folder: Path) -> None:
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    tokenizer = set_template(folder, both)
    assert tokenizer.render_chat(CHAT) == "plain"
    assert tokenizer.render_chat(CHAT, tools=TOOLS) == "with tools"
    assert set_template(folder, both[:1]).render_chat(CHAT, tools=TOOLS) == "plain"


def test_template_files_go_before_the_config_and_the_users_before_all(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("from the file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("from the other file")
    assert Tokenizer(folder).render_chat(CHAT) == "from the file"
    assert Tokenizer(folder).render_chat(CHAT, tools=TOOLS) == "from the other file"
    own = tmp_path / "mine.jinja"
    own.write_text("from the user")
    assert Tokenizer(folder, own).render_chat(CHAT, tools=TOOLS) == "from the user"


# --- errors and fingerprint


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot read it"),
        (lambda folder: (folder / "chat_template.jinja").write_text("a\n{% for %}"), "chat template 'default', line 2"),
        (lambda folder: (folder / "tokenizer.json").write_bytes(b"{\xff"), "tokenizer.json: not UTF-8 at byte 1"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), "chat_template.jinja: not UTF-8 at byte 0"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[" * 99_999), "tokenizer_config.json: nested too deeply"),
        (lambda folder: (folder / "tokenizer_config.json").write_text('{"chat_template": ["x"]}'), "objects with a name"),
    ],
)
def test_a_broken_folder_is_named_in_one_line(break_it: Any, said: str, folder: Path) -> None:
    break_it(folder)
    with pytest.raises(CheckpointError) as caught:
        Tokenizer(folder)
    assert said in str(caught.value)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_template_path(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.chat_template=.*nope\.jinja: no such file"):
        Tokenizer(folder, folder / "nope.jinja")


def test_the_fingerprint_follows_what_decides_ids(folder: Path) -> None:
    before = Tokenizer(folder).fingerprint
    assert Tokenizer(folder).fingerprint == before
    (folder / "README.md").write_text("says nothing")
    assert Tokenizer(folder).fingerprint == before
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert Tokenizer(folder).fingerprint == before
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + " ")
    assert Tokenizer(folder).fingerprint != before


def test_a_decoder_whose_expression_takes_too_many_steps_is_an_error_of_one_line(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path)
    facts = json.loads((folder / "tokenizer.json").read_text())
    slow = {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": "x"}
    facts["decoder"] = {"type": "Sequence", "decoders": [facts["decoder"], {"type": "Fuse"}, slow]}
    (folder / "tokenizer.json").write_text(json.dumps(facts))
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode_part("aab")) == "x"
    ids = tokenizer.encode_part("a" * 60)
    said = r"fails to make text of \d+ tokens \(Onig: .*; correct the decoder in its tokenizer.json"
    with pytest.raises(TokenizerFails, match=said):
        tokenizer.decode(ids)
