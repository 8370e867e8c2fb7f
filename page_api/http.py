"""Rules of all our routes: who may ask, how much, and errors that are one sentence for the user."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import ClientError, web
from aiohttp.http_exceptions import BadHttpMessage

from ..engine_library import LibraryError, Unavailable, schema

log = logging.getLogger(__name__)

PREFIX = "/hybrid_trt"
HEADER = "X-Hybrid-TRT"
"""Header of requests that change something: forms and links of other sites cannot, and scripts there may not."""
MAX_JSON = 2 << 20
_HOME_NETWORKS = (".localhost", ".local", ".lan", ".home.arpa", ".internal")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refused(Exception):
    """A request that is refused with a sentence."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


def reads(handler: Handler) -> Handler:
    """Guard a route that changes nothing: its errors become a sentence."""

    @functools.wraps(handler)
    async def guarded(request: web.Request) -> web.StreamResponse:
        try:
            check_plain(request)
            return await handler(request)
        except Refused as refusal:
            return _error(refusal.status, str(refusal))
        except (LibraryError, Unavailable) as error:
            return _error(409, _sentence(str(error)))
        except OSError as error:  # its drive is gone, for example
            return _error(409, f"The library could not be used ({error}); check its folder and its disk.")
        except Exception as error:
            log.exception("Hybrid TRT: %s %s failed", request.method, request.path)
            return _error(500, f"Hybrid TRT failed ({type(error).__name__}), so it did not answer; see the log.")

    return guarded


def check_plain(request: web.Request) -> None:
    """Refuse a compressed body: aiohttp waits for ever for the end of a truncated or mislabelled one.

    Raises:
        Refused: 415.
    """
    if "Content-Encoding" in request.headers:
        raise Refused(415, "The request's body is compressed, so it was not read; send it as it is.")


def changes(handler: Handler) -> Handler:
    """Guard a route that changes something: only for pages of this server, and for programs that send our header."""

    async def checked(request: web.Request) -> web.StreamResponse:
        check_same_site(request)
        return await handler(request)

    return reads(functools.wraps(handler)(checked))


def check_same_site(request: web.Request) -> None:
    """Refuse requests from pages of other sites in the user's browser, and requests without our header.

    Raises:
        Refused: 403.
    """
    check_origin(request)
    if HEADER not in request.headers:
        raise Refused(403, f"The request has no {HEADER} header, so it was refused; send '{HEADER}: 1'.")


def check_origin(request: web.Request) -> None:
    """Refuse requests from pages of other sites in the user's browser; for requests that cannot have our header.

    Raises:
        Refused: 403.
    """
    origin, host = request.headers.get("Origin"), request.headers.get("Host", "")
    foreign = request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
    if foreign or (origin is not None and not _same_host(origin, host)):
        raise Refused(403, "This request comes from another site's page, so it was refused; use ComfyUI's own page.")
    if origin is not None and _may_be_rebound(request, origin, host):
        raise Refused(
            403,
            "This page was opened under a name that is not this computer's, as pages of attackers are, so the request "
            "was refused; open ComfyUI as localhost, by its address or over https.",
        )


def _same_host(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def _may_be_rebound(request: web.Request, origin: str, host: str) -> bool:
    """Tell whether an attacker's domain may point here (DNS rebinding): its page would count as ours.

    Nobody owns addresses, single words and names of home networks. For https an attacker lacks the certificate, and
    browsers send no false ``Origin``. Programs send none.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return False
    if "." not in name or name.endswith(_HOME_NETWORKS) or urlsplit(origin).scheme == "https":
        return False
    return _through_loopback(request)


def _through_loopback(request: web.Request) -> bool:
    """Tell whether the request came in at the address that only this computer has; else --listen made us public."""
    address = request.transport.get_extra_info("sockname") if request.transport is not None else None
    try:
        return ipaddress.ip_address(address[0].split("%")[0]).is_loopback
    except (TypeError, ValueError, IndexError, AttributeError):
        return True


async def read_json(request: web.Request, limit: int = MAX_JSON) -> dict[str, Any]:
    """Read the body as a JSON object.

    Raises:
        Refused: 413 or 400.
    """
    body = b""
    if (request.content_length or 0) <= limit:
        try:
            async for chunk in request.content.iter_chunked(1 << 16):
                body += chunk
                if len(body) > limit:
                    break
        except (BadHttpMessage, ClientError, web.RequestPayloadError):  # truncated, or with a wrong encoding
            raise Refused(400, "The request's body cannot be read, so nothing was done.") from None
    if len(body) > limit or (request.content_length or 0) > limit:
        raise Refused(413, f"The request is larger than {limit >> 20} MB, so it was not read.")
    try:
        data = schema.loads_whole(body)
    except schema.MalformedInput as error:
        raise Refused(400, f"The request was not understood: {error}; nothing was done.") from None
    if not isinstance(data, dict):
        raise Refused(400, "The request is not a JSON object, so nothing was done.")
    return data


def answer(data: Any, status: int = 200) -> web.Response:
    """Answer in strict JSON, which has no NaN and no Infinity."""
    return web.json_response(data, status=status, dumps=strict_json)


def strict_json(data: Any) -> str:
    """Return data as JSON.

    Raises:
        ValueError: it has NaN or an infinite number.
    """
    return json.dumps(data, allow_nan=False)


def _error(status: int, text: str) -> web.Response:
    refusal = answer({"error": text}, status)
    if status in (413, 415):  # its unread body would be taken for the next request
        refusal.force_close()
    return refusal


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
