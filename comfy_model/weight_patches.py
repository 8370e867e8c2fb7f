"""Weight patches of a patcher, kept to be compared with other patchers, or with its own later state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from ..engine_library import Fallback, Reason

if TYPE_CHECKING:
    import torch
    from comfy.model_patcher import ModelPatcher

Answer = TypeVar("Answer")


class WeightPatches:
    """The patches on a patcher's weights at one moment. Refers to the patches, never to the patcher.

    ComfyUI's ``patches_uuid`` does not suffice: it also changes, for good, when hooks of a prompt are registered on
    the patcher for one run.
    """

    def __init__(self, patcher: ModelPatcher):
        self._judged: tuple[object, Fallback | None] = (patcher.patches_uuid, None)
        self._patches = _patches_of(patcher)

    def same_on(self, patcher: ModelPatcher) -> bool:
        """Tell whether a patcher has the same patches, hooks aside."""
        return self.difference_on(patcher) is None

    def difference_on(self, patcher: ModelPatcher) -> Fallback | None:
        """Return why a patcher has other patches, hooks aside, or None. Cheap unless its uuid is new."""
        uuid = patcher.patches_uuid
        if uuid != self._judged[0]:
            self._judged = (uuid, _difference(self._patches, _patches_of(patcher)))
        return self._judged[1]


_acts: dict[tuple[object, int], bool] = {}
"""By uuid and number of patched weights: True where patches act."""
_reshaped: dict[tuple[object, int], str] = {}
"""By the same keys: the name of a weight that patches give another shape, or ``""``."""


def version_of(patcher: ModelPatcher) -> object | None:
    """Return an id of a patcher's weights among its model's patchers; None for the model's own weights."""
    if not patcher.patches:
        return None
    acts = _remembered(_acts, patcher, lambda: any(acting(patches) for patches in patcher.patches.values()))
    return patcher.patches_uuid if acts else None


def _remembered(answers: dict[tuple[object, int], Answer], patcher: ModelPatcher, ask: Callable[[], Answer]) -> Answer:
    """Return a cached answer about a patcher's patches."""
    key = (patcher.patches_uuid, len(patcher.patches))
    if key not in answers:
        if len(answers) >= 1024:
            answers.clear()
        answers[key] = ask()
    return answers[key]


def acting(patches: Iterable[tuple]) -> list[tuple]:
    """Return the patches that change a weight. A LoRA for CLIP alone leaves patches of strength 0 on the model."""
    return [patch for patch in patches if patch[0] != 0 or patch[2] != 1 or _acts_at_any_strength(patch[1])]


def _acts_at_any_strength(value: object) -> bool:
    """Tell whether a patch sets a weight, or gives it another shape, however weak it is."""
    is_set = isinstance(value, tuple) and len(value) == 2 and value[0] == "set"
    return is_set or _shape_given_by(value) is not None


def why_reshaped(patcher: ModelPatcher) -> Fallback | None:
    """Return why no engine serves a patcher whose patches give a weight another shape, as LoRAs of Flux tools do.

    Cheap where the patches are known.
    """
    if not patcher.patches:
        return None
    name = _remembered(_reshaped, patcher, lambda: next(
        (name for name in patcher.patches if _gets_another_shape(patcher, name)), ""))  # fmt: skip
    if not name:
        return None
    return Fallback(
        Reason.WEIGHTS_PATCHED, f"a LoRA gives {name} another shape, which no engine takes",
        advice="nothing to do: the normal model applies it",
    )  # fmt: skip


def _gets_another_shape(patcher: ModelPatcher, name: str) -> bool:
    given = (_shape_given_by(patch[1]) for patch in acting(patcher.patches[name]) if patch[3] is None)
    shapes = [shape for shape in given if shape is not None]
    if not shapes:
        return False
    kept = patcher.backup.get(name)
    weight = patcher.get_model_object(name) if kept is None else kept.weight
    return tuple(shapes[-1]) != tuple(weight.shape)


def _shape_given_by(value: object) -> tuple[int, ...] | None:
    """Return the shape that a patch gives its weight, or None: some LoRAs do, and differences with padding."""
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "diff":
        padded = len(value[1]) > 1 and value[1][1].get("pad_weight")
        return tuple(value[1][0].shape) if padded else None
    parts = getattr(value, "weights", ())
    named = getattr(value, "name", "") == "lora" and len(parts) > 5 and parts[5] is not None
    return tuple(parts[5]) if named else None


def _patches_of(patcher: ModelPatcher) -> dict[str, list]:
    """Return name -> patches: all changes that give a patcher a new uuid, except hooks."""
    every = {f"weight {key}": found for key, patches in patcher.patches.items() if (found := acting(patches))}
    every |= {f"wrapper {key}": list(functions) for key, functions in patcher.weight_wrapper_patches.items()}
    every["compute dtype"] = [patcher.object_patches.get("manual_cast_dtype")]
    return every


def _difference(engines: dict[str, list], models: dict[str, list]) -> Fallback | None:
    """Return why an engine with patches built in does not serve a model with other patches, or None.

    Objects are compared by identity: clones of a patcher share them. Comparing tensors is slow.
    """
    if engines.keys() == models.keys() and all(all_same(patches, models[key]) for key, patches in engines.items()):
        return None
    if all(all_same(patches, engines.get(key, [])[: len(patches)]) for key, patches in models.items()):
        return Fallback(
            Reason.WEIGHTS_PATCHED, "a LoRA before the engine node is missing on the model that is sampled",
            advice="wire the model behind the LoRA into TRT Sampler Patch too, as into the engine node",
        )  # fmt: skip
    return Fallback(Reason.WEIGHTS_PATCHED, "a LoRA or another weight patch was added after the engine node")


def all_same(one: list, other: list) -> bool:
    """Tell whether two lists hold the very same patches."""
    return len(one) == len(other) and all(mine is theirs for mine, theirs in zip(one, other, strict=True))


def last_loaded(model: torch.nn.Module) -> ModelPatcher | None:
    """Return the patcher by which ComfyUI loaded a model last, or None."""
    from comfy.model_management import loaded_models

    return next((one for one in loaded_models() if one is not None and one.model is model), None)


def lies_on_its_model(patcher: ModelPatcher) -> bool:
    """Tell whether a model has exactly the weight patches and parts of a patcher. Cheap."""
    same = patcher.model.current_weight_patches_uuid == patcher.patches_uuid
    same = same and patcher.object_patches.keys() == patcher.object_patches_backup.keys()
    return same and patcher.is_injected == bool(patcher.injections)
