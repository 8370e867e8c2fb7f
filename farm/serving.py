"""``python -m farm serve``: Ray, the application in it, and its end."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import secrets
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray else reports to its makers
if not os.environ.get("RAY_ADDRESS"):  # Ray's own ports are on loopback, and need a token that nobody else has
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # makes loopback the node's address, on Linux too
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # it kills workers for memory that others took
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
import ray
from ray import serve

from . import access
from .app import NAME, application
from .settings import WorkerSettings, threads_each

log = logging.getLogger("farm")

ANSWER = 10.0
"""Seconds in which the gate answers."""
STORE = 1 << 30
"""Bytes of shared memory in which Ray passes pictures on."""


def serve_farm(arguments: argparse.Namespace, token: str, comfyui_arguments: list[str]) -> int:
    """Start a farm, and return after its end, which a signal requests."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    os.environ.pop(access.VARIABLE, None)  # no worker needs it
    # a cluster may have its port already, for others too
    held = [] if os.environ.get("RAY_ADDRESS") else hold_port(arguments.host, arguments.port)
    _start_ray(arguments)
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    try:
        why = _serve(arguments, token, comfyui_arguments, end)
    finally:
        if os.environ.get("RAY_ADDRESS"):  # others may serve there too
            serve.delete(NAME)
        else:
            serve.shutdown()
        ray.shutdown()
        for one in held:
            one.close()
    if why:
        log.error(why)
    return 1 if why else 0


def hold_port(host: str, port: int) -> list[socket.socket]:
    """Take an address so that no other farm gets it, and Ray does; return sockets that hold it until they are closed.

    Ray by itself shares a port with other listeners of the same user.

    Raises:
        ValueError: it is taken, or not of this machine.
    """
    held = []
    try:
        for kind, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            held.append(socket.socket(kind))
            if not hasattr(socket, "SO_REUSEPORT"):  # as on Windows: a check must do
                held.pop().bind(address)
                continue
            held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # leftovers of an ended farm do not block it
            held[-1].bind(address)
            held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        for one in held:
            one.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"Port {port} of {host} is taken: end the farm that uses it, or use --port.") from None
        raise ValueError(f"The farm cannot listen at port {port} of {host}: {error}.") from None
    return held


def _start_ray(arguments: argparse.Namespace) -> None:
    """Join the cluster that RAY_ADDRESS names, or start one."""
    if os.environ.get("RAY_ADDRESS"):
        ray.init(namespace=NAME, runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[1])}})
        return
    if arguments.metrics_port is None:
        os.environ["RAY_enable_metrics_collection"] = "0"
    ray.init(address="local", namespace=NAME, include_dashboard=False, object_store_memory=STORE,
             _metrics_export_port=arguments.metrics_port)  # fmt: skip


def _serve(arguments: argparse.Namespace, token: str, comfyui_arguments: list[str], end: threading.Event) -> str:
    """Start workers, and wait for the end; return the error."""
    gpus = 0 if arguments.cpu else 1
    workers = arguments.workers or int(ray.cluster_resources().get("GPU", 0) if gpus else 1)
    if not workers:
        return "Ray sees no GPU: start the farm with --cpu, or look at nvidia-smi."
    settings = WorkerSettings(
        comfyui=str(arguments.comfyui.resolve()),
        python=str(arguments.python.absolute()),  # the link of a virtual environment, not its target
        work=str(arguments.work.resolve() if arguments.work else tempfile.mkdtemp(prefix="hybrid-trt-farm-")),
        farm=secrets.token_hex(8),
        base=str(arguments.base.resolve()) if arguments.base else "",
        warm=tuple(str(file.resolve()) for file in arguments.warm),
        arguments=(*(["--cpu"] if arguments.cpu else []), *comfyui_arguments),
        threads=os.environ.get("OMP_NUM_THREADS") or _threads(workers if gpus else 0),
    )
    serve.start(http_options={"host": arguments.host, "port": arguments.port})
    log.info("The workers' logs are in %s.", settings.work)
    farm = application(settings, access.digest(token), workers, gpus)
    failures: list[str] = []
    threading.Thread(target=_run, args=(farm, end, failures), daemon=True).start()
    while not end.wait(1):  # a wait without an end may not see a signal that came to another thread
        pass
    if failures:
        return f"The farm cannot start: {failures[0]}"
    if NAME not in serve.status().applications:
        return ""
    log.info("The farm ends; prompts that run get %d s. Ctrl+C ends it at once.", arguments.drain)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return "" if _drained(arguments.drain) else "Not all prompts ended in time; they are lost."


def _drained(patience: float) -> bool:
    """Have the gate take no more prompts, and tell whether all ended within some seconds."""
    until = time.monotonic() + patience
    while (left := until - time.monotonic()) > 0:
        try:
            if not serve.get_app_handle(NAME).drain.remote().result(timeout_s=min(left, ANSWER)):
                return True
        except TimeoutError:
            log.warning("The farm's gate did not answer; it is asked again.")
        time.sleep(0.1)
    return False


def _threads(workers: int) -> str:
    """Return OMP_NUM_THREADS for so many workers with GPUs; without GPUs, pictures equal a single ComfyUI's."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores = [int(one.get("CPU", 1)) for one in machines if one.get("GPU")]  # Ray heeds a container's limits
    return str(threads_each(cores, workers)) if workers else ""


def _run(farm: serve.Application, end: threading.Event, failures: list[str]) -> None:
    """Wait until all workers are warm, and say so."""
    try:
        serve.run(farm, name=NAME)
    except Exception as error:
        failures.append(_reason() or str(error))
        end.set()
    else:
        log.info("The farm is ready.")


def _reason() -> str:
    """Return why the workers do not start, in their ComfyUI's words, else in Ray's."""
    messages = [one.message for app in serve.status().applications.values() for one in app.deployments.values()]
    return "\n".join(messages).rpartition("ComfyLost: ")[2].strip()
