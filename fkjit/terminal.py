"""What may reach a terminal: text whose every control character is written out."""

from __future__ import annotations

import re

# Control characters but tab and newline (with ESC begin the sequences that a terminal obeys), what
# turns the direction of writing around, other separators of lines, halves of a surrogate pair.
_UNSAFE = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"


def printable(text: str) -> str:
    r"""The text with `\x1b` for an escape character, and so on; tabs and newlines stay."""
    return re.sub(_UNSAFE, lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    r"""The same, with `\n` for a newline: a name cannot begin a line of its own."""
    return printable(text).replace("\n", "\\n")
