"""A call's arrays: what its kernels write, and what the caller gets back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fkjit.ops.op.request import Output, Request
from fkjit.runtime import interop
from fkjit.runtime.interop import View


def written(request: Request, like: View) -> dict[str, View | None]:
    """All arrays of the kernels, outputs among them: allocated unless the caller gave them."""
    views = dict(request.inputs)
    for name, output in request.outputs.items():
        if output is None:
            views[name] = None
        else:
            views[name] = output.given or interop.new(like, output.shape, output.dtype)
    return views


def returned(request: Request, like: View, views: Mapping[str, View | None]) -> Any:
    """One array, or a tuple of several: the caller's own where he gave one."""
    made = []
    for name, output in request.outputs.items():
        if output is not None and output.returned:
            given, view = output.given, views[name]
            assert view is not None
            if given is None:
                made.append(interop.give_back(like, view.array))
            else:
                made.append(given.array if given.source is None else given.source)
    return made[0] if len(made) == 1 else tuple(made) or None


def into(request: Request, results: Sequence[Any], call: str) -> Request:
    """The request with these contiguous arrays for what it returns, in their order."""
    left = list(results)

    def given(output: Output | None) -> Output | None:
        if output is None or not output.returned:
            return output
        return output._replace(given=interop.view(left.pop(0), call, "a result"))

    outputs = {name: given(output) for name, output in request.outputs.items()}
    return request._replace(outputs=outputs)
