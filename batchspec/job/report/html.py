"""Pieces of HTML for the report. All text is escaped here, except arguments that are documented to be HTML."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from batchspec.console.text import CELL_CHARS, MESSAGE_CHARS, for_terminal, one_line


def facts(values: Mapping[str, Any]) -> str:
    """A list of names and values; values other than strings are shown as JSON."""

    def shown(value: Any) -> str:
        return line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), MESSAGE_CHARS)

    return "<dl>" + "".join(f"<dt>{line(name)}</dt><dd>{shown(value)}</dd>" for name, value in values.items()) + "</dl>"


def table(
    header: Sequence[str], lines: Iterable[Sequence[str]], *, safe: bool = False, texts: bool = False, names: bool = False
) -> str:
    """A table of numbers by a name, the first column. `safe`: the cells are HTML already; `texts`: the last column is text;
    `names`: so is the second."""
    head = "".join(f"<th>{line(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{cell if safe else line(cell)}</td>" for cell in cells) + "</tr>" for cells in lines)
    kind = ' class="reasons"' if texts else ' class="names"' if names else ""
    return f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def figure(title: str, svg: str, caption: str) -> str:
    """A picture with its title and caption; `caption` is HTML."""
    named = svg.replace('role="img"', f'role="img" aria-label="{line(title)}"', 1)
    return f"<figure><h3>{line(title)}</h3>{named}<figcaption>{caption}</figcaption></figure>"


def grid(parts: Iterable[str]) -> str:
    return f'<div class="grid">{"".join(parts)}</div>'


def key(colour: str, label: str) -> str:
    return f'<span class="key"><i style="background: var(--{colour})"></i>{label}</span> '


def text(raw: str) -> str:
    """Text of several lines as HTML. Control characters, also those of text direction, are shown as escape sequences."""
    return escape(for_terminal(raw))


def line(raw: object, limit: int = CELL_CHARS) -> str:
    """A name, an id or a message as HTML: one line, truncated to `limit` characters."""
    return escape(one_line(raw, limit))


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
