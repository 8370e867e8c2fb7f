"""Changes that other nodes make to a network: looked for once per run, and where that is quick in each call."""

from __future__ import annotations

from ..comfy_model.edited_weights import look_for_edits
from ..comfy_model.layer_watch import LayerWatch
from ..comfy_model.network import NativeNetwork
from ..engine_library import Fallback, Reason
from .sampling_runs import SamplingRun, current_run


class NetworkWatch:
    """Watches a network from run to run.

    Attributes:
        layers: the watch of its layers.
    """

    def __init__(self, network: NativeNetwork):
        self.layers = LayerWatch(network.module)
        self._patcher = network.patcher
        self._run: SamplingRun | None = None  # the one in which it was looked at last
        self._changed: Fallback | None = None  # what was found then
        self._edition = 0  # of the weights, when the engine was looked up

    def begin(self) -> None:
        """The engine is being looked up, for which its layers are looked at: the weights are too."""
        self._run, self._changed = current_run(), None
        self._edition = look_for_edits(self._patcher)

    def weights_edited(self) -> bool:
        """Look at the network once per run: an execution of a node may have several. Whether its weights are others
        since the engine was looked up. Cheap in all calls but a run's first."""
        run = current_run()
        if run is self._run:
            return False
        self._run, what = run, self.layers.look()
        self._changed = None if what is None else Fallback(Reason.MODEL_PATCHED, what)
        return look_for_edits(self._patcher) != self._edition

    def changed(self) -> Fallback | None:
        """The reason why this call's network is no longer the engine's, or None. Quick."""
        if self._changed is not None:
            return self._changed
        what = self.layers.look_again(methods=self._run is None or not self._run.comfyuis_alone)
        return None if what is None else Fallback(Reason.MODEL_PATCHED, what)
