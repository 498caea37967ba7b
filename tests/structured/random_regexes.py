"""Random regular expressions of everything that Python's `re` has, texts that may match them, and texts of their automata."""

from __future__ import annotations

import random
import re
import warnings
from typing import Any

from batchspec.structured.char_dfa import CharDfa

ODD = (
    "aAbBkKsSiIzZ019_- \t\n\r\x00\x0b\x1c\x1f\x7f\x85\xa0éÉßẞµμſKİıςσΣıDžͅⒶⓐ٠२1²Ⅷªあ中ー․・\u2028\u3000\ufeff\ud7ff\ue000\uffff"
    "\U00010400\U00010428\U0001d7ce\U0001f600\U0010ffff]^\\[.$|(){}?*+,:=\"'/&~#"
)
"""Characters that classes of Unicode, cases, line breaks and escapes tell apart."""
CLASSES = (r"\d", r"\D", r"\w", r"\W", r"\s", r"\S")
REFUSED = (
    r"(a)\1", "(?P<n>a)(?P=n)", "a++", "a{1,2}+", "(?>ab)", "(?=a)a", "(?!a).", "(?<=a)b", "(?<!a)b", r"\ba", r"\Ba",
    "(a)?(?(1)b|c)", "(?m:^a)", "(?x: a)", r"(?a:\w)",
)
PLAIN_TEXTS = re.compile(r"(?:(?![iksIKS\x1c-\x1f])[\x00-\x7f])*")
"""Texts in which classes of ASCII and of Unicode agree, without letters that have more than a small and a capital form."""


class RandomRegexes:
    """Valid expressions, from a seed. Not every one is supported."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.exact = True
        """Whether the expressions so far hold nothing that is written in a subset of the characters that `re` takes."""

    def pattern(self, *, whole: bool = True) -> str:
        """whole: with what may only stand at the begin of a whole expression, and anchors at its ends."""
        rng = self.random
        while True:
            self.exact = True
            if rng.random() < 0.25:  # one character at a place, which shows the most
                begin, end = rng.choice(("(?i:", "(?:", "(?s:")), ")"
                self.exact = "i" not in begin
                one = rng.choice((self.char_class, self._named, lambda: self._literal(rng.choice(ODD), inside=False)))
                found = begin + one() + end
                found = rng.choice(("{}", "^{}", "^{}$", "^{}{}$", "^a?{}")).replace("{}", found)
            else:
                found = self._alternatives(rng.choice((0, 1, 1, 2, 2, 3)))
            if whole:
                begin = rng.choice(("", "", "", "", "^", r"\A", "(?:^|a)"))
                end = rng.choice(("", "", "", "", "$", r"\Z", "(?:$|b)", "$\n"))
                flags = rng.choice(("",) * 12 + ("(?i)", "(?s)", "(?is)", "(?u)", "(?m)", "(?x)", "(?a)"))
                self.exact &= "i" not in flags
                found = flags + begin + found + end
            if found and valid(found):  # `jsonschema` takes an empty pattern of properties for none
                return found

    def _alternatives(self, depth: int) -> str:
        rng = self.random
        return "|".join(self._sequence(depth) for _ in range(rng.choice((1, 1, 1, 1, 2, 3))))

    def _sequence(self, depth: int) -> str:
        rng = self.random
        return "".join(self._repeated(depth) for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3))))

    def _repeated(self, depth: int) -> str:
        rng, found = self.random, self._atom(depth)
        if rng.random() < 0.65 or not found:
            return found
        low = rng.randint(0, 2)
        counts = (
            "*", "+", "?", f"{{{low}}}", f"{{,{low + 1}}}", f"{{{low},}}", f"{{{low},{low + 2}}}", "{,}", "{}", "{", "{1", "{a}",
            "{1,2,3}", "{ 1}",
        )
        return found + rng.choice(counts) + rng.choice(("", "", "", "?", "(?#x)"))

    def _atom(self, depth: int) -> str:
        rng, kind = self.random, self.random.random()
        if kind < 0.3 and depth:
            return self._group(depth - 1)
        if kind < 0.5:
            return self.char_class()
        if kind < 0.6:
            return self._named()
        if kind < 0.65:
            return "."
        if kind < 0.67:
            return rng.choice(("(?#(c)", "(?:)", "()", "(|a)", "(a||b)"))
        if kind < 0.68:
            return rng.choice(REFUSED)
        if kind < 0.69:
            return rng.choice(("^", "$", r"\Z", r"\A", "(?:a$|b)", "(^a|b)"))
        return self._literal(rng.choice(ODD), inside=False)

    def _group(self, depth: int) -> str:
        rng = self.random
        begin = rng.choice(
            ("(", "(?:", f"(?P<n{rng.randint(0, 999)}>", "(?i:", "(?i:", "(?s:", "(?is:", "(?-i:", "(?i-s:", "(?u:")
        )
        self.exact &= "i" not in begin.partition("-")[0]
        return begin + self._alternatives(depth) + ")"

    def _named(self, *, excluded: bool = False) -> str:
        found = self.random.choice(CLASSES)
        self.exact &= excluded or found.isupper()
        return found

    def _literal(self, char: str, *, inside: bool) -> str:
        """The character as it is, or escaped in one of the ways that `re` reads."""
        rng, code = self.random, ord(char)
        kind = rng.random()
        if kind < 0.06 and code < 0x200:
            octal = f"\\{code:03o}" if code <= 0o377 else re.escape(char)
            return octal if code >= 8 or rng.random() < 0.5 else f"\\0{code:o}"
        if kind < 0.12 and code < 0x100:
            return f"\\x{code:02x}"
        if kind < 0.2 and code < 0x10000:
            return f"\\u{code:04x}"
        if kind < 0.25:
            return f"\\U{code:08x}"
        if kind < 0.28:
            return r"\N{KELVIN SIGN}"
        if kind < 0.29:
            return r"\ud83d" + rng.choice((r"\ude00", ""))
        if kind < 0.32:
            return rng.choice((r"\n", r"\t", r"\r", r"\f", r"\v", r"\a", r"\-", r"\"", r"\/", r"\0"))
        if inside:
            return char if char not in "\\]" and kind < 0.9 else f"\\{char}" if not char.isalnum() else char
        return re.escape(char)

    def char_class(self) -> str:
        """[...]; it may not be valid."""
        rng = self.random
        excluded = rng.random() < 0.45
        parts = [rng.choice("]]-^[")] if rng.random() < 0.15 else []
        for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
            kind = rng.random()
            if kind < 0.3:
                parts.append(self._named(excluded=excluded))
            elif kind < 0.6:
                low, high = sorted(rng.choices(ODD, k=2))
                parts.append(f"{self._literal(low, inside=True)}-{self._literal(high, inside=True)}")
            elif kind < 0.65:
                parts.append(rng.choice((r"\b", "[", "&&", "--", "||", "~~", "[:alpha:", "-", r"\W\d", "a-f0-9", r"\s\S")))
                self.exact &= excluded or not re.search(r"\\[dws]", parts[-1])
            else:
                parts.append(self._literal(rng.choice(ODD), inside=True))
        return f"[{'^' * excluded}{''.join(parts)}{rng.choice(('', '', '', '-'))}]"

    def texts(self, pattern: str, count: int) -> list[str]:
        """Texts put together by the characters of the expression and odd ones; many match short expressions."""
        rng, near = self.random, [char for char in pattern if char not in "\\()[]{}?*+|"] or ["a"]
        near += [other for char in near for other in (char.swapcase(), chr(min(ord(char) + 1, 0xD7FF)))]
        pieces = [*near, *rng.choices(ODD, k=10)]
        return ["", *("".join(rng.choices(pieces, k=rng.choice((1, 1, 1, 2, 2, 3, 4, 6)))) for _ in range(count)), *ODD]

    def samples(self, dfa: CharDfa, count: int) -> list[str]:
        """Texts of random walks to a final state, with a preference for odd characters and ends of ranges."""
        left = _distances(dfa)
        return [self._walk(dfa, left) for _ in range(count)] if dfa.final else []

    def _walk(self, dfa: CharDfa, left: list[int]) -> str:
        rng, state, text = self.random, 0, list[str]()
        while True:
            moves = dfa.moves[state]
            if dfa.final[state] and (not moves or len(text) > 8 or rng.random() < 0.3):
                return "".join(text)
            if len(text) > 8:
                moves = tuple(move for move in moves if left[move[2]] < left[state])
            beyond = [move for move in moves if move[1] > 0x7F]
            low, high, state = rng.choice(beyond if beyond and rng.random() < 0.4 else moves)
            odd = [code for code in map(ord, ODD) if low <= code <= high]
            text.append(chr(rng.choice(odd) if odd and rng.random() < 0.5 else rng.choice((low, high, rng.randint(low, high)))))

    def schema(self, pattern: str, other: str) -> dict[str, Any]:
        """A schema that the texts of patterns, or the keys of an object, decide."""
        schemas: tuple[dict[str, Any], ...] = (
            {"type": "string", "pattern": pattern}, {"type": "string", "not": {"pattern": pattern}},
            {"type": "string", "pattern": pattern, "not": {"pattern": other}},
            {"type": "string", "pattern": pattern, "maxLength": self.random.randint(0, 4)},
            {"type": "string", "allOf": [{"pattern": pattern}, {"pattern": other}]},
            {"type": "string", "pattern": f"^(?!{pattern})"}, {"type": "string", "pattern": f"^(?={pattern}){other}"},
            {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": False},
            {"type": "object", "patternProperties": {pattern: {"type": "null"}}, "additionalProperties": {"type": "boolean"}},
            {"type": "object", "patternProperties": {pattern: {"type": "null"}, other: {"type": ["null", "boolean"]}}},
            {"type": "object", "propertyNames": {"pattern": pattern}, "additionalProperties": {"type": "null"}},
        )
        return self.random.choice(schemas)


def valid(pattern: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            re.compile(pattern)
        except (re.error, OverflowError):
            return False
    return True


def _distances(dfa: CharDfa) -> list[int]:
    """By state the number of characters to a final one."""
    found = [0 if final else len(dfa.final) + 1 for final in dfa.final]
    while True:
        nearer = [min([mine, *(found[to] + 1 for *_, to in moves)]) for mine, moves in zip(found, dfa.moves, strict=True)]
        if nearer == found:
            return found
        found = nearer
