"""A kernel's `.cu` template -> CUDA C++ that NVRTC compiles.

Three notations, all invisible to CUDA: `${x}` for a value, `//% if x` on a line of its own for a
statement (if, elif, else, endif, for, endfor, set) and `/*# … #*/` for a comment that is dropped.
Each statement leaves a `#line` behind, so NVRTC's errors, profilers and Jinja's own errors name the
template's file and line. Headers are plain CUDA and are passed on as they are.

`load` reads the files, which is all a cache key needs; the text is rendered on first use, so a
start from a warm cache never imports Jinja.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fkjit.errors import RenderError
from fkjit.paths import kernels_dir, templates_dir

if TYPE_CHECKING:
    from jinja2 import Environment, Template

    from fkjit.spec import KernelSpec, Params

RENDERER = "1"  # part of every cache key: raise it when the same input gives another text

_STATEMENT = r"(?m)^[ \t]*//%(.*)$"
_KEYWORDS = ("if", "elif", "else", "endif", "for", "endfor", "set")
_COMMENT = r"(?s)/\*#.*?#\*/"
_GUARD = r"\$\{[^}\n]*\bguard\b"
_OPEN_VALUE = r"(?m)\$\{[^}\n]*$"
_INCLUDE = r'(?m)^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"'
_ABSOLUTE = r'(?m)^[ \t]*#[ \t]*include[ \t]*["<](?:/|\\|[A-Za-z]:)'
_BEGIN, _END = "\x02", "\x03"  # the block delimiters Jinja sees: no CUDA source contains them


@dataclass(frozen=True)
class Rendered:
    """One kernel's source for one set of parameters.

    `text` is the CUDA C++, rendered on first use (RenderError); `headers` are all files of ours it
    includes, directly or not, by the name used in `#include "…"`.
    """

    name: str  # "kernels_cu/attention/flash.cu", as errors and profilers show it
    template: str = field(repr=False)  # the .cu file's own text
    headers: Mapping[str, str] = field(repr=False)
    where: Path  # the .cu file
    values: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def text(self) -> str:
        """The rendered source; its first line is `#line 1 "kernels_cu/…"`."""
        return f'#line 1 "{self.name}"\n' + _render_text(self)

    def identity(self) -> dict[str, str]:
        """What decides `text` and the headers, as short strings without any path.

        The template, the values and RENDERER determine the text, so their digests stand for it and
        nothing has to be rendered. Values JSON cannot write are covered by the text itself.
        """
        joined = "".join(f"{len(n)}:{n}{len(t)}:{t}" for n, t in sorted(self.headers.items()))
        try:
            values = json.dumps(dict(self.values), sort_keys=True)
        except TypeError:
            values = "text " + _digest(self.text)
        return {
            "renderer": RENDERER,
            "template": f"{self.name} {_digest(self.template)}",
            "headers": _digest(joined),
            "values": values,
        }

    def window(self, name: str, line: int) -> str:
        """Five lines of the template or header `name` around `line`; "" when it is neither."""
        text = self._text_of(name)
        return "" if text is None else window(text, line)

    def line(self, name: str, number: int) -> str:
        """One line of the template or header `name`; "" when it is neither or has no such line."""
        lines = (self._text_of(name) or "").split("\n")
        return lines[number - 1].strip() if 1 <= number <= len(lines) else ""

    def _text_of(self, name: str) -> str | None:
        if name == self.name:
            return self.template
        begin = f'#line 1 "{name}"\n'
        found = (t.removeprefix(begin) for t in self.headers.values() if t.startswith(begin))
        return next(found, None)


def render(spec: KernelSpec, params: Params) -> Rendered:
    """The kernel's source for these parameters, rendered; RenderError names file and line."""
    rendered = load(spec, params)
    _ = rendered.text
    return rendered


def load(spec: KernelSpec, params: Params, guard: int = 0, text: str | None = None) -> Rendered:
    """What `render` returns, but with the text still to be rendered: enough for a cache key.

    `text`: the template in place of the file's, as an editor has it.
    """
    root = spec.root or kernels_dir()
    where = root / spec.source
    name = f"{root.name}/{Path(spec.source).as_posix()}"
    values = spec.template_values(params, guard)
    text = _read(where, spec.id) if text is None else text
    rendered = load_text(name, text, where, values)
    if spec.shared_layout is not None and not guarded(rendered.template):
        raise RenderError(
            f"{name}: {spec.id} declares a shared_layout, so the template has to leave ${{guard}} "
            "bytes between the arrays of dynamic shared memory"
        )
    return rendered


def guarded(template: str) -> bool:
    """Whether a template leaves `${guard}` bytes between carve-outs of shared memory."""
    return re.search(_GUARD, template) is not None


def load_file(name: str, where: Path, values: Mapping[str, Any], who: str) -> Rendered:
    """The template in the file `where`, as errors and profilers shall call it: `name`."""
    return load_text(name, _read(where, who), where, values)


def load_text(name: str, text: str, where: Path, values: Mapping[str, Any]) -> Rendered:
    """A template's text; headers are looked for in templates/ and in the folder of `where`."""
    text = text if text.endswith("\n") else text + "\n"
    _check_includes(name, text)
    headers = _headers(text, where.parent, name.rpartition("/")[0])
    return Rendered(name, text, headers, where, values)


def window(text: str, line: int) -> str:
    """Lines `line - 2` to `line + 2` of `text` (counted from 1) with numbers and a mark."""
    lines = text.split("\n")
    first, last = max(1, line - 2), min(len(lines), line + 2)
    return "\n".join(
        f"  {'>' if number == line else ' '} {number:4d} | {lines[number - 1]}".rstrip()
        for number in range(first, last + 1)
    )


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def _read(path: Path, who: str) -> str:
    """A source file with its line ends made `\\n` and one at the end."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RenderError(f"{who}: cannot read {path}: {error}") from None
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.endswith("\n") else text + "\n"


def _fail(name: str, text: str, line: int, message: str) -> RenderError:
    text = f"{name}:{line}: {message}\n{window(text, line)}"
    return RenderError(text, f"{name}:{line}")


def _line_of(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def _headers(template: str, beside: Path, folder: str) -> dict[str, str]:
    """Every header of ours that `template` includes, transitively.

    Looked for in templates/, then beside the `.cu`. What is in neither is left to NVRTC, which
    either has it (cuda_fp16.h) or says at which line it was wanted.
    """
    found: dict[str, str] = {}
    wanted = re.findall(_INCLUDE, template)
    while wanted:
        include = wanted.pop()
        for directory, shown in ((templates_dir(), "templates"), (beside, folder)):
            if include in found or not (directory / include).is_file():
                continue
            text = _read(directory / include, include)
            _check_plain(f"{shown}/{include}", text)
            _check_includes(f"{shown}/{include}", text)
            found[include] = f'#line 1 "{shown}/{include}"\n{text}'
            wanted += re.findall(_INCLUDE, text)
    return found


def _check_plain(name: str, text: str) -> None:
    """Headers are not rendered: what looks like template notation in one is a mistake."""
    for pattern, what in ((_STATEMENT, "//%"), (r"\$\{", "${")):
        match = re.search(pattern, text)
        if match:
            raise _fail(
                name,
                text,
                _line_of(text, match.start()),
                f"a header is plain CUDA, {what!r} means nothing in it; use a template argument "
                "or move the line into the kernel's .cu file",
            )


def _check_includes(name: str, text: str) -> None:
    """NVRTC would read an absolute path by itself, and no cache key would know of its contents."""
    match = re.search(_ABSOLUTE, text)
    if match:
        line = _line_of(text, match.start())
        raise _fail(
            name, text, line, "an #include names a file of templates/ or beside the kernel, no path"
        )


def _prepare(name: str, text: str) -> str:
    """The template as Jinja reads it: statements as block tags, each line where it was."""
    open_value = re.search(_OPEN_VALUE, text)
    if open_value:
        line = _line_of(text, open_value.start())
        raise _fail(name, text, line, "a ${…} must be closed on the line it begins")

    bare = re.sub(_COMMENT, lambda match: "\n" * match[0].count("\n"), text)
    _check_closed(name, text, bare)

    def statement(match: re.Match[str]) -> str:
        line = _line_of(bare, match.start())
        words = match[1].split()
        if not words or words[0] not in _KEYWORDS:
            known = ", ".join(_KEYWORDS)
            raise _fail(name, text, line, f"'//%{match[1]}': a statement is one of {known}")
        return f'{_BEGIN}{match[1]} {_END}#line {line + 1} "{name}"'

    return re.sub(_STATEMENT, statement, bare)


def _check_closed(name: str, text: str, bare: str) -> None:
    """Each `if` and `for` has its end; the error is at the one that has not, where Jinja's is at
    the end of the file."""
    open_: list[tuple[str, int]] = []
    for match in re.finditer(_STATEMENT, bare):
        word, line = (match[1].split() or [""])[0], _line_of(bare, match.start())
        if word in ("if", "for"):
            open_.append((word, line))
        elif word in ("elif", "else", "endif", "endfor"):
            if not open_:
                raise _fail(name, text, line, f"'//% {word}' has no '//% if' or '//% for' above it")
            begun, at = open_[-1]
            if word.startswith("end") and word != f"end{begun}":
                wanted = f"'//% {begun}' of line {at} is ended by '//% end{begun}'"
                raise _fail(name, text, line, f"{wanted}, and this is '//% {word}'")
            if word.startswith("end"):
                open_.pop()
    if open_:
        word, line = open_[-1]
        raise _fail(name, text, line, f"this '//% {word}' has no '//% end{word}'")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    # A template that came from elsewhere, in a share file of the playground, is no way into Python.
    return ImmutableSandboxedEnvironment(
        block_start_string=_BEGIN,
        block_end_string=_END,
        variable_start_string="${",
        variable_end_string="}",
        comment_start_string="/*#",
        comment_end_string="#*/",
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
        finalize=_as_cuda,
    )


def _as_cuda(value: Any) -> Any:
    """A value as CUDA writes it: true and false, no None, nothing that would shift lines."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None or (isinstance(value, str) and "\n" in value):
        raise TypeError(f"${{…}} has no CUDA form for {value!r}")
    return value


@lru_cache(maxsize=64)
def _template(name: str, text: str) -> Template:
    """The compiled template, kept by its text: an edited file is always compiled anew."""
    import jinja2

    environment = _environment()
    try:
        code = environment.compile(_prepare(name, text), name=name, filename=name)
    except jinja2.TemplateSyntaxError as error:
        raise _fail(name, text, error.lineno, error.message or "syntax error") from None
    return jinja2.Template.from_code(environment, code, dict(environment.globals))


def _render_text(rendered: Rendered) -> str:
    name, text = rendered.name, rendered.template
    template = _template(name, text)
    try:
        return template.render(rendered.values)
    except Exception as error:  # undefined names, and whatever an expression raises
        known = ", ".join(sorted(rendered.values)) or "none"
        message = f"{error} (values of this kernel: {known})"
        raise _fail(name, text, _template_line(error, name), message) from None


def _template_line(error: BaseException, name: str) -> int:
    """The template's line an exception came from: Jinja names the template in the traceback."""
    line, step = 1, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == name:
            line = step.tb_lineno
        step = step.tb_next
    return line
