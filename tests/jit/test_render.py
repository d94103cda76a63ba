"""Templates: notation, true line numbers, errors at the template's own line, identity."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fkjit import ops
from fkjit.errors import RenderError
from fkjit.jit.render import Rendered, load, render
from fkjit.jit.signature import Argument, signature
from fkjit.spec import KernelSpec, registered

KERNELS = Path(__file__).parents[1] / "data" / "kernels"


def spec_of(source: str, root: Path = KERNELS, **values) -> KernelSpec:
    """A kernel of the test data (or of `root`) whose template sees exactly `values`."""
    return KernelSpec(
        op="test",
        name=Path(source).stem,
        source=source,
        entry=Path(source).stem,
        params=(),
        root=root,
        derive=lambda params: values,
        block=lambda params: (32, 1, 1),
        grid=lambda params, problem: (1, 1, 1),
    )


def plain(template: str, name: str = "kernels_cu/t.cu", **values) -> Rendered:
    return Rendered(name, template, {}, Path("t.cu"), values)


def body(template: str, **values) -> str:
    """The rendered text without its #line lines."""
    lines = plain(template, **values).text.split("\n")
    return "\n".join(line for line in lines if not line.startswith("#line"))


def true_lines(text: str) -> list[tuple[int, str]]:
    """(line the compiler believes in, content) of every line of a rendered text."""
    result, number = [], 0
    for line in text.split("\n"):
        mark = re.fullmatch(r'#line (\d+) "kernels_cu/t\.cu"', line)
        number = int(mark[1]) if mark else number + 1
        if not mark:
            result.append((number - 1, line))
    return result


def test_values_are_written_as_cuda_writes_them():
    values = {"n": 64, "flag": True, "off": False, "kind": "fp16", "x": 0.5}
    text = body("int a = ${n}; ${flag} ${off} ${kind} ${x}f ${n // 16} ${'y' if flag}\n", **values)
    assert text == "int a = 64; true false fp16 0.5f 4 y\n"


@pytest.mark.parametrize(
    "line",
    [
        'asm volatile("{%0,%1}" : : "r"(a), "r"(b));',
        "float2 z[] = {{0.f, 0.f}};",
        "int m = a % b; {% x %} {# y #}",
        'printf("//% if x"); int a = 1;  //% else',
        "/* plain comment */ // and another",
        "$L__BB0_2: x = a #b;",
    ],
)
def test_cuda_that_looks_like_jinja_is_left_alone(line):
    assert body(f"  {line}\n") == f"  {line}\n"


def test_statements_choose_code():
    template = (
        "a\n//% if causal\nb\n//% elif n > 2\nc\n  //% else\nd\n//% endif\n"
        "//%for i in range(n)\ne${i}\n//%endfor\n//% set k = n * 2\nf${k}\n"
    )
    assert body(template, causal=True, n=1) == "a\nb\ne0\nf2\n"
    assert body(template, causal=False, n=3) == "a\nc\ne0\ne1\ne2\nf6\n"
    assert body(template, causal=False, n=0) == "a\nd\nf0\n"


def test_a_comment_of_ours_disappears_and_its_lines_stay():
    assert body("a /*# ${nothing} #*/ b\n/*# two\n//% if lines\n#*/ c\n") == "a  b\n\n\n c\n"


def test_windows_line_ends_and_a_missing_last_one_make_no_difference(tmp_path):
    template = 'int a = ${n};\n//% if n\nint b;\n//% endif\nextern "C" int c;'
    texts = set()
    for stem, data in {
        "u": template + "\n",
        "w": template.replace("\n", "\r\n"),
        "e": template,
    }.items():
        (tmp_path / stem).mkdir()
        (tmp_path / stem / "t.cu").write_bytes(data.encode())
        rendered = render(spec_of("t.cu", tmp_path / stem, n=1), {})
        texts.add(rendered.text.replace(f'"{stem}/', '"x/'))
    assert texts == {
        '#line 1 "x/t.cu"\nint a = 1;\n#line 3 "x/t.cu"\nint b;\n'
        '#line 5 "x/t.cu"\nextern "C" int c;\n'
    }


def test_the_name_is_the_last_folder_and_the_source(tmp_path):
    (tmp_path / "mine" / "sub").mkdir(parents=True)
    (tmp_path / "mine" / "sub" / "t.cu").write_text("int a;\n")
    rendered = render(spec_of("sub/t.cu", tmp_path / "mine"), {})
    assert rendered.name == "mine/sub/t.cu"
    assert rendered.where == tmp_path / "mine" / "sub" / "t.cu"
    assert rendered.text == '#line 1 "mine/sub/t.cu"\nint a;\n'


@settings(deadline=None)
@given(
    st.recursive(
        st.lists(st.sampled_from(["code", "comment", "set"]), max_size=3),
        lambda inner: st.lists(
            st.tuples(st.sampled_from(["if", "else", "for"]), st.integers(0, 2), inner), max_size=3
        ),
        max_leaves=8,
    )
)
def test_every_line_keeps_its_number_whatever_stands_around_it(tree):
    lines: list[str] = []

    def add(node):
        for item in node:
            if item == "code":
                lines.append(f"line {len(lines) + 1};")
            elif item == "comment":
                lines.extend(["/*# a", "b #*/"])
            elif item == "set":
                lines.append("//% set a = 1")
            else:
                kind, count, inner = item
                head = f"for i in range({count})" if kind == "for" else f"if {count} > 0"
                lines.append(f"//% {head}")
                add(inner)
                if kind == "else":
                    lines.append("//% else")
                    add(inner)
                lines.append("//% endfor" if kind == "for" else "//% endif")
                lines.append(f"line {len(lines) + 1};")

    add(tree)
    text = plain("\n".join(lines) + "\n").text
    marked = [(number, line) for number, line in true_lines(text) if line.startswith("line")]
    assert all(line == f"line {number};" for number, line in marked)
    assert len(marked) >= sum(not isinstance(item, str) for item in tree)


@pytest.mark.parametrize(
    ("template", "line", "part"),
    [
        ("a\nint b = ${blok};\nc\n", 2, "'blok' is undefined (values of this kernel: block, n)"),
        ("a\nb\n//% if missing > 2\nc\n//% endif\n", 3, "'missing' is undefined"),
        ("a\n${block.__class__}\n", 2, "access to attribute '__class__'"),
        ("a\n//% set x = cycler.__init__.__globals__\n${x}\n", 2, "is unsafe"),
        ("a\n//% for i in range(1000000)\n//% endfor\n", 2, "Range too big"),
        ("a\n//% for i in range(n)\nb\n${i.x}\n//% endfor\n", 4, "has no attribute 'x'"),
        ("a\n${n / 0}\n", 2, "division by zero"),
        ("a\nb ${n +} c\n", 2, "unexpected 'end of print statement'"),
        ("a\n//% if n >\nb\n//% endif\n", 2, ""),
        ("a\n//% if n\nb\n", 2, "this '//% if' has no '//% endif'"),
        ("//% if n\n//% endif\na\n//% if n\n//% for i in [1]\n//% endfor\nb\nc\nd\n", 4, "//% if"),
        ("a\n//% for i in [1]\nb\n//% endif\n", 4, "'//% for' of line 2 is ended by '//% endfor'"),
        ("a\n//% else\n", 2, "has no '//% if'"),
        ("a\n//% endif\n", 2, "endif"),
        ("a\n//% macro f(x)\n", 2, "a statement is one of if, elif, else, endif, for, endfor, set"),
        ("a\n//%\nb\n", 2, "a statement is one of"),
        ("a\nb\n${n\n+ 1}\n", 3, "must be closed on the line it begins"),
        ("a\n/*# never closed\nb\n", 2, "comment"),
        ("a\n${None}\n", 2, "no CUDA form for None"),
        ("a\n${'x\\ny'}\n", 2, "no CUDA form for 'x\\ny'"),
    ],
)
def test_an_error_names_the_line_of_the_template_and_shows_it(template, line, part):
    with pytest.raises(RenderError) as info:
        _ = plain(template, n=2, block=64).text
    message = str(info.value)
    assert message.startswith(f"kernels_cu/t.cu:{line}: ")
    assert part in message
    assert f"  > {line:4d} | {template.splitlines()[line - 1]}".rstrip() in message


def test_a_template_that_is_not_there_is_named(tmp_path):
    with pytest.raises(RenderError, match=r"test\.gone: cannot read .*gone\.cu"):
        load(spec_of("gone.cu", tmp_path), {})


def test_headers_are_found_transitively_in_templates_and_beside_the_kernel():
    rendered = render(spec_of("lines.cu", block=64, at=0, bad="", scaled=True), {})
    assert set(rendered.headers) == {"beside.cuh", "prelude.cuh"}
    assert rendered.headers["beside.cuh"].startswith('#line 1 "kernels/beside.cuh"\n// Beside')
    assert rendered.headers["prelude.cuh"].startswith('#line 1 "templates/prelude.cuh"\n')


def test_a_header_we_have_not_is_left_to_nvrtc_and_ours_cannot_be_replaced(tmp_path):
    (tmp_path / "t.cu").write_text('#include "cuda_fp16.h"\n#include "prelude.cuh"\n')
    (tmp_path / "prelude.cuh").write_text("#error mine\n")
    rendered = render(spec_of("t.cu", tmp_path), {})
    assert set(rendered.headers) == {"prelude.cuh"}
    assert "#error" not in rendered.headers["prelude.cuh"]


@pytest.mark.parametrize("notation", ["int a = ${n};", "  //% if n"])
def test_template_notation_in_a_header_is_refused(tmp_path, notation):
    (tmp_path / "t.cu").write_text('#include "h.cuh"\n')
    (tmp_path / "h.cuh").write_text(f"// one\n{notation}\n")
    with pytest.raises(RenderError, match=rf"{tmp_path.name}/h\.cuh:2: a header is plain CUDA"):
        load(spec_of("t.cu", tmp_path, n=1), {})


@pytest.mark.parametrize("include", ['"{}"', "<{}>"])
@pytest.mark.parametrize("inside", ["t.cu", "h.cuh"])
def test_an_absolute_include_is_refused_as_no_key_would_know_its_contents(
    tmp_path, include, inside
):
    (tmp_path / "away.cuh").write_text("int a;\n")
    (tmp_path / "t.cu").write_text('#include "h.cuh"\n')
    (tmp_path / "h.cuh").write_text("int b;\n")
    with (tmp_path / inside).open("a") as file:
        file.write("#include " + include.format(tmp_path / "away.cuh") + "\n")
    with pytest.raises(RenderError, match=rf"{tmp_path.name}/{inside}:2: an #include names a file"):
        load(spec_of("t.cu", tmp_path), {})


def test_an_edited_header_changes_the_identity_though_its_time_and_size_stay(tmp_path):
    (tmp_path / "t.cu").write_text('#include "h.cuh"\n')
    header = tmp_path / "h.cuh"
    header.write_text("int a = 1;\n")
    spec, before = spec_of("t.cu", tmp_path), os.stat(header)
    first = load(spec, {}).identity()
    header.write_text("int a = 2;\n")
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(header).st_mtime_ns == before.st_mtime_ns
    second = load(spec, {}).identity()
    assert {name for name in first if first[name] != second[name]} == {"headers"}


def test_an_edited_template_is_rendered_anew_though_its_time_stays(tmp_path):
    path = tmp_path / "t.cu"
    path.write_text("int a = ${n};\n")
    before, spec = os.stat(path), spec_of("t.cu", tmp_path, n=1)
    assert "int a = 1;" in render(spec, {}).text
    path.write_text("int b = ${n};\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "int b = 1;" in render(spec, {}).text


def test_identity_tells_values_apart_and_holds_no_path(tmp_path):
    (tmp_path / "t.cu").write_text("int a = ${n};\n")
    ways = [1, 2, "1", True, 1.0, [1]]
    identities = [load(spec_of("t.cu", tmp_path, n=way), {}).identity() for way in ways]
    assert len({str(identity) for identity in identities}) == len(ways)
    assert str(tmp_path.parent) not in str(identities)


def test_identity_of_values_json_cannot_write_is_that_of_the_text(tmp_path):
    (tmp_path / "t.cu").write_text("int a = ${f(2)};\n")
    one, two, three = (
        load(spec_of("t.cu", tmp_path, f=f), {}).identity()["values"]
        for f in (lambda n: n + 1, lambda n: n + 2, lambda n: n + 1)
    )
    assert one == three != two


def test_a_key_needs_neither_jinja_nor_cupy():
    code = (
        "import sys\n"
        "from tests.jit.test_render import spec_of, load\n"
        "load(spec_of('lines.cu', block=64, at=0, bad='', scaled=True), {}).identity()\n"
        "import fkjit.jit.compile\n"
        "print(sorted({'jinja2', 'cupy', 'torch'} & set(sys.modules)))\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_signature_is_read_with_types_codes_and_const():
    rendered = render(spec_of("lines.cu", block=64, at=0, bad="", scaled=True), {})
    assert signature(rendered, "lines") == (
        Argument("x", "const fp16*", "P", pointer=True, const=True),
        Argument("y", "fp32*", "P", pointer=True, const=False),
        Argument("scale", "float", "f", pointer=False, const=False),
        Argument("n", "int", "i", pointer=False, const=False),
    )
    without = render(spec_of("lines.cu", block=64, at=0, bad="", scaled=False), {})
    assert [argument.name for argument in signature(without, "lines")] == ["x", "y", "n"]


def test_the_signature_of_every_kind_of_argument():
    template = (
        'extern "C" __global__ void other(int a);\n'
        'extern "C" __global__ void __launch_bounds__(${n}, 2)\n'
        "k(const i64* __restrict__ a, // b, c)\n"
        "  long long b, unsigned int c, /* d( */ const Strides d, __grid_constant__ const u64 e,\n"
        "  elem_t *f, fp32 g, const Pair<int, 2>* h, float* const i, unsigned j, double k,\n"
        "  bool l) {}\n"
    )
    arguments = signature(plain(template, n=64), "k")
    assert "".join(argument.name for argument in arguments) == "abcdefghijkl"
    codes = ["P", "q", "I", "qqq", "Q", "P", "f", "P", "P", "I", "d", "?"]
    assert [argument.code for argument in arguments] == codes
    assert [argument.name for argument in arguments if argument.const] == ["a", "h"]
    assert arguments[7].ctype == "const Pair<int, 2>*"


def test_a_kernel_without_arguments_has_an_empty_signature():
    assert signature(plain('extern "C" __global__ void k() {}\n'), "k") == ()


def test_an_argument_of_unknown_size_is_refused_at_its_line():
    template = '//% if 1\n//% endif\nextern "C" __global__ void k(int a,\n  half b) {}\n'
    with pytest.raises(RenderError, match=r"kernels_cu/t\.cu:4: k: argument 'half b' has no type"):
        signature(plain(template), "k")


def test_a_missing_entry_point_is_named():
    with pytest.raises(RenderError, match="has no extern \"C\" __global__ function 'j'"):
        signature(plain('extern "C" __global__ void k() {}\n__global__ void j() {}\n'), "j")


def test_pointers_stand_before_numbers():
    """Tensor maps, pointers, numbers: plans write the addresses of a call in one go."""
    ops.load()
    for spec in registered():
        if spec.root is not None:
            continue
        kinds = {str(sorted(map(str, spec.derive(p).items()))): p for p in spec.variants()}
        for params in list(kinds.values())[:: max(len(kinds) // 8, 1)]:
            given = signature(render(spec, params), spec.entry)
            order = [2 - a.pointer - 2 * a.ctype.endswith("TensorMap") for a in given]
            assert order == sorted(order), (spec.id, params)
