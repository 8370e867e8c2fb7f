"""Requests to the routes below /hybrid_trt, as they are: urllib would tidy paths up and hide refusals."""

from __future__ import annotations

import http.client
import json
from typing import Any

from comfy_process import ComfyProcess

OURS = {"X-Hybrid-TRT": "1"}


def answered(
    comfy: ComfyProcess, method: str, path: str, body: bytes | None, headers: dict[str, str]
) -> tuple[int, str, bytes]:
    """Return status, type and content of the answer to a request."""
    connection = http.client.HTTPConnection("127.0.0.1", comfy.port, timeout=30)
    try:
        connection.request(method, f"/hybrid_trt{path}", body, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Content-Type", ""), answer.read()
    finally:
        connection.close()


def ask(
    comfy: ComfyProcess, method: str, path: str, body: bytes | None = None, headers: dict[str, str] = OURS
) -> tuple[int, Any]:
    """Return status and JSON of a request."""
    status, _, text = answered(comfy, method, path, body, headers)
    return status, json.loads(text) if text.startswith((b"{", b"[")) else text.decode(errors="replace")


def post(comfy: ComfyProcess, path: str, data: Any) -> tuple[int, Any]:
    """Return status and JSON of JSON that is posted."""
    return ask(comfy, "POST", path, json.dumps(data).encode(), OURS | {"Content-Type": "application/json"})
