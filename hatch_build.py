"""What a package index shows: README.md, whose links point to the sources' address, and addresses.

`FKJIT_URL`, the address of the repository that is published (`https://github.com/OWNER/fkjit`),
makes links and the addresses "Source", "Documentation", "Changelog" and "Issues". Without it there
are none, and links to files that only a checkout has are taken out of the README.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)]*)\)")
_VERSION = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


def plain(text: str, files: str = "") -> str:
    """The README without pictures, its links below `files`, or their words without an address."""
    return _LINK.sub(rf"[\1]({files}/\2)" if files else r"\1", _PICTURE.sub("", text))


def addresses(url: str, files: str) -> dict[str, str]:
    """`project.urls`."""
    return {
        "Source": url,
        "Documentation": f"{files}/docs",
        "Changelog": f"{files}/docs/CHANGELOG.md",
        "Issues": f"{url}/issues",
    }


class Readme(MetadataHookInterface):
    """Puts both into the package's metadata."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling."""
        root, url, files = Path(self.root), os.environ.get("FKJIT_URL", "").rstrip("/"), ""
        if url:
            (version,) = _VERSION.findall((root / "fkjit/__init__.py").read_text(encoding="utf-8"))
            files = f"{url}/blob/v{version}"
            metadata["urls"] = addresses(url, files)
        text = (root / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": plain(text, files)}
