"""What the page asks for, read from JSON that may be anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fkjit.arch import Target, target
from fkjit.errors import ParameterError
from fkjit.spec import KernelSpec, Param, find

MOST_TEXT = 256 << 10  # bytes of a template: fkjit's longest has 30 KiB
MOST_JSON = 2 * MOST_TEXT + 4096


@dataclass(frozen=True)
class Variant:
    """One kernel for one target; `text` None: the template as its file has it."""

    spec: KernelSpec
    params: dict[str, Any]
    to: Target
    text: str | None = None


def read(data: bytes) -> Any:
    """JSON of at most MOST_JSON bytes; ParameterError for anything else."""
    if len(data) > MOST_JSON:
        raise ParameterError(f"playground: a request of {len(data):,} bytes; {MOST_JSON:,} allowed")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"playground: the request is not JSON: {error}") from None


def variants(asked: Any) -> list[Variant]:
    """Variant A and, where there is one, B. ParameterError for what is not legal."""
    if not isinstance(asked, Mapping) or not isinstance(asked.get("a"), Mapping):
        raise ParameterError("playground: a request is {'a': a variant, 'b': another or null}")
    both = [asked["a"]] + ([asked["b"]] if isinstance(asked.get("b"), Mapping) else [])
    return [_variant(one) for one in both]


def _variant(asked: Mapping[str, Any]) -> Variant:
    kernel, arch, text = (asked.get(name) for name in ("kernel", "arch", "text"))
    if not isinstance(kernel, str) or not isinstance(arch, str):
        raise ParameterError("playground: a variant has a kernel and an arch, as texts")
    spec = find(kernel[:100])
    to = target(arch)
    if to.kind != "cubin":
        raise ParameterError(f"playground: arch={arch!r} is not a target such as sm_90a")
    params = asked.get("params")
    given = params if isinstance(params, Mapping) else {}
    made = {param.name: _value(spec, param, given.get(param.name)) for param in spec.params}
    if text is not None:
        check_text(text)
    return Variant(spec, made, to, text)


def check_text(text: Any) -> None:
    """ParameterError for a template that is no text, too long, or includes files from elsewhere."""
    if not isinstance(text, str):
        raise ParameterError("playground: a template is text")
    size = len(text.encode("utf-8", "replace"))
    if size > MOST_TEXT:
        raise ParameterError(f"playground: a template of {size:,} bytes; {MOST_TEXT:,} are allowed")
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") and "include" in line and ".." in line:
            raise ParameterError(
                f"playground: line {number}: an #include names a file of templates/ or beside the "
                "kernel, without '..'"
            )


def _value(spec: KernelSpec, param: Param, given: Any) -> Any:
    """The declared value that JSON writes so: [128, 64] -> (128, 64)."""
    text = json.dumps(given)
    for declared in param.values:
        if json.dumps(declared) == text:
            return declared
    raise ParameterError(
        f"playground: {spec.id}: {param.name}={text[:60]} is not one of "
        f"{', '.join(json.dumps(value) for value in param.values)}"
    )
