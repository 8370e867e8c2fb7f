"""The library: folders of engines, each engine a folder of its files and its manifest.

An engine appears by one rename of a finished folder, so it is there wholly or not at all, whichever process is killed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..architectures.shapes import Profile
from . import measurements, trust
from .disk import LibraryError, gigabytes, read_settings, readable
from .engine import Check, Engine
from .fallback import Fallback, Reason, Unavailable
from .locks import FileLock, out_of_the_way, sweep, work_folder
from .manifest import EXPORT_FORMAT, LAYOUT_PREFIX, MANIFEST_NAME, EngineIdentity, Manifest, ManifestError
from .safe_files import move, other_users_may_write, sync

log = logging.getLogger(__name__)

Usable = Callable[[Manifest], Fallback | None]
"""Returns why an engine does not run here, by its backend; None means that it runs."""
NOTHING_FOUND = Fallback(Reason.NO_ENGINE, "not built yet")
"""Reason for a model without an engine; the log and the panel list damaged engines."""


@dataclass(frozen=True)
class EngineQuery:
    """Query of a node for an engine.

    Attributes:
        weights: hashes of the weights that the engine may have, the most wanted first; or layouts, for engines of
            any weights.
        backends: names, the most wanted first.
        gpu: where it is to run; ``""`` is the CPU.
        fastest: whether to prefer the engine that was fastest on this GPU, of any backend; see
            ``measurements.relative_time``.
        only_timed: backends whose engines count only if they were timed on this GPU.
        covers: tells whether an engine takes all calls of the profile; by default its own profile has to hold it.
        layout: the network's layout; ``""`` where it does not matter.
    """

    architecture: str
    weights: Sequence[str]
    precision: str
    profile: Profile
    backends: Sequence[str] = ()
    gpu: str = ""
    fastest: bool = False
    only_timed: Collection[str] = ()
    covers: Callable[[Engine], bool] | None = None
    layout: str = ""


def manifests(root: Path) -> list[Path]:
    """List the manifests of all engines in a folder of the library, served or not.

    Hidden folders are no engines: builds, for example.
    """
    return [path for path in sorted(root.glob(f"*/{MANIFEST_NAME}")) if not path.parent.name.startswith(".")]


class Library:
    """The engines under some folders; builds go to the first. Holds no state but the manifests it has read."""

    def __init__(self, roots: Sequence[Path]):
        # a folder with two names counts once, or its engines would be listed twice
        self.roots = list({os.path.realpath(root): root for root in reversed(roots)}.values())[::-1]
        self._read: dict[Path, tuple[tuple[int, int], Engine | None]] = {}
        for root in self.roots:
            warn_if_other_users_may_write(root)

    def engines(self) -> list[Engine]:
        """Return every engine with a readable manifest, in a stable order."""
        seen = {}
        for root in self.roots:
            for path in manifests(root):
                try:
                    stat = path.stat()
                except OSError:
                    continue  # deleted since it was listed
                stamp = (stat.st_mtime_ns, stat.st_size)
                known = self._read.get(path)
                seen[path] = known if known and known[0] == stamp else (stamp, self._load(path))
        self._read = seen
        return [engine for _, engine in seen.values() if engine is not None]

    def find(self, wanted: EngineQuery, usable: Usable) -> list[Engine]:
        """Return the engines that can serve a model, the best first.

        Engines whose profile holds the wanted one come first, then more wanted backends, then smaller profiles.
        A smaller profile than wanted still serves the calls that fit it. With ``fastest``, an engine's time on this
        GPU counts more than its backend, and engines without times come later.

        Raises:
            Unavailable: there is none; the error carries the reason that is closest to success.
        """
        candidates, refusals = [], []
        for engine in self._matching(wanted):
            relative_time = measurements.relative_time(engine, wanted.gpu)
            if relative_time is None and engine.manifest.identity.backend in wanted.only_timed:
                continue
            if (refusal := self.why_unusable(engine, usable, wanted.gpu)) is not None:
                refusals.append(refusal)
                continue
            rank = _rank(engine, wanted, relative_time if wanted.fastest else None)
            candidates.append((rank, len(candidates), engine))
        if not candidates:
            unchecked = (refusal for refusal in refusals if refusal.reason is Reason.UNCHECKED)
            raise Unavailable.of(next(unchecked, refusals[0] if refusals else NOTHING_FOUND))
        return [engine for _, _, engine in sorted(candidates)]

    def unchecked(self, wanted: EngineQuery, usable: Usable) -> Engine | None:
        """Return the smallest engine that holds the wanted profile and needs only a check to serve."""
        found = []
        for engine in self._matching(wanted):
            fallback, profile = self.why_unusable(engine, usable, wanted.gpu), engine.manifest.identity.profile
            if fallback is not None and fallback.reason is Reason.UNCHECKED and profile.contains(wanted.profile):
                found.append(engine)
        return min(found, key=lambda engine: engine.manifest.identity.profile.volume(), default=None)

    def _matching(self, wanted: EngineQuery) -> Iterator[Engine]:
        """Yield the engines of the wanted network, precision and backends, usable or not."""
        for engine in self.engines():
            identity = engine.manifest.identity
            same = identity.architecture == wanted.architecture and identity.precision == wanted.precision
            if same and identity.backend in wanted.backends and _fits(identity, wanted):
                yield engine

    def may_have(
        self,
        architecture: str,
        fingerprint: Callable[[], str],
        backends: Collection[str] | None = None,
        not_its: Collection[str] = (),
    ) -> bool:
        """Tell whether the library may have an engine for a model, without its weights hash; False is certain.

        Args:
            backends: names of the backends whose engines count; all by default.
            not_its: hashes of weights that the model does not have.
        """
        manifests = [e.manifest for e in self.engines() if e.manifest.identity.architecture == architecture]
        manifests = [m for m in manifests if m.identity.weights not in not_its]
        known = {m.fingerprint for m in manifests if backends is None or m.identity.backend in backends}
        return bool(known) and ("" in known or fingerprint() in known)

    def timed_on(self, gpu: str, architecture: str) -> set[str]:
        """Return the backends with an engine of an architecture that this machine has timed on a GPU."""
        engines = [e for e in self.engines() if e.manifest.identity.architecture == architecture]
        return {e.manifest.identity.backend for e in engines if measurements.relative_time(e, gpu) is not None}

    def check_limit(self, more: int, what: str, replaced: Path | None = None) -> None:
        """Raise LibraryError when ``more`` bytes of engines do not fit the limit.

        Args:
            what: begins the sentence.
            replaced: the folder of the engine in whose place they come, if it is there.
        """
        limit = read_settings(self.roots[0]).limit_gb * 1e9
        used = sum(e.manifest.bytes for e in self.engines() if e.folder != replaced) if limit else 0
        if limit and used + more > limit:
            raise LibraryError(
                f"{what} needs about {gigabytes(more)}, the engines take {gigabytes(used)}, and the settings allow "
                f"{gigabytes(limit)} in all. Nothing was changed and the normal model keeps running; delete engines "
                "that you no longer use, or raise the limit in Settings > Hybrid TRT"
            )

    def exact(self, identity: EngineIdentity, usable: Usable, gpu: str = "") -> Engine | None:
        """Return the engine with this very key, if it is there and usable."""
        same = (e for e in self.engines() if e.manifest.identity == identity)
        return next((e for e in same if self.why_unusable(e, usable, gpu) is None), None)

    @staticmethod
    def why_unusable(engine: Engine, usable: Usable, gpu: str = "") -> Fallback | None:
        """Return why an engine cannot be used (stale, broken, unchecked ...), without reading its files, or None."""
        made_with = engine.manifest.identity.export_format
        if made_with != EXPORT_FORMAT:
            return Fallback(
                Reason.STALE_ENGINE,
                f"{engine.folder.name} has export format {made_with}, this version uses {EXPORT_FORMAT}",
            )
        if engine.manifest.identity.outdated_layout:
            what = "was made by a version that looked at fewer settings of a network's layers"
            return Fallback(Reason.STALE_ENGINE, f"{engine.folder.name} {what}")
        try:
            engine.check_sizes()
        except Unavailable as broken:
            return broken.fallback
        return usable(engine.manifest) or trust.why_unusable(engine, gpu)

    @staticmethod
    def _load(path: Path) -> Engine | None:
        try:
            return Engine(path.parent, Manifest.read(path))
        except ManifestError as error:
            log.warning("Hybrid TRT: %s. This engine is ignored; build it again or delete its folder.", error)
            return None

    def sweep(self) -> None:
        """Remove leftovers of dead processes in its folders: builds, and engines that they were deleting."""
        for root in self.roots:
            sweep(root)

    @contextlib.contextmanager
    def building_folder(self) -> Iterator[Path]:
        """Yield an empty folder inside the library, invisible to ``engines`` until ``publish``; remove what is left.

        Raises:
            LibraryError: the library cannot be written.
        """
        self.sweep()
        with contextlib.ExitStack() as until_the_end:
            try:
                folder = until_the_end.enter_context(work_folder(self.roots[0]))
            except OSError as error:
                raise readable(error, self.roots[0]) from error
            yield folder

    def lock(self, identity: EngineIdentity) -> FileLock:
        """Return the lock that a builder of this engine has to hold, whatever process it lives in."""
        return FileLock(self.roots[0] / f".{identity.folder_name}.lock")

    def publish(
        self,
        building: Path,
        manifest: Manifest,
        check: Check | None = None,
        record: trust.Record = trust.BUILT_HERE,
    ) -> Engine:
        """Write the manifest into a building folder and make the engine appear; it replaces that with the same key.

        Args:
            record: this machine's record of the engine.
            check: called until just before the engine appears; if it raises, the library stays as it was.

        Raises:
            LibraryError: nobody could read this manifest again.
            OSError: the library cannot be written; the engine that was to be replaced is there as before.
        """
        check = check or (lambda: None)
        text = json.dumps(manifest.to_json(), indent=1).encode()
        try:
            manifest = Manifest.parse(text, f"the manifest for {manifest.identity.folder_name}")
        except ManifestError as error:
            text = f"{error}, so the engine was not kept and the normal model keeps running; report this"
            raise LibraryError(text) from error
        target = self.roots[0] / manifest.identity.folder_name
        (building / MANIFEST_NAME).write_bytes(text)
        trust.keep(building, manifest, record, target)
        for file in building.iterdir():
            check()
            sync(file)
        check()
        with out_of_the_way(target):
            move(building, target)
        with contextlib.suppress(OSError):  # the engine is published: nothing may fail any more
            sync(target.parent)
        return Engine(target, manifest)

    @staticmethod
    def remove(folder: Path) -> None:
        """Make an engine's folder disappear at once, then free its space.

        Raises:
            OSError: the folder is read-only, or (on Windows) one of its files is in use.
        """
        with work_folder(folder.parent) as trash:
            move(folder, trash / folder.name)


def _fits(identity: EngineIdentity, wanted: EngineQuery) -> bool:
    """Tell whether an engine has wanted weights, or an earlier version's layout, which may stand for them."""
    if identity.outdated_layout:
        return any(weights.startswith(LAYOUT_PREFIX) for weights in wanted.weights)
    other = wanted.layout and identity.layout and identity.layout != wanted.layout
    return identity.weights in wanted.weights and not other


def _rank(engine: Engine, wanted: EngineQuery, relative_time: float | None) -> tuple:
    """Return the sort key of an engine that serves a node, the best first; ``relative_time``: measured, or None."""
    identity = engine.manifest.identity
    profile = identity.profile
    # a UNet's has no sizes of hints
    covers = wanted.covers(engine) if wanted.covers else profile.contains(wanted.profile.only(profile.ranges))
    backend, weights = wanted.backends.index(identity.backend), wanted.weights.index(identity.weights)
    return not covers, relative_time is None, relative_time or 0.0, backend, weights, profile.volume()


@functools.cache
def warn_if_other_users_may_write(root: Path) -> None:
    """Say once that other users may write to a folder of the library."""
    if other_users_may_write(root):
        log.warning(
            "Hybrid TRT: other users may write to the engine library in %s. What they put there never runs, but they "
            "could slip it into a build; take that right from them, or let 'trt_engines' in extra_model_paths.yaml "
            "name a folder of your own", root,
        )  # fmt: skip
