"""What can be wrong with a form of `attention_decode` or `paged_attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fkjit.ops.attention import feature_checks as forms
from fkjit.ops.attention.decode import checks as usual
from fkjit.ops.attention.decode.feature_kernels import kernel
from fkjit.ops.attention.feature_problem import form_bytes
from fkjit.ops.op.op import Request
from fkjit.runtime.interop import View
from fkjit.spec import KernelSpec, Params

_USUAL = 5  # options that a call without a form has


def check_contiguous(views: Mapping[str, View | None], *options: Any) -> Request:
    """A call of attention_decode."""
    return _check(usual.check_contiguous, views, options)


def check_paged(views: Mapping[str, View | None], *options: Any) -> Request:
    """A call of paged_attention."""
    return _check(usual.check_paged, views, options)


def _check(
    check: Callable[..., Request], views: Mapping[str, View | None], options: tuple[Any, ...]
) -> Request:
    _, causal, scale, _, return_lse = options[:_USUAL]
    given = forms.Options(causal, scale, None, return_lse, *options[_USUAL:])
    return check(views, *options[:_USUAL], form=partial(_form, given))


def _form(
    options: forms.Options, call: str, seen: Mapping[str, View], problem: usual.Sizes
) -> tuple[KernelSpec, Params]:
    """The kernel, and what it is compiled for besides; what the form adds to the problem."""
    problem["seqlen_k"] = problem["longest"]
    problem |= {
        "window": forms.window_of(call, options, problem),
        "softcap": forms.softcap_of(call, options.softcap),
        "score_scalars": {name: value for name, _, value in options.score_scalars},
    }
    form = forms.form_of(call, seen, problem, options)
    problem["form_bytes"] = form_bytes(form, seen)
    return kernel(form.text), {"form": form.text}
