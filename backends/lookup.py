"""Decision which engine serves a network, or why none does. No other module decides it.

Nodes, the page, the command line and the runtime ask here. ``look_up`` picks the engines, ``open_session`` opens them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..architectures import architectures, runs_per_step, symbols_of
from ..architectures.calls import RequestedCalls, UncoveredCall, serves_every_size
from ..architectures.shapes import Picture, Profile, outside
from ..engine_library import Engine, EngineQuery, Fallback, Library, Manifest, Reason, Unavailable, measurements
from ..engine_library.gpu import gpu_of, kind_of
from ..engine_library.library import NOTHING_FOUND
from . import AUTO, Backend, BuildSizes, backends, cannot_open

if TYPE_CHECKING:
    import torch

    from ..comfy_model.network import NativeNetwork
    from ..sessions.session import Session

@dataclass(frozen=True)
class EngineChoice:
    """The engine node's settings: for which shapes, how precise (``auto``: as native), by which backend (``auto``).

    Attributes:
        replaceable: True if only an engine will do that takes any weights, where its backend can have such.
        pictures: the pictures that the graph asks for, as far as it tells.
        loras: the LoRAs before the network, in words for people.
    """

    profile: Profile
    precision: str = AUTO
    backend: str = AUTO
    replaceable: bool = False
    pictures: tuple[Picture, ...] = ()
    loras: str = ""

    def precision_for(self, network: NativeNetwork) -> str:
        return network.precision if self.precision == AUTO else self.precision

    def asked_for(self, call: UncoveredCall | None, network: NativeNetwork) -> UncoveredCall | None:
        """Return a call that ran native, if the node asks for an engine of its size."""
        if call is None:
            return None
        requested = RequestedCalls(self.profile, self.pictures)
        return call if requested.hold(network.architecture(), dict(call.sizes)) else None


@dataclass(frozen=True)
class Found:
    """Result of a look-up: what serves the calls of a network, who builds what it lacks, and why nothing serves.

    Attributes:
        backend: runs ``engines``, or live weights without one; None where nothing serves.
        builder: builds what is missing, or None where no backend can.
        engines: the engines that its session uses, the best first.
        live: the backend whose live weights take the calls that ``engines`` do not, or None.
        live_engines: its engines: compiled blocks.
        passed_over: why no engine of the library is used; of several reasons the one closest to success.
        refits: True if a backend that may serve has engines that take any weights.
    """

    backend: Backend | None
    builder: Backend | None = None
    engines: Sequence[Engine] = ()
    live: Backend | None = None
    live_engines: Sequence[Engine] = ()
    passed_over: Fallback | None = None
    refits: bool = False

    @property
    def refused(self) -> list[Engine]:
        """Return the engines in use that could not be opened."""
        from ..sessions.session import refusal_of  # needs torch, which the command line may lack

        return [engine for engine in self.engines if refusal_of(engine) is not None]

    def to_build(
        self, network: NativeNetwork, calls: RequestedCalls, rebuild: Sequence[Engine] = ()
    ) -> list[BuildSizes]:
        """List the sizes to build for a network; engines of other backends keep the calls that they serve.

        Args:
            rebuild: engines of the builder that are there and are built again.
        """
        if self.builder is None:
            return []
        own = [engine for engine in (*self.engines, *self.live_engines) if _is_of(engine, self.builder)]
        parts = self.builder.to_build(network, calls, own, rebuild)
        for engine in (engine for engine in self.engines if not _is_of(engine, self.builder)):
            parts = [left for part in parts if (left := _beyond(part, engine, calls)) is not None]
        return parts


def _beyond(part: BuildSizes, engine: Engine, calls: RequestedCalls) -> BuildSizes | None:
    """Return the part of some sizes that an engine of another backend does not serve, or None."""
    identity = engine.manifest.identity
    profile, symbols = identity.profile, symbols_of(identity.architecture)
    if part.again:
        return part
    if not part.calls:
        return None if profile.contains(calls.profile.only(profile.ranges)) else part
    left = tuple(call for call in part.calls if outside(profile, call, symbols) is not None)
    return BuildSizes(part.profile, left) if left else None


def look_up(network: NativeNetwork, choice: EngineChoice, library: Library) -> Found:
    """Find what serves a network as a node wants it.

    With ``auto`` that is the engine that was the fastest on this GPU. One that was no faster than native is left out
    where live weights serve: these need no build.
    """
    from ..comfy_model.structure_hash import structure_hash

    architecture, device = network.architecture().name, network.device
    try:
        usable = backends_for(network, choice.backend, _timed_here(library, architecture, choice.backend, device))
    except Unavailable as unavailable:
        return Found(None, passed_over=unavailable.fallback)
    structure = structure_hash(network.module)
    weights = _weights(network, structure, choice, library, usable)
    profile = wanted_profile(network, choice)
    query = EngineQuery(architecture, weights, choice.precision_for(network), profile, layout=structure)
    return _look_up(library, query, choice.backend, usable, device)


def look_up_known(library: Library, query: EngineQuery, choice: str, device: torch.device) -> Found:
    """Look up from a stored record, without the model; otherwise as ``look_up``."""
    try:
        usable = usable_backends(choice, device, _timed_here(library, query.architecture, choice, device))
    except Unavailable as unavailable:
        return Found(None, passed_over=unavailable.fallback)
    return _look_up(library, query, choice, usable, device)


def _look_up(
    library: Library, query: EngineQuery, choice: str, usable: Sequence[Backend], device: torch.device
) -> Found:
    builder = next((backend for backend in usable if choice != AUTO or _proven(backend, device)), None)
    live = next((backend for backend in usable if backend.runs_live_weights), None)
    query = replace(query, backends=[backend.name for backend in usable], gpu=gpu_of(device))
    try:
        engines, passed_over = _engines(library, query, choice, usable, device), None
    except Unavailable as unavailable:
        engines, passed_over = [], unavailable.fallback
        if live is None or not runs_per_step(query.architecture):
            return Found(None, builder, passed_over=passed_over)
    own = backends()[engines[0].manifest.identity.backend] if engines else live
    in_use, refits = own.in_use([e for e in engines if _is_of(e, own)]), any(b.refits for b in usable)
    found = Found(own, builder, in_use, passed_over=passed_over, refits=refits)
    if live in (None, own):
        return found
    return replace(found, live=live, live_engines=live.in_use([e for e in engines if _is_of(e, live)]))


def open_session(found: Found, network: NativeNetwork, precision: str) -> Session:
    """Open what was found for a network; sessions are shared by all who use the same.

    Raises:
        Unavailable: nothing was found, or another node replaced a part of the network.
    """
    if found.backend is None:
        raise Unavailable.of(found.passed_over)
    _refuse_slow(found, gpu_of(network.device))
    session = found.backend.session(network, found.engines, precision, found.passed_over)
    if found.live is None:
        return session
    from ..sessions.choice import with_live_fallback  # needs ComfyUI

    try:
        return with_live_fallback(session, found.live.session(network, found.live_engines, precision, None), network)
    except Unavailable:  # the engine still serves the network as it was
        return session


def _refuse_slow(found: Found, gpu: str) -> None:
    """Have no compiled file of live weights opened that was no faster than native: they run uncompiled."""
    from ..sessions.session import refuse

    for engine in (*found.engines, *found.live_engines):
        if backends()[engine.manifest.identity.backend].runs_live_weights and _is_slow(engine, gpu):
            times = measurements.relative_time(engine, gpu)
            refuse(engine, f"compiled it took {times:.2f} times as long as the normal model on this GPU")


def wanted_profile(network: NativeNetwork, choice: EngineChoice) -> Profile:
    """The shapes of the best engine for a node: from its settings, or from the graph's first picture where each
    engine takes one size."""
    backend = backends().get(choice.backend)
    if backend is None or backend.runs_live_weights:
        return choice.profile
    return backend.to_build(network, RequestedCalls(choice.profile, choice.pictures), ())[0].profile


def takes_any_weights(choice: EngineChoice, device: torch.device) -> bool:
    """Tell whether a node that asks for replaceable weights can get such an engine."""
    try:
        return choice.replaceable and any(backend.refits for backend in usable_backends(choice.backend, device))
    except Unavailable:
        return False


def _weights(
    network: NativeNetwork, structure: str, choice: EngineChoice, library: Library, usable: Collection[Backend]
) -> list[str]:
    """List what engines may have as their weights. A checkpoint is hashed only if some engine could be its own."""
    fixed = [b for b in usable if not b.runs_live_weights and not (choice.replaceable and b.refits)]
    architecture, names, found = network.architecture().name, [b.name for b in fixed], []
    if fixed and library.may_have(architecture, network.fingerprint, names, network.other_hashes()):
        found.append(network.weights_hash())
    if any(backend.refits for backend in usable):
        found.append(structure)
    if any(backend.runs_live_weights for backend in usable):
        found.append(network.live_layout)
    return found


def _timed_here(library: Library, architecture: str, choice: str, device: torch.device) -> Collection[str]:
    return library.timed_on(gpu_of(device), architecture) if choice == AUTO else ()


def _engines(
    library: Library, query: EngineQuery, choice: str, usable: Sequence[Backend], device: torch.device
) -> list[Engine]:
    """The engines that fit a query, the best first.

    Raises:
        Unavailable: none does.
    """
    if not query.weights:
        raise Unavailable.of(NOTHING_FOUND)
    named = {backend.name: backend for backend in usable}
    live = [backend.name for backend in usable if backend.runs_live_weights]

    def covers(engine: Engine) -> bool:
        """Tell whether an engine takes all calls that are wanted; live weights take every size."""
        backend = named[engine.manifest.identity.backend]
        return choice == AUTO and backend.runs_live_weights or _covers(backend, engine, query)

    query = replace(query, covers=covers)
    if choice != AUTO:
        return library.find(query, refusals(device))
    unproven = [backend.name for backend in usable if not _proven(backend, device)]
    found = library.find(replace(query, fastest=True, only_timed=unproven), refusals(device))
    found.sort(key=lambda engine: _is_slow(engine, query.gpu))
    # slow ones of live weights stay: ``open_session`` refuses them, and nobody builds them again
    worth_it = [e for e in found if e.manifest.identity.backend in live or not _is_slow(e, query.gpu)]
    if live and not worth_it:
        raise Unavailable.of(NOTHING_FOUND)
    return worth_it if live else found


def _is_slow(engine: Engine, gpu: str) -> bool:
    """Tell whether an engine was no faster than native on this GPU."""
    found = measurements.relative_time(engine, gpu)
    return found is not None and found >= 1


def _covers(backend: Backend, engine: Engine, query: EngineQuery) -> bool:
    own = engine.manifest.identity.profile
    return own.contains(backend.engine_profile(query.profile).only(own.ranges))  # a UNet's has no sizes of hints


def _is_of(engine: Engine, backend: Backend) -> bool:
    return engine.manifest.identity.backend == backend.name


def backends_for(network: NativeNetwork, choice: str, timed_here: Collection[str] = ()) -> list[Backend]:
    """The usable backends that can serve a network: quantised weights are never in an engine's file.

    Raises:
        Unavailable: none can.
    """
    usable = usable_backends(choice, network.device, timed_here)
    able = [backend for backend in usable if cannot_serve(network, backend) is None]
    if not able:
        raise Unavailable.of(cannot_serve(network, usable[0]))
    return able


def builds_by_itself(choice: str, device: torch.device, architecture: str) -> bool:
    """Tell whether ``auto`` has an engine built in the background: where that disturbs no prompt, as of blocks."""
    try:
        builder = usable_backends(choice, device)[0]
    except Unavailable:
        return False
    if not builder.runs_live_weights or builder.cannot_build(device) is not None:
        return False
    known = architectures().get(architecture)
    return known is not None and serves_every_size(known)


def cannot_serve(network: NativeNetwork, backend: Backend) -> Fallback | None:
    """Return why a backend never serves a network, or None."""
    if backend.runs_live_weights or not (what := network.only_live):
        return None
    able = " or ".join(one.name for one in backends().values() if one.runs_live_weights)
    detail = f"{network.label} has {what}, which {backend.name} cannot run; choose {able} as the backend"
    return Fallback(Reason.UNSUPPORTED_MODEL, detail)


def usable_backends(choice: str, device: torch.device, timed_here: Collection[str] = ()) -> list[Backend]:
    """The backends that a choice allows and that run on a device here, the most preferred first. The first one builds.

    Args:
        timed_here: names of backends whose engines proved themselves on this very GPU; ``auto`` allows them too.

    Raises:
        Unavailable: none; the text says why not, of each that could be installed.
    """
    known = backends()
    if choice == AUTO:
        allowed = [b for b in known.values() if _proven(b, device) or b.name in timed_here]
        allowed = allowed or _not_on_auto(known.values(), device)
    else:
        allowed = [known[choice]] if choice in known else []
    refusals = {b.name: b.cannot_run(device) for b in allowed}
    usable = [b for b in allowed if refusals[b.name] is None]
    if not usable:
        reasons = [refusal.reason for refusal in refusals.values()]
        # what can be installed is worth more to the user than what can never run here
        reason = Reason.BACKEND_MISSING if Reason.BACKEND_MISSING in reasons or not reasons else reasons[0]
        details = [refusal.detail for refusal in refusals.values() if refusal.reason is reason]
        raise Unavailable(reason, "; ".join(details) or f"there is no backend called {choice}")
    return usable


def _proven(backend: Backend, device: torch.device) -> bool:
    """Tell whether ``auto`` may take a backend. From any other it takes only engines that were timed on this GPU."""
    return kind_of(device) in backend.measured_on


def _not_on_auto(every: Iterable[Backend], device: torch.device) -> list[Backend]:
    """All backends where none was measured and none runs, so that each says why.

    Raises:
        Unavailable: some would run; names them.
    """
    able = [b.name for b in every if b.cannot_run(device) is None]
    if able:
        where = f"no backend was measured on {kind_of(device)} yet, so 'auto' takes none"
        raise Unavailable(Reason.BACKEND_MISSING, f"{where}; choose {' or '.join(able)} by name to try it")
    return list(every)


def refusals(device: torch.device) -> Callable[[Manifest], Fallback | None]:
    """Return a function that says of a manifest why its engine cannot run on a device here, or None when it can."""
    known = backends()

    def refuses(manifest: Manifest) -> Fallback | None:
        backend = known.get(manifest.identity.backend)
        if backend is None:
            return Fallback(Reason.BACKEND_MISSING, f"this version has no backend {manifest.identity.backend}")
        return cannot_open(backend, manifest, device)

    return refuses
