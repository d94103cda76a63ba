"""Who may talk to the playground: this machine's browser, at the address that was printed."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'nonce-{nonce}'; img-src 'self' "
    "data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Guard:
    """Refuses, in this order: another host's name (403), another origin (403), a path that does not
    begin with the token (401). What is left goes to `app` without the token in its path."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self.app, self._token = app, token
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        nonce = secrets.token_urlsafe(16)
        scope = {**scope, "state": {**scope.get("state", {}), "nonce": nonce}}
        sending = _with_headers(
            send, {**_HEADERS, "Content-Security-Policy": _POLICY.format(nonce=nonce)}
        )
        refusal, path = self._refuse(headers, scope["path"])
        if refusal is not None:
            await refusal(scope, receive, sending)
            return
        scope |= {"path": path, "raw_path": path.encode()}
        await self.app(scope, receive, sending)

    def _refuse(self, headers: dict[bytes, str], path: str) -> tuple[Response | None, str]:
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if host not in self._hosts:
            return PlainTextResponse("another host's name", 403), path
        if origin is not None and origin != f"http://{host}":
            return PlainTextResponse("another origin", 403), path
        if headers.get(b"sec-fetch-site", "none") not in ("none", "same-origin"):
            return PlainTextResponse("another site", 403), path
        token, slash, rest = path.removeprefix("/").partition("/")
        if not slash or not secrets.compare_digest(token.encode(), self._token.encode()):
            text = "the address needs its token: `fkjit playground` has printed it"
            return PlainTextResponse(text, 401), path
        return None, f"/{rest}"


def _with_headers(
    send: Send, headers: dict[str, str]
) -> Callable[[MutableMapping[str, Any]], Awaitable[None]]:
    more = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return sending
