"""What a package index shows of the README: without links to files that only a checkout has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")


def plain(text: str) -> str:
    """The README with the words of links in place of links, and no pictures."""
    return _LINK.sub(r"\1", _PICTURE.sub("", text))


class Readme(MetadataHookInterface):
    """Puts it into the package's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": plain(text)}
