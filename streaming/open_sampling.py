"""The sampling that a stream keeps open: ComfyUI's guider has loaded and prepared all, and frames are sampled in it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import comfy.k_diffusion.sampling
import comfy.sample
import comfy.samplers
import torch
from comfy import model_management, sampler_helpers
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ..comfy_model.comfyui_internals import Feature, works
from ..sampling.model_wrapper import KEY
from ..sampling.run_context import others_take_part
from ..sampling.run_inputs import sigmas_on_device
from .frames import upload
from .prompt_inputs import Prompts, prompts_of, with_tensors

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

    from .control_images import Conditioning
    from .frames import Settings

PER_RUN = ("OUTER_SAMPLE", "PREPARE_SAMPLING", "SAMPLER_SAMPLE"), ("ON_PRE_RUN", "ON_CLEANUP")
"""Kinds of wrappers and of callbacks that ComfyUI calls once in each sampling."""


DRAW_BY_SEED = ("lcm",)
"""Samplers whose only random numbers are noise from a frame's seed, once between two steps."""


@dataclass(frozen=True)
class _Schedule:
    """The steps of each frame."""

    made_for: tuple
    sampler: comfy.samplers.KSAMPLER
    sigmas: torch.Tensor
    there: torch.Tensor
    """The same on the device."""


@dataclass(frozen=True)
class Noise:
    """The noise of a frame.

    Attributes:
        values: at the start, on the device.
        steps: noise that the sampler adds between its steps, in order; None if the sampler draws it.
        state: state of ComfyUI's random numbers after drawing ``values``.
    """

    made_for: tuple
    values: torch.Tensor
    steps: tuple[torch.Tensor, ...] | None
    state: torch.Tensor
    seed: int


class OpenSampling(comfy.samplers.Sampler):
    """A sampler that samples nothing by itself: while ComfyUI waits for it, ``frames`` calls ``sample_frame``."""

    def __init__(self, frames: Callable[[], None]):
        self._frames = frames
        self._guider: Any = None
        self._options: dict[str, Any] = {}
        self._models: list[Any] = []
        self._prepared_for: tuple = ()
        self._looked_at: tuple = ()
        self._prompts = Prompts()
        self._new: dict[str, Conditioning] | None = None
        self._schedule: _Schedule | None = None
        self._noise: Noise | None = None
        self._empty: torch.Tensor | None = None

    def sample(self, model_wrap: Any, sigmas: torch.Tensor, extra_args: dict, callback: Any, noise: torch.Tensor,
               *_: Any, **__: Any) -> torch.Tensor:  # fmt: skip
        """Run the frames. ComfyUI calls this when models are loaded and conditionings are prepared."""
        self._guider, self._options = model_wrap, extra_args["model_options"]
        loaded = model_management.loaded_models(only_currently_used=True)
        self._models = [model for model in loaded if model is not None]  # None is a model that was freed
        model = model_wrap.model_patcher
        with sigmas_on_device(model), _memory_asked_once(model), _nothing_collected():
            self._frames()
        return noise

    def take(self, conds: dict[str, Conditioning]) -> None:
        """Sample with these conditionings, positive and negative, from the next frame on."""
        self._new = conds

    def reload(self) -> None:
        """Load the models of the open sampling again if other models replaced them."""
        if self._models:
            model_management.load_models_gpu(self._models)

    @property
    def conds_are_fixed(self) -> bool:
        """True if the conditionings are prepared, and depend only on the size of frames."""
        return self._new is None and bool(self._prepared_for)

    def sample_frame(self, latent: torch.Tensor, noise: Noise, settings: Settings) -> torch.Tensor:
        """Return the sampled latent as KSampler gives it, but on its device; without waiting for it."""
        guider = self._guider
        device = guider.model_patcher.load_device
        schedule = self._schedule_of(settings, device)
        if len(schedule.sigmas) == 0:
            return latent
        latent = self._begun(latent, noise, settings, schedule)
        extra = {"model_options": self._options, "seed": noise.seed}
        torch.set_rng_state(noise.state)
        sampler = schedule.sampler
        sampler.extra_options = {} if noise.steps is None else {"noise_sampler": _in_turn(noise.steps)}
        sampled = sampler.sample(guider, schedule.sigmas, extra, None, noise.values, latent, None, True)
        return self._ended(sampled)

    def step_all(
        self, latent: torch.Tensor, noise: Noise, work: torch.Tensor, settings: Settings
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take all frames in work a step further, in one call; return the oldest sampled latent, and the rest.

        Args:
            latent: latent of the new frame, which has its first step.
            noise: its noise at the start; ``steps`` has the noise added to the frames after each step.
            work: latents of the frames before, the newest first, each a step further than the next newer latent.
        """
        guider = self._guider
        schedule, sampling = self._schedule_of(settings, work.device), guider.inner_model.model_sampling
        latent = self._begun(latent, noise, settings, schedule)
        first, last = schedule.sigmas[0], schedule.sigmas[-1]
        full = schedule.sampler.max_denoise(guider, schedule.sigmas)
        latents = torch.cat((sampling.noise_scaling(first, noise.values, latent, full), work))
        denoised = guider(latents, schedule.there[:-1], model_options=self._options, seed=noise.seed)
        latents = _stepped(settings.sampler_name, sampling, latents, denoised, schedule.there, noise.steps)
        return self._ended(sampling.inverse_noise_scaling(last, latents[-1:])), latents[:-1]

    def _begun(self, latent: torch.Tensor, noise: Noise, settings: Settings, schedule: _Schedule) -> torch.Tensor:
        """Prepare the guider for a frame, and return its latent as networks have it."""
        guider, device = self._guider, self._guider.model_patcher.load_device
        if settings.from_noise:  # ComfyUI leaves an empty latent as it is
            latent = self._empty_of(latent, device)
        else:
            latent = guider.inner_model.process_latent_in(latent.to(device=device, dtype=torch.float32))
        guider.set_cfg(settings.cfg)
        self._prepare(latent, noise.values, noise.seed)
        self._options["transformer_options"]["sample_sigmas"] = schedule.sigmas
        return latent

    def _ended(self, sampled: torch.Tensor) -> torch.Tensor:
        sampled = self._guider.inner_model.process_latent_out(sampled.to(torch.float32))
        return sampled.to(model_management.intermediate_dtype())

    def steps_of(self, settings: Settings) -> int:
        """Return the number of steps of each frame."""
        return len(self._schedule_of(settings, self._guider.model_patcher.load_device).sigmas) - 1

    def ends_clean(self, settings: Settings) -> bool:
        """Tell whether each frame has noise left up to the last step, and none after it."""
        *before, last = self._schedule_of(settings, self._guider.model_patcher.load_device).sigmas.tolist()
        return last == 0 and all(before)

    def fixes_conds(self, shape: tuple[int, ...]) -> bool:
        """Tell whether the conditionings are the same for all frames with latents of a shape."""
        if self._new is not None or self._looked_at != shape:
            empty = torch.zeros(shape, device=self._guider.model_patcher.load_device)
            self._prepare(empty, empty, 0)
        return self.conds_are_fixed

    def prompts(self, shape: tuple[int, ...]) -> Prompts:
        """Return the prompts of frames with latents of a shape; nothing if they differ between frames."""
        return self._prompts if self.fixes_conds(shape) else Prompts()

    @contextlib.contextmanager
    def replaced_inputs(self, prompts: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Sample with these tensors in place of the prompts' own."""
        guider, own = self._guider, self._guider.conds
        guider.conds = with_tensors(own, prompts) if prompts else own
        try:
            yield
        finally:
            guider.conds = own

    def noise_of(self, seed: int, shape: tuple[int, ...], settings: Settings) -> Noise:
        """Return the noise that ComfyUI draws for a latent of this shape."""
        made_for = (seed, shape, settings.sampler_name, settings.scheduler, settings.steps, settings.denoise)
        if self._noise is None or self._noise.made_for != made_for:
            device = self._guider.model_patcher.load_device
            sigmas = self._schedule_of(settings, device).sigmas
            values = comfy.sample.prepare_noise(torch.zeros(shape), seed)
            state = torch.get_rng_state()
            values, steps = upload(values, device).to(torch.float32), None
            if settings.sampler_name in DRAW_BY_SEED:
                draw = comfy.k_diffusion.sampling.default_noise_sampler(values, seed)
                steps = tuple(draw(None, None) for _ in range(int((sigmas[1:] > 0).sum())))
            self._noise = Noise(made_for, values, steps, state, seed)
        return self._noise

    def _prepare(self, latent: torch.Tensor, noise: torch.Tensor, seed: int) -> None:
        """Prepare conditionings as ComfyUI does at the start of a sampling, unless an earlier frame had the same."""
        guider = self._guider
        if self._new is None and self._prepared_for == tuple(latent.shape):
            return
        if self._new is not None:
            guider.set_conds(self._new["positive"], self._new["negative"])
            self._new = None
        conds = {name: [cond.copy() for cond in group] for name, group in guider.original_conds.items()}
        guider.conds = comfy.samplers.process_conds(
            guider.inner_model, noise, conds, latent.device, latent, None, seed, latent_shapes=[latent.shape]
        )
        self._looked_at, prompts = tuple(latent.shape), prompts_of(guider.conds)
        known = self._prepared_for == self._looked_at and prompts.form is not None
        fixed = (known and prompts.form == self._prompts.form) or not self._depend_on_frames(latent)
        self._prepared_for, self._prompts = self._looked_at if fixed else (), prompts

    def _depend_on_frames(self, latent: torch.Tensor) -> bool:
        """Tell whether conditionings depend on a frame's latent, its noise or its seed, and not only on its size."""
        model, made = self._guider.inner_model, []
        for value in (0, 1):
            image = torch.full_like(latent, value)
            for name, group in self._guider.original_conds.items():
                conds = comfy.samplers.encode_model_conds(
                    model.extra_conds, [cond.copy() for cond in group], image, latent.device, name, latent_image=image,
                    denoise_mask=None, seed=value + 10, latent_shapes=[latent.shape],
                )  # fmt: skip
                made.append([cond["model_conds"] for cond in conds])
        half = len(made) // 2
        return not all(map(_same_conditions, made[:half], made[half:]))

    def _schedule_of(self, settings: Settings, device: torch.device) -> _Schedule:
        made_for = (settings.steps, settings.denoise, settings.sampler_name, settings.scheduler)
        if self._schedule is None or self._schedule.made_for != made_for:
            model = self._guider.model_patcher
            steps = comfy.samplers.KSampler(
                model, settings.steps, device, settings.sampler_name, settings.scheduler, settings.denoise,
                model.model_options,
            )  # fmt: skip
            sampler = comfy.samplers.sampler_object(settings.sampler_name)
            if len(steps.sigmas):
                full = sampler.max_denoise(self._guider, steps.sigmas)
                sampler.max_denoise = lambda *_: full  # it reads two values from the device in each sampling
            sigmas = steps.sigmas
            self._schedule = _Schedule(made_for, sampler, _where_read(settings.sampler_name, sigmas), sigmas.to(device))
        return self._schedule

    def _empty_of(self, latent: torch.Tensor, device: torch.device) -> torch.Tensor:
        if self._empty is None or self._empty.shape != latent.shape:
            self._empty = latent.to(device=device, dtype=torch.float32)
        return self._empty


@contextlib.contextmanager
def _memory_asked_once(patcher: ModelPatcher) -> Iterator[None]:
    """Give the same answer on free memory to each step: a query takes the time of many launches.

    The patcher is the stream's own. ComfyUI asks it to decide if prompts share a call.
    """
    free = patcher.get_free_memory(patcher.load_device)
    patcher.get_free_memory = lambda _device: free
    try:
        yield
    finally:
        del patcher.get_free_memory


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Keep Python's garbage collection from visiting existing objects: that takes as long as many frames."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _in_turn(noises: tuple[torch.Tensor, ...]) -> Callable[..., torch.Tensor]:
    """Return a noise sampler for ComfyUI's samplers that gives these noises in turn."""
    left = iter(noises)
    return lambda _sigma, _sigma_next: next(left)


def _stepped(
    sampler_name: str, sampling: Any, latents: torch.Tensor, denoised: torch.Tensor, sigmas: torch.Tensor,
    noises: Sequence[torch.Tensor] | None,
) -> torch.Tensor:  # fmt: skip
    """Return the latents after a step of each; latent n is at step n.

    LCM adds noise for the next step to the network's result, except in the last step. Euler moves the latent straight
    towards the result, as far as the sigmas say.

    Args:
        sigmas: sigmas of the steps, then of the last step's end.
        noises: noises for the ends of all steps but the last.
    """
    if sampler_name in DRAW_BY_SEED:
        return torch.cat((sampling.noise_scaling(sigmas[1:-1], torch.cat(tuple(noises)), denoised[:-1]), denoised[-1:]))
    now, end = (part.view(-1, *[1] * (latents.ndim - 1)) for part in (sigmas[:-1], sigmas[1:]))
    return latents + (latents - denoised) / now * (end - now)


def _same_conditions(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    if [list(conditions) for conditions in one] != [list(conditions) for conditions in other]:
        return False
    return all(_same_values(a[name].cond, b[name].cond) for a, b in zip(one, other, strict=True) for name in a)


def _same_values(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one is other or (one.shape == other.shape and torch.equal(one, other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same_values, one, other))
    return isinstance(one, bool | int | float | str | None) and one == other


def _where_read(sampler_name: str, sigmas: torch.Tensor) -> torch.Tensor:
    """Return sigmas in main memory for samplers that compare their values, which would wait for the device.

    The other samplers compute with them beside the latent, so they stay on its device.
    """
    if sampler_name == "lcm" or (sampler_name == "euler_ancestral" and len(sigmas) == 2 and float(sigmas[1]) == 0):
        return sigmas.cpu()
    return sigmas


def why_one_by_one(model: ModelPatcher, conds: dict[str, Conditioning]) -> str:
    """Return why each frame has to be a sampling of its own, a sentence; empty if frames may share a sampling."""
    why = _why_apart(model, conds)
    return f"Each frame was a sampling of its own, which takes longer: {why}." if why else ""


def _why_apart(model: ModelPatcher, conds: dict[str, Conditioning]) -> str:
    if not works(Feature.STREAMS):
        return "this ComfyUI samples in a way that is not known"
    if any(sampler_helpers.cond_has_hooks(group) for group in conds.values()) or model.forced_hooks:
        return "a prompt or the model brings a LoRA or checkpoint of its own (hooks)"
    if model.get_additional_models_with_key("multigpu"):
        return "MultiGPU shares each step among GPUs"
    if model.get_model_object("latent_format").latent_dimensions != 2:
        return "this kind of model has latents of videos"
    if (name := _acts_on_runs(model)) is not None:
        return f"another node ({name}) acts on each sampling"
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(conds["positive"], conds["negative"])
    guider.conds = guider.original_conds
    theirs = (model.wrappers, model.callbacks, model.object_patches, model.injections, model.weight_wrapper_patches)
    return "another pack takes part in the sampling" if others_take_part(guider, theirs) else ""


def _acts_on_runs(model: ModelPatcher) -> str | None:
    """Return the name of another node that does something at the start or the end of each sampling, or None."""
    options = model.model_options.get("transformer_options", {})
    for place, owner, kinds in zip(("wrappers", "callbacks"), (WrappersMP, CallbacksMP), PER_RUN, strict=True):
        wanted = [getattr(owner, kind, None) for kind in kinds]
        for found in (getattr(model, place), options.get(place, {})):
            names = [name for kind in wanted for name, held in found.get(kind, {}).items() if held and name != KEY]
            if names:
                return str(names[0])
    return None
