"""The rendered source of each kernel, as it was last looked at.

A change of a template shows here as a change of what NVRTC sees; if it was meant, take it over with
`pytest tests/core/test_snapshots.py --snapshot-update` and read the difference before committing
it.
"""

from __future__ import annotations

import pytest

from fkjit import ops
from fkjit.jit.render import render
from fkjit.spec import registered

ops.load()


def ends():
    """The first and the last variant of each kernel: they differ in every parameter."""
    for spec in registered():
        variants = list(spec.variants())
        for params in (variants[0], variants[-1]):
            yield pytest.param(spec, params, id=f"{spec.id}-{spec.label(params)}")


@pytest.mark.parametrize(("spec", "params"), list(ends()))
def test_rendered_source(spec, params, snapshot):
    assert render(spec, params).text == snapshot
