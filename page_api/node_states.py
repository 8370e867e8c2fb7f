"""States of engine nodes for the page: whether it has an engine, a running build, and the results of its last run.

A node is known by its key, see ``node_key``. Facts from its run (its model's weights) are kept in the
library's folder, so that the page gets the right state after a restart too, without loading a model.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import torch

from ..architectures import architectures, profile_words
from ..architectures.calls import EVERY_SIZE, serves_every_size
from ..architectures.shapes import Profile
from ..backends import AUTO, backends
from ..backends.lookup import look_up_known, takes_any_weights, wanted_profile
from ..comfy_model.hash_cache import known_hashes, source_of
from ..comfy_model.structure_hash import structure_hash
from ..engine_builder.jobs import BuildQueue, Job, State
from ..engine_library import Engine, EngineQuery, Fallback, Library, Reason, Unavailable, measurements
from ..engine_library.manifest import LAYOUT_PREFIX, MANIFEST_NAME
from ..sampling.call_stats import CallStats, last_run
from ..sampling.engine_handle import EngineHandle
from ..sampling.engine_status import status
from ..sessions.session import refusal_of
from . import picture_fit
from .build_orders import workflow_of
from .node_records import FILE_NAME, NodeRecord, read_records, write_records
from .outlook import NodeRequest, builds_by_itself, parameters_of, refused_by_file, seconds, serves_live

MAX_NODES = 500
MOST_SPEED = 1e6
"""Most times as fast as native: larger values come from forged figures."""


class NodeStates:
    """All engine nodes that ran, and the jobs that they ordered. Safe to use from any thread."""

    def __init__(self, library: Library, builds: BuildQueue):
        self._library = library
        self._builds = builds
        self._lock = threading.Lock()
        self._path = library.roots[0] / FILE_NAME
        self._known: OrderedDict[str, NodeRecord] = read_records(self._path)
        self._sent: OrderedDict[str, str] = OrderedDict()  # node key -> the key that the page sent
        self._jobs: dict[str, list[str]] = {}  # node key -> other jobs that it waits for, then its last job

    def learn(self, key: str, handle: EngineHandle) -> None:
        """Remember the request of a node that has just run."""
        network = handle.network
        try:
            architecture = network.architecture().name
        except Unavailable:
            architecture = ""
        before = self._known.get(key)
        source = source_of(network.patcher)
        any_weights = takes_any_weights(handle.choice, network.device)
        weights = structure_hash(network.module) if any_weights else network.known_hash()
        if handle.session is not None:
            engines = handle.session.engines
            weights = engines[0].manifest.identity.weights if engines else structure_hash(network.module, live=True)
        if not weights and before is not None and before.source == source:
            weights = before.weights
        refusal = (handle.fallback.reason.value, handle.fallback.detail) if handle.fallback is not None else None
        profile = wanted_profile(network, handle.choice) if architecture else handle.choice.profile
        without = handle.session is not None and not handle.session.engines
        record = NodeRecord(
            network.label, architecture, handle.choice.precision_for(network), profile.to_json(),
            handle.choice.backend, str(network.device), weights, refusal, source, status(handle) if without else "",
            network.role.value,
            sum(p.numel() for p in network.module.parameters()),
        )  # fmt: skip
        for one in self.keys_like(key):
            self._keep(one, record)

    def alias(self, key: str, sent: str) -> None:
        """Register a second key: Auto replaced the sizes after the page had sent the first."""
        with self._lock:
            self._sent[key] = sent
            while len(self._sent) > MAX_NODES:
                self._sent.popitem(last=False)

    def keys_like(self, key: str) -> list[str]:
        """Return the node's key and its alias, if any."""
        with self._lock:
            return [key, self._sent[key]] if key in self._sent else [key]

    def refused(self, key: str, label: str, fallback: Fallback) -> None:
        """Remember that a node's model can have no engine."""
        self._keep(key, NodeRecord(label, "", "", {}, "", "", "", (fallback.reason.value, fallback.detail), None))

    def ordered(self, key: str, job: Job) -> None:
        """Remember that a node waits for a job."""
        for alias in self.keys_like(key):
            with self._lock:
                before = (self._builds.get(known) for known in self._jobs.get(alias, ()) if known != job.id)
                self._jobs[alias] = [*(one.id for one in before if one and not one.state.final), job.id]

    def ended(self, job: Job) -> None:
        """Learn from a job that has ended which weights the nodes that ordered it have."""
        if job.engine is None:
            return
        weights = job.engine.manifest.identity.weights
        for key in self.keys_of(job):
            known = self._known.get(key)
            if known is not None and known.weights != weights:
                self._keep(key, NodeRecord(**{**asdict(known), "weights": weights, "refusal": None}))

    def keys_of(self, job: Job) -> list[str]:
        """Return the keys of the nodes that ordered a job."""
        with self._lock:
            return [key for key, jobs in self._jobs.items() if job.id in jobs]

    def _job(self, key: str) -> Job | None:
        """Return the job that a node waits for, else its last job."""
        with self._lock:
            jobs = [job for job_id in self._jobs.get(key, ()) if (job := self._builds.get(job_id)) is not None]
        return next((job for job in jobs if not job.state.final), jobs[-1] if jobs else None)

    def state(self, key: str, request: NodeRequest) -> dict:
        """For the page: ``state``, ``text``, the engine or the job, ``run``: the last run, the fit of sizes;
        without an engine ``outlook``: why, and how long a build takes; ``build_helps``: whether a build would give
        the node its engine, or one for all its sizes.

        Args:
            request: the node's settings, read from its prompt. A node that has not run yet is known by it alone.
        """
        answer, known, engines = self._state(key, request)
        served = answer["state"] == "ready" and answer["engine"]["covers"]
        answer["build_helps"] = not served and answer["state"] not in ("queued", "building", "unavailable")
        family, choice = (known.architecture, known.backend) if known else ("", "")
        tokens = longest_prompt(key, family)
        engines = engines if answer["state"] == "ready" else ()
        like = known or self._like(request)
        answer["by_itself"] = like is not None and builds_by_itself(
            request.backend or like.backend, like.device, like.architecture)  # fmt: skip
        answer |= picture_fit.size_report(request, family, engines, choice, answer.get("any_size", False), tokens)
        every = family in architectures() and serves_every_size(architectures()[family])
        answer["sizes"]["every"] = every and answer["by_itself"]
        return answer

    def _state(self, key: str, request: NodeRequest) -> tuple[dict, NodeRecord | None, Sequence[Engine]]:
        """Return a node's state without its sizes, a node with the same model, and the engines that it uses."""
        answer = {"key": key, "state": "unknown", "label": request.label, "text": "", "engine": None, "job": None}
        answer["run"] = run_of(key, request.workflow)
        job = self._job(key)
        if job is not None and not job.state.final:
            answer |= {"state": "queued" if job.state is State.QUEUED else "building", "job": job.to_json()}
            return answer, self._known.get(key), ()
        known = self._known.get(key)
        if known is None and (refusal := refused_by_file(request)) is not None:
            return answer | {"state": "unavailable", "text": refusal.sentence()}, None, ()
        if known is None or _changed(known.source):
            like = known or self._like(request)
            outlook = self._outlook(like, request, False)
            there = self._there(request) if known is None else None
            answer |= {"outlook": outlook, "any_size": outlook["live"], "there": there} | _failure(job)
            return answer, like if like and like.label == request.label else None, ()
        answer["label"] = known.label
        engines, fallback = self._look_up(known)
        if engines:
            answer |= {"state": "ready", "engine": _union_json(engines, known), "job": job.to_json() if job else None}
            if answer["run"] is not None and answer["run"]["opened"] < max(map(_published, engines)):
                answer["run"] = None  # the run was before this engine
            answer["any_size"] = serves_live(known.kind, known.backend, known.device)
            if (why := next(filter(None, map(refusal_of, engines)), None)) is not None:
                backend = engines[0].manifest.identity.backend
                text = f"It was not opened, so steps run uncompiled: {why}; build it again."
                if not backends()[backend].runs_live_weights:
                    text = (f"It was not opened, so torch runs in its place: {why}; delete it in the panel, or "
                            f"build it again with the backend {backend}.")
                answer |= {"state": "stale", "text": text}
            return answer, known, engines
        text = known.without_engine or fallback.sentence()
        answer |= {"state": fallback.reason.state, "text": text}
        answer["outlook"] = self._outlook(known, request, True)
        if known.without_engine:
            answer["any_size"] = True  # live weights serve, whatever the profile says
        return answer | _failure(job), known, ()

    def _there(self, request: NodeRequest) -> bool | None:
        """Tell whether the library has an engine for a node that has not run; None where only a run can tell.

        It has no engine if no engine names the model's file. Else it is looked up if a node ran this same file.
        """
        if not request.label:
            return None
        of_kind = [engine.manifest for engine in self._library.engines() if engine.manifest.kind == request.kind]
        if not any(manifest.identity.any_weights or request.is_of(manifest.label) for manifest in of_kind):
            return False
        alike = [one for one in list(self._known.values()) if one.kind == request.kind and request.is_of(one.label)]
        like = next((one for one in reversed(alike) if one.architecture), None)
        if not like or not request.sizes or request.precision not in (AUTO, like.precision) or _changed(like.source):
            return None
        family = architectures().get(like.architecture)
        if family is None or request.patched or getattr(family, "absorbs", None) is not None:
            return None
        fixed = not like.weights.startswith(LAYOUT_PREFIX)
        if fixed and (request.lora or request.replaceable or like.weights not in known_hashes(like.source or {})):
            return None
        try:
            profile = family.profile(request.sizes).to_json()
        except ValueError:  # sizes in the wrong order
            return None
        asked = replace(like, backend=request.backend or like.backend, profile=profile)
        engines, _ = self._look_up(asked)
        return bool(engines) and _union_json(engines, asked)["covers"]

    def _like(self, request: NodeRequest) -> NodeRecord | None:
        """Return the node that ran last with the same model, else with a model of the same kind."""
        latest = reversed(list(self._known.values()))
        alike = [known for known in latest if known.kind == request.kind and known.architecture]
        return next((known for known in alike if known.label == request.label), alike[0] if alike else None)

    def _outlook(self, known: NodeRecord | None, request: NodeRequest, certain: bool) -> dict:
        """Return why a node has no engine, how long a build takes, and whether a build is needed.

        Args:
            known: the node, or a similar node.
            certain: whether it is certain that there is no engine; otherwise the next run looks for it.
        """
        if known is None:
            return {"why": "", "seconds": None, "certain": certain, "live": False}
        same = known.label == request.label
        why = "lora" if same and request.lora else "" if certain else "settings" if same else "checkpoint"
        parameters = known.parameters
        if not same:
            parameters = parameters_of(request, parameters, (known.source or {}).get("size", 0))
        backend, kind = request.backend or known.backend, known.kind
        took = seconds(self._library, backend, known.device, kind, known.architecture, known.precision, parameters)
        return {"why": why, "seconds": took, "certain": certain, "live": serves_live(kind, backend, known.device)}

    def _look_up(self, known: NodeRecord) -> tuple[list[Engine], Fallback]:
        """Return the engines that a node uses, which differ in their sizes; without engines, also the reason."""
        refusal = Fallback(Reason(known.refusal[0]), known.refusal[1]) if known.refusal else Fallback(Reason.NO_ENGINE)
        if not known.architecture:
            return [], refusal
        if not known.weights:
            return [], refusal if refusal.reason.state == "unavailable" else Fallback(Reason.NO_ENGINE, refusal.detail)
        device = torch.device(known.device)
        query = EngineQuery(known.architecture, [known.weights], known.precision, Profile.from_json(known.profile))
        found = look_up_known(self._library, query, known.backend, device)
        return list(found.engines), refusal if found.engines else found.passed_over or refusal

    def _keep(self, key: str, known: NodeRecord) -> None:
        with self._lock:
            if not key or self._known.get(key) == known:
                return
            self._known[key] = known
            self._known.move_to_end(key)
            while len(self._known) > MAX_NODES:
                self._known.popitem(last=False)
            write_records(self._path, self._known)


def run_of(key: str, workflow: str = "") -> dict | None:
    """Return the counts of the last prompt that called a node's network; None without, or for another workflow."""
    found = last_run(key)
    if found is None:
        return None
    prompt_id, rows = found
    if workflow and workflow_of(prompt_id) not in ("", workflow):
        return None
    reasons: dict[str, dict] = {}
    for row in rows:
        for reason, count in list(row.reasons.items()):
            text = row.details.get(reason, reason)
            words = {"reason": reason, "text": text, "advice": row.advice(Reason(reason))}
            seen = reasons.setdefault(reason, {**words, "count": 0})
            seen["count"] += count
    return {
        "prompt": prompt_id,
        "opened": max(row.opened for row in rows),
        "engine": sum(row.engine for row in rows),
        "native": sum(row.native for row in rows),
        "backend": next((row.backend for row in rows if row.backend), None),
        "reasons": list(reasons.values()),
        "uncompiled": _uncovered(rows),
    }


def longest_prompt(key: str, family: str) -> int:
    """Return the tokens of the last run's longest prompt that a node's engine was not built for, or 0.

    Args:
        family: name of the architecture, ``""`` while it is not known.
    """
    found, known = last_run(key), architectures().get(family)
    if found is None or known is None:
        return 0
    return known.symbols[known.prompt].step * max((row.beyond.get(known.prompt, 0) for row in found[1]), default=0)


def _uncovered(rows: Sequence[CallStats]) -> list[dict]:
    """Return the calls without an engine or compiled file of their size: their size, how they ran, their number."""
    counts: Counter[tuple[str, str]] = Counter()
    for row in rows:
        for call, count in list(row.uncovered.items()):
            counts[call.words, call.ran] += count
    return [
        {"size": words, "graph": ran == "graph", "native": ran == "native", "count": count}
        for (words, ran), count in counts.items()
    ]


def _published(engine: Engine) -> float:
    """Return the time at which an engine came into its library; 0 if unknown."""
    try:
        return os.stat(engine.folder / MANIFEST_NAME).st_mtime
    except OSError:
        return 0.0


def engine_json(engine: Engine) -> dict:
    """Return an engine's facts for people."""
    manifest, here = engine.manifest, measurements.figures(engine)
    return {
        "name": engine.folder.name,
        "label": manifest.label,
        "backend": manifest.identity.backend,
        "precision": manifest.identity.precision,
        "any_weights": manifest.identity.any_weights,
        "changes": manifest.changes,
        "profile": profile_words(manifest.identity.architecture, manifest.identity.profile),
        "bytes": manifest.bytes,
        "seconds": round(sum(manifest.seconds.values()), 1),
        "rel_err": here.get("rel_err"),
        "native_rel_err": here.get("native_rel_err"),
        "speed": _speed(here),
        "refit_s": here.get("refit_s"),
        "created": manifest.created,
    }


def _union_json(engines: Sequence[Engine], known: NodeRecord) -> dict:
    """Return facts for people on the engines that a node uses, as if they were one engine.

    ``covers``: whether that engine holds the node's profile.
    """
    identity = engines[0].manifest.identity
    backend = backends()[identity.backend]
    profiles, wanted = [e.manifest.identity.profile for e in engines], Profile.from_json(known.profile)
    wanted = backend.engine_profile(wanted)
    live = backend.runs_live_weights
    words = [EVERY_SIZE] if live else [profile_words(identity.architecture, profile) for profile in profiles]
    return engine_json(engines[0]) | {
        "covers": live or any(profile.contains(wanted.only(profile.ranges)) for profile in profiles),
        "profile": "; ".join(dict.fromkeys(words)),
        "bytes": sum(engine.manifest.bytes for engine in engines),
        "names": [engine.folder.name for engine in engines],
    }


def _speed(parity: Mapping) -> float | None:
    """Return how many times as fast as native an engine was in its check on this GPU."""
    engine, native = parity.get("engine_ms"), parity.get("native_ms")
    return round(min(native / engine, MOST_SPEED), 2) if engine and native else None


def _failure(job: Job | None) -> dict:
    """Return how the last build ended, if that explains the missing engine."""
    if job is None:
        return {}
    if job.elsewhere:
        return {"state": "none", "text": job.message, "job": job.to_json()}
    if job.state is State.FAILED:
        return {"state": "failed", "text": job.message, "job": job.to_json()}
    if job.state is State.CANCELLED:
        return {"state": "none", "text": "", "job": job.to_json()}
    return {}


def _changed(source: dict | None) -> bool:
    """Tell whether a model's file has changed since the node ran."""
    if source is None:
        return False
    try:
        stat = os.stat(source["path"])
    except (OSError, KeyError, TypeError, ValueError):
        return True
    return (stat.st_size, stat.st_mtime_ns) != (source.get("size"), source.get("mtime_ns"))
