"""Lines of code of kernels and twins: what counts as one, and what a kernel includes."""

from __future__ import annotations

import re

from bench.core import lines, twins
from fkjit import ops
from fkjit.paths import kernels_dir, templates_dir
from fkjit.spec import find, registered

ops.load()

CUDA = """\
/* What it does,
   in two lines. */
#include "prelude.cuh"

//% if causal
constexpr int A = 1;  // a reason
//% endif
  // a comment alone
/*# dropped #*/
const char* text = "// no comment";
asm("{ /* %0 */ }" : : "r"(A));  /* one
 that goes on */ int b;
"""

PYTHON = '''\
"""A docstring
in two lines."""

import triton  # why


@triton.jit
def kernel(
    x,  # [n]
    N: tl.constexpr,
):
    """What it does."""
    # a comment
    y = """text

    that counts, its blank line too"""


@triton.autotune(
    configs=[],
)
@triton.jit(noinline=True)
def other(x): ...


def launch():
    kernel[(1,)](0)
'''


def test_comments_blank_lines_and_docstrings_are_no_code():
    assert lines.cuda(CUDA) == 7
    assert lines.python(PYTHON) == 1 + 8 + 5 + 2
    assert lines.jitted(PYTHON) == 8 + 5


def test_a_kernel_is_counted_with_the_headers_it_includes():
    naive = lines.of_kernel(find("attention.naive"))
    pending, headers = ["attention/naive.cu"], {}
    text = (kernels_dir() / pending[0]).read_text()
    wanted = re.findall(r'#include "([^"]+)"', text)
    while wanted:
        name = wanted.pop()
        if name not in headers:
            headers[name] = (templates_dir() / name).read_text()
            wanted += re.findall(r'#include "([^"]+)"', headers[name])
    assert naive.kernel == lines.cuda(text)
    assert naive.total == naive.kernel + sum(map(lines.cuda, headers.values())) and headers


def test_an_operation_counts_each_header_once_and_its_twin_last():
    found = lines.costs("attention")
    names = [spec.name for spec in registered("attention")]
    assert [line.name for line in found] == [*names, "all kernels", "triton"]
    *kernels, whole, twin = found
    assert whole.kernel == sum(line.kernel for line in kernels)
    shared = sum(line.total - line.kernel for line in kernels)
    assert max(line.total for line in kernels) < whole.total < whole.kernel + shared
    assert 0 < twin.kernel < twin.total == lines.python(twins.source("attention").read_text())


def test_the_table_has_every_operation(capsys):
    lines.main()
    shown = capsys.readouterr().out
    assert {spec.op for spec in registered()} <= set(shown.split())
    assert str(lines.of_twin("attention").total) in shown
