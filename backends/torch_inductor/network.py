"""One network run from its live weights: plainly, or with its blocks compiled."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ...architectures import Architecture, Role
from ...architectures.shapes import TensorSpec
from ...comfy_model.comfyui_internals import Feature, works
from ...comfy_model.live_weights import LiveWeights
from ...comfy_model.network import NativeNetwork
from ...comfy_model.torch_kernels import best_attention
from ...engine_library import Engine
from ...sessions.cuda_capture import wait_at_point
from ...sessions.made_inputs import PerImagePasses
from ...sessions.weight_ring import WeightRing
from . import wiring
from .compiled import lifted, parameters_of
from .kinds import InBlocks, Kinds

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


class LiveNetwork:
    """A plain copy of a native network over its live weights, as a function of named tensors.

    Attributes:
        inputs, outputs: its tensors, in order.
        weights: where the parameters come from.
        blocks: the layers that can be compiled, or none.
        compiled: the network with these layers compiled, once an engine was opened.
        shares: whether they may be ComfyUI's own where these lie on the GPU.
        per-image passes: what gives some of the inputs.
    """

    def __init__(self, network: NativeNetwork, architecture: Architecture, precision: str):
        self.dtype = getattr(torch, precision)
        self.device = network.device
        self.inputs: list[TensorSpec] = architecture.engine_inputs(network.module, precision)
        self.outputs: list[TensorSpec] = architecture.outputs(network.module, precision)
        # a ControlNet's own patcher is replaced by the engine's, so nobody loads native weights to share
        self.shares = network.role is not Role.CONTROLNET
        self.weights = LiveWeights(network, self.dtype, share=self.shares)
        copy = self.weights.module
        self.passes = PerImagePasses(architecture.passes(copy), self.device, self.dtype)
        layers = set(copy.modules())
        self.function = architecture.function(copy)
        self.weights.forget(layers.difference(copy.modules()))
        self.blocks: Sequence[torch.nn.Module] = getattr(self.function, "blocks", ())
        self.compiled: InBlocks | None = None
        self._of_blocks: list[list[torch.Tensor]] = []
        self._ring: WeightRing | None = None
        self._found_in = -1
        if (layer := getattr(self.function, "before_late", None)) is not None:
            layer.register_forward_hook(lambda *_: wait_at_point())

    def sync_from(self, patcher: ModelPatcher, thorough: bool = True) -> None:
        """Take a patcher's weights; see ``LiveWeights.sync_from``."""
        self.weights.sync_from(patcher, thorough)
        if self.weights.outside:
            self._find_weights()

    def release(self) -> None:
        """Give the weights' memory back; the next ``sync_from`` starts anew."""
        self.weights.release()
        self._let_go()

    def move_out(self, names: Collection[str]) -> None:
        """See ``LiveWeights.move_out``."""
        self.weights.move_out(names)
        self._let_go()

    def _let_go(self) -> None:
        self._of_blocks, self._ring, self._found_in = [], None, -1

    @property
    def bytes(self) -> int:
        """Memory on the device of weights that are not ComfyUI's own."""
        return self.weights.bytes + (0 if self._ring is None else self._ring.bytes)

    @property
    def streams(self) -> bool:
        """Tell whether weights of blocks may wait in main memory: each block then runs by itself."""
        return self.compiled is not None and works(Feature.STREAMED)

    @property
    def pinned(self) -> bool:
        """Tell whether all weights that are streamed are pinned: only then can a CUDA graph copy them."""
        return self._ring is None or self._ring.pinned

    def _find_weights(self) -> None:
        """Find the blocks' weights anew where a tensor has moved, in the order that compiled blocks take them in."""
        if self._found_in != self.weights.generation:
            self._let_go()  # first: a ring may hold much
            self._of_blocks = [list(lifted(block).values()) for block in self.blocks]
            outside = self.weights.outside_parameters()
            marks = [[id(parameter) in outside for parameter in parameters_of(block)] for block in self.blocks]
            self._ring = WeightRing(self._of_blocks, marks, self.device)
            self._found_in = self.weights.generation

    def _weights_of_blocks(self) -> tuple[list[list[torch.Tensor]], WeightRing]:
        self._find_weights()
        return self._of_blocks, self._ring

    def use_compiled(self, kinds: Kinds, engine: Engine) -> None:
        """Run the blocks compiled from now on, as an engine has them."""
        self.compiled = InBlocks(self.function, kinds, self._weights_of_blocks, wiring.judge_of(engine))

    def forget_compiled(self) -> None:
        """Run the blocks plainly again."""
        if self.compiled is not None:
            self.compiled.close()
            self.compiled = None

    def run(self, inputs: Mapping[str, torch.Tensor], compiled: bool) -> dict[str, torch.Tensor]:
        """One call on tensors of the right dtype, device and layout; output name -> tensor.

        Args:
            compiled: whether compiled blocks serve calls of these sizes.
        """
        given = [inputs[spec.name] for spec in self.inputs]
        with best_attention(self.device):
            results = self.function(*given) if self.compiled is None else self.compiled(*given, compiled=compiled)
        return {spec.name: result for spec, result in zip(self.outputs, results, strict=True)}
