"""The process that renders templates of chats and rows, which are untrusted code: in Jinja's sandbox, with limits on CPU time and
memory.

It imports jinja2 and little else, so that it starts soon. It writes {} once it runs: if it ends before, no template is the cause.
Then it reads and answers JSON lines: first {"sources": {name: Jinja}, "date", "strict", "cpu_s", "memory_bytes"}, answered by
{"errors": {name: message}, "reads": {name: variables}}, then for each text {"name", "variables", "limit"}, answered by {"text"},
{"error"}, {"too_long": bytes}, or, of strict templates, {"null": its place in the row}.
"""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, Undefined, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchspec.process.child_process import limit_cpu
from batchspec.process.machine import lower_limit
from batchspec.text.row_values import NullNeeded, read_rows, with_nulls

MAX_CHARS = 1 << 24
"""Maximum length of a rendered text."""
MAX_MESSAGE_CHARS = 400


@dataclass(frozen=True)
class Limit:
    """How long a text may be, or how much of its end is wanted."""

    max_bytes: int | None = None
    """A text with more bytes is too long."""
    left_out: bytes = b""
    """Byte values that max_bytes does not count."""
    keep_chars: int | None = None
    """Only so many characters of the text's end are wanted."""

    def excess(self, text: str) -> int | None:
        """The number of counted bytes if the text is too long, else None."""
        if self.max_bytes is None or 4 * len(text) <= self.max_bytes:
            return None
        size = len(text.encode("utf-8", "surrogatepass").translate(None, self.left_out))
        return size if size > self.max_bytes else None

    def message(self, size: int) -> str:
        return f"{size:,} bytes of prompt (too many to fit, however they are tokenised)"

    def facts(self) -> dict[str, Any]:
        return {"max_bytes": self.max_bytes, "left_out": list(self.left_out), "keep_chars": self.keep_chars}

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Limit:
        return cls(facts["max_bytes"], bytes(facts["left_out"]), facts["keep_chars"])


class _GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_no_json
    )


def _no_json(value: Any) -> NoReturn:
    if isinstance(value, Undefined):
        str(value)  # raises for templates of rows
    raise TypeError(f"a {type(value).__name__} has no JSON form")


def environment(date: str, *, strict: bool = False) -> ImmutableSandboxedEnvironment:
    """The Jinja environment in which transformers renders chat templates (utils/chat_template_utils.py), with a fixed clock.

    date    what strftime_now gives, in ISO format: prompts must not depend on the day of a run
    strict  for templates of rows: what is undefined or null is refused instead of written as nothing or None (`row_values.py`),
            there are neither clock nor chance, and a line break at the end stays
    """
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals["raise_exception"] = _raise_exception
    if strict:
        read_rows(env)
        del env.globals["lipsum"], env.filters["random"]
        return env
    env.globals["strftime_now"] = lambda form: datetime.fromisoformat(date).strftime(form)
    return env


def _compiled(
    sources: dict[str, str], date: str, strict: bool, cpu_s: int
) -> tuple[dict[str, Template], dict[str, str], dict[str, list[str]]]:
    """The templates, what is wrong with others, and the variables and functions that each strict one reads."""
    templates, errors, reads = {}, {}, {}
    for name, source in sources.items():
        limit_cpu(cpu_s)
        try:
            templates[name] = environment(date, strict=strict).from_string(source)
            if strict:
                bare = environment(date, strict=True)
                bare.globals.clear()
                reads[name] = sorted(meta.find_undeclared_variables(bare.parse(source)))
        except Exception as error:  # compiling already evaluates constant expressions, with arbitrary filters
            errors[name] = _message(error)
    return templates, errors, reads


def _rendered(template: Template, request: dict[str, Any], strict: bool, cpu_s: int) -> dict[str, Any]:
    limit_cpu(cpu_s)
    try:
        given = request["variables"]
        text = template.render({name: with_nulls(value, name) for name, value in given.items()} if strict else given)
    except NullNeeded as error:
        return {"null": _message(error)}
    except Exception as error:
        return {"error": _message(error)}
    limit = Limit.of(request["limit"])
    if (size := limit.excess(text)) is not None:
        return {"too_long": size}
    if limit.keep_chars is not None:
        text = text[-limit.keep_chars :]
    if len(text) > MAX_CHARS:
        return {"error": f"it renders {len(text):,} characters, more than the maximum of {MAX_CHARS:,}"}
    return {"text": text}


def _message(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"it needs more than {resource.getrlimit(resource.RLIMIT_AS)[0] >> 20} MiB of memory"
    return (str(error) or type(error).__name__)[:MAX_MESSAGE_CHARS]


def _write(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write({})
    request = json.loads(sys.stdin.buffer.readline())
    cpu_s = request["cpu_s"]
    lower_limit(resource.RLIMIT_AS, request["memory_bytes"])
    strict = request["strict"]
    templates, errors, reads = _compiled(request["sources"], request["date"], strict, cpu_s)
    answer: dict[str, Any] = {"errors": errors, "reads": reads}
    while True:
        _write(answer)
        line = sys.stdin.buffer.readline()
        if not line:
            return
        request = json.loads(line)
        answer = _rendered(templates[request["name"]], request, strict, cpu_s)


if __name__ == "__main__":
    main()
