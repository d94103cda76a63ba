"""The playground's routes, an ASGI application."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from fkjit import ops
from fkjit.errors import FkjitError, ParameterError
from fkjit.playground import catalog
from fkjit.playground.guard import Guard
from fkjit.playground.jobs import Jobs
from fkjit.playground.request import MOST_JSON, read, variants
from fkjit.spec import find

STATIC = Path(__file__).parent / "static"
Answer = Callable[[Request], Awaitable[Response]]


def make(token: str, port: int, jobs: Jobs) -> ASGIApp:
    """The application at http://127.0.0.1:`port`/`token`/."""
    pages = Pages(jobs)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await run_in_threadpool(jobs.prepare)
        await run_in_threadpool(_load, jobs)
        yield
        await run_in_threadpool(jobs.close)

    routes = [
        Route("/", pages.index),
        Route("/api/kernels", pages.kernels),
        Route("/api/template", pages.template),
        Route("/api/legal", pages.legal, methods=["POST"]),
        Route("/api/nearest", pages.nearest, methods=["POST"]),
        Route("/api/run", pages.run, methods=["POST"]),
        Route("/api/stop", pages.stop, methods=["POST"]),
        Route("/api/save", pages.save, methods=["POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return Guard(Starlette(routes=routes, lifespan=lifespan), token, port)


def _typed(answer: Callable[..., Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
    """An error of fkjit is status 400 with its text."""

    @wraps(answer)
    async def answered(self: Any, request: Request) -> Response:
        try:
            return await answer(self, request)
        except FkjitError as error:
            return JSONResponse({"error": str(error)}, 400)

    return answered


class Pages:
    """What each route answers."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs

    async def index(self, request: Request) -> Response:
        """The page, with the nonce that its style sheets need."""
        text = (STATIC / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(text.replace("@nonce@", request.state.nonce))

    @_typed
    async def kernels(self, request: Request) -> Response:
        """All kernels with their parameters."""
        found = await run_in_threadpool(catalog.kernels)
        return JSONResponse({"kernels": found, "folder": str(self.jobs.folder)})

    @_typed
    async def template(self, request: Request) -> Response:
        """One kernel's template."""
        name = request.query_params.get("kernel", "")
        return JSONResponse(await run_in_threadpool(catalog.template, name))

    @_typed
    async def legal(self, request: Request) -> Response:
        """Which values of each parameter are legal beside the others."""
        (one,) = variants({"a": await _body(request)})
        return JSONResponse(catalog.legal(one.spec, one.params, one.to.name))

    @_typed
    async def nearest(self, request: Request) -> Response:
        """A legal variant with as much of what is wanted as there is."""
        asked = await _body(request)
        spec = find(str(asked.get("kernel"))[:100])
        found = await run_in_threadpool(
            catalog.nearest, spec, asked.get("params"), str(asked.get("arch"))
        )
        return JSONResponse({"params": found})

    @_typed
    async def run(self, request: Request) -> Response:
        """The events of one or two variants, as they come."""
        asked = await _body(request)
        await run_in_threadpool(variants, asked)  # refused here, before a worker is taken
        events = self.jobs.run(_page(asked), asked)
        return StreamingResponse(events, media_type="text/event-stream")

    @_typed
    async def stop(self, request: Request) -> Response:
        """End what the page has under way."""
        await run_in_threadpool(self.jobs.stop, _page(await _body(request)))
        return JSONResponse({})

    @_typed
    async def save(self, request: Request) -> Response:
        """Write the two files of a kernel of one's own."""
        asked = await _body(request)
        given = [asked.get(name) for name in ("kernel", "name", "text")]
        if not all(isinstance(one, str) for one in given):
            raise ParameterError("save: kernel, name and text are texts")
        kernel, name, text = map(str, given)
        files = await run_in_threadpool(catalog.save, kernel, name, text, self.jobs.folder)
        await run_in_threadpool(ops.load_folder, self.jobs.folder)
        await run_in_threadpool(self.jobs.restart)
        return JSONResponse({"files": files, "kernel": f"{name}.plain"})


async def _body(request: Request) -> dict[str, Any]:
    """JSON that says that it is JSON, which no form of another site can send."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip() != "application/json":
        raise ParameterError("playground: a request is application/json")
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > MOST_JSON:
            break
    found = read(data)
    if not isinstance(found, dict):
        raise ParameterError("playground: a request is a JSON object")
    return found


def _load(jobs: Jobs) -> None:
    """Every kernel that workers know, in this process: its parameters and its template."""
    ops.load()
    for folder in jobs.kernel_folders():
        ops.load_folder(folder)


def _page(asked: dict[str, Any]) -> str:
    return json.dumps(asked.get("page"))[:40]
