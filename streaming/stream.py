"""A stream: one sampling of ComfyUI's that stays open while frame after frame is sampled in it.

ComfyUI loads models, merges options, looks for hooks and prepares conditionings in each sampling. Here its guider does
so once. It gets a sampler of ours, which samples nothing by itself: it runs the frames, each with ComfyUI's own
sampler, schedule and noise. So each picture is the one that stock nodes make of the frame alone.

Where state of one frame would reach the next (a step cache, weight hooks, another pack's code), each frame is a
sampling of its own, as with stock nodes, and the stream says why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import comfy.sample
import comfy.samplers
import torch
from comfy import model_management
from comfy.ldm.modules.attention import BasicTransformerBlock

from ..architectures import Role
from ..architectures.kept_tokens import KeptTokens
from ..sampling.control_stack import has_engine
from ..sampling.model_wrapper import encodes_prompts, with_tokens_kept
from ..sampling.nan_guard import watched_apart
from ..sampling.several_gpus import COPIES
from ..sessions.cuda_capture import LargerGraph, part_of
from .control_images import Conditioning, ControlImages
from .frame_graph import FrameGraph, FrameInputs, Made, Picture, with_sums
from .frame_vae import FrameVAE
from .frames import LEAST_DENOISE, Changes, Settings, upload
from .open_sampling import Noise, OpenSampling, why_one_by_one
from .prompt_inputs import Prompts
from .step_batch import InWork, StepBatch, why_no_batch

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher
    from comfy.sd import CLIP, VAE

    from .frame_nodes import FrameNodes

OURS = "hybrid_trt_stream"
"""Key of the VAE among the models that are loaded with a stream's model."""


ROLES = (Role.BACKBONE, Role.VAE_DECODER, Role.VAE_ENCODER)
OPTIONS = ("model_function_wrapper", "sampler_cfg_function", "sampler_post_cfg_function", "sampler_pre_cfg_function",
           "sampler_calc_cond_batch_function", "denoise_mask_function")
"""Options with other nodes' functions that act on each step and may keep state between steps."""


class Stream:
    """Frames to pictures, one at a time or a step of each at a time; see the module.

    Attributes:
        settings: the next frame's settings; ``change`` sets them.
        controls: its ControlNets and their images.
        one_by_one: why each frame is a sampling of its own, a sentence; empty if it is not.
        steps_apart: why the steps of its frames are no batch although they were to be, a sentence.
    """

    def __init__(self, model: ModelPatcher, vae: VAE, positive: Conditioning, negative: Conditioning,
                 settings: Settings, clip: CLIP | None = None):
        self.settings = settings
        self.controls = ControlImages(positive, negative, settings.follow, model.load_device)
        self._model, self._kept = with_kept(model, settings.remembered)
        if not model.get_additional_models_with_key(COPIES):  # ComfyUI would copy the VAE with the model
            self._model.set_additional_models(OURS, [vae.patcher])  # loaded together: neither evicts the other
        self._clip = clip
        self._texts = dict.fromkeys(("positive", "negative"), None if clip is None else "")
        self._conds = {"positive": self.controls.positive, "negative": self.controls.negative}
        self.one_by_one = why_one_by_one(self._model, self._conds)
        self._vae = FrameVAE(vae, self._reload, stays_loaded=not self.one_by_one)
        self._open: OpenSampling | None = None
        self._edition = 0  # of the prompts
        self._controls_have_engines = all(map(has_engine, self.controls.controls))
        self._has_foreign_options = any(map(model.model_options.get, OPTIONS))
        self._frame_nodes: FrameNodes | None = None
        self._graph = FrameGraph(model.load_device, self._made, self._made_of)
        self._batch: StepBatch | None = None
        self._decided_for: Hashable | None = None
        self.steps_apart = ""

    def follow(self, nodes: FrameNodes) -> None:
        """Let these nodes make the images of ControlNets from each frame."""
        self._frame_nodes = nodes

    def run(self, first: torch.Tensor, frames: Callable[[], None]) -> None:
        """Call ``frames`` while the sampling is open, so that it may call ``picture``; then close it.

        Args:
            first: an image of the size of the frames to come; other sizes may follow.
        """
        if self._clip is not None:
            self._encode("")  # the first time takes as long as many frames
        try:
            if self.one_by_one:
                frames()
            else:
                empty = self._empty(first).repeat(self.settings.steps if self.settings.steps_as_batch else 1, 1, 1, 1)
                guider = comfy.samplers.CFGGuider(self._model)
                guider.set_conds(self._conds["positive"], self._conds["negative"])
                self._open = OpenSampling(frames)
                guider.sample(empty, empty, self._open, torch.tensor([1.0, 0.0]), seed=self.settings.seed)
        finally:
            self._graph.clear()
            self._open = self._batch = self._decided_for = None
            self.forget_frames()
            self.controls.end()

    def forget_frames(self) -> None:
        """Forget the tokens of earlier frames: they may be NaN."""
        if self._kept is not None:
            self._kept.clear()

    @property
    def busy(self) -> bool:
        """True if frames are in work: ``advance`` finishes them."""
        return self._batch is not None and self._batch.busy

    def joins(self, image: torch.Tensor) -> bool:
        """Tell whether a frame may begin beside the frames in work."""
        return not self.busy or self._batch.shape == self._latent_shape(image)

    def begin(self, image: torch.Tensor, number: int, key: Any) -> tuple[Any, Picture] | None:
        """Begin a frame; return the picture that this completes and its frame's key, or None.

        Args:
            key: returned with the picture. With several frames in work, the returned key belongs to an earlier frame.
        """
        if not self._steps_are_batch(image):
            return key, self.picture(image, number)
        there, noise = self._shown(image, number)
        return self._step(InWork(key, there, noise, dict(self.controls.hints)))

    def advance(self) -> tuple[Any, Picture] | None:
        """Take the frames in work a step further, without a new one; return as ``begin`` does."""
        return self._step(self._batch.filler())

    def _step(self, new: InWork) -> tuple[Any, Picture] | None:
        prompts = self._prompts(self._batch.shape)
        given = self._batch.inputs(new, self.controls.strength_tensors(), prompts.tensors)
        made = self._graph.picture(given, self._fixed(self._batch.shape, prompts), self._roles())
        done = self._batch.advance(new, made.work)
        return None if done is None else (done, made)

    def _steps_are_batch(self, image: torch.Tensor) -> bool:
        """Tell whether a frame's steps are to be part of a batch; the batch is there then."""
        if not self.settings.steps_as_batch or self._open is None:
            return False
        shape = self._latent_shape(image)
        decided_for = (shape, self.settings, self._edition)
        if self._decided_for != decided_for:
            self._decided_for = decided_for
            steps, self._batch, self.steps_apart = self._open.steps_of(self.settings), None, ""
            if steps > 1:
                why = self._why_no_batch(shape)
                self.steps_apart = why and f"Frames were sampled one after another: {why}."
                prompts = 1 if self.settings.cfg == 1 else 2
                self._batch = None if why else StepBatch(steps, prompts, shape, self._model.load_device)
        return self._batch is not None

    def _why_no_batch(self, shape: tuple[int, ...]) -> str:
        if self._kept is not None:
            return "pictures depend on the frames before"
        why = why_no_batch(self._model, self._conds, self.settings.sampler_name) or self.controls.why_no_batch()
        if why:
            return why
        if not self._open.ends_clean(self.settings):
            return "the schedule leaves noise in a picture, or has a step without any"
        return "" if self._open.fixes_conds(shape) else "the model sees each frame beside its prompt"

    def picture(self, image: torch.Tensor, number: int) -> Picture:
        """Return the picture of a frame (1, H, W, 3), 0 to 1; on a GPU without waiting for it.

        Only the function that was given to ``run`` may call this.

        Args:
            number: of the frame, for its seed and control images.
        """
        if self._open is None:
            seed, there = self.settings.seed_of(number), upload(image, self._model.load_device)
            self._show(number, image, None)
            latent = self._empty(image) if self.settings.from_noise else self._vae.encode(there)
            with watched_apart() as watch:
                return with_sums(Made(self._vae.decode(self._sample_alone(latent, seed))), watch)
        there, noise = self._shown(image, number)
        shape = self._latent_shape(image)
        prompts, hints = self._prompts(shape), dict(self.controls.hints)
        given = FrameInputs(there, noise, hints, self.controls.strength_tensors(), prompts.tensors)
        return self._graph.picture(given, self._fixed(shape, prompts), self._roles())

    def _prompts(self, shape: tuple[int, ...]) -> Prompts:
        """Return a frame's prompts; nothing where engines encode each prompt once for all frames."""
        return Prompts() if encodes_prompts(self._model) else self._open.prompts(shape)

    def _shown(self, image: torch.Tensor, number: int) -> tuple[torch.Tensor, Noise]:
        """Show a frame to the ControlNets; return it on the device, and its noise."""
        there, shape = upload(image, self._model.load_device), self._latent_shape(image)
        self._show(number, image, torch.empty(shape, device="meta"), there)
        return there, self._open.noise_of(self.settings.seed_of(number), shape, self.settings)

    def _show(self, number: int, image: torch.Tensor, latent: torch.Tensor | None,
              there: torch.Tensor | None = None) -> None:  # fmt: skip
        if self._kept is not None:
            self._kept.begin(self._latent_shape(image))
        made = None if self._frame_nodes is None else self._frame_nodes.images(image)
        if made:
            self._reload()  # the nodes may have loaded models of their own
        self.controls.show(number, image, latent, there, made)

    def _roles(self) -> tuple[Role, ...]:
        return (Role.BACKBONE, Role.VAE_DECODER) if self.settings.from_noise else ROLES

    def _fixed(self, shape: tuple[int, ...], prompts: Prompts) -> Hashable | None:
        """Return all settings that pictures depend on besides their inputs; None if they depend on more."""
        if not self._open.conds_are_fixed or not self.controls.hints_are_ours or not self._controls_have_engines:
            return None
        if self._has_foreign_options or self._fills_kept:
            return None
        kept = None if self._kept is None else self._kept.edition
        texts = self._edition if prompts.form is None else prompts.form
        return shape, replace(self.settings, seed=0, new_seeds=False, similar=0.0), texts, kept

    @property
    def _fills_kept(self) -> bool:
        """True while fewer frames are kept than wanted: the next frame's calls have other sizes."""
        return self._kept is not None and not self._kept.full

    @contextlib.contextmanager
    def _tokens_kept(self) -> Iterator[None]:
        """Mark the beginning of a frame's calls for the kept tokens. Calls of temporary sizes are not captured."""
        if self._kept is not None:
            self._kept.launch()
        with part_of(LargerGraph()) if self._fills_kept else contextlib.nullcontext():
            yield

    def _made(self, given: FrameInputs) -> Made:
        """Launch all the work of a frame, and return its picture."""
        return self._launched(given) if given.work is None else self._made_of(given)

    def _made_of(self, given: FrameInputs) -> Made:
        """Do the same with other tensors than the frame's own, or with tensors of several frames."""
        latent = torch.empty(given.noise.values.shape, device="meta")
        controls = self.controls.replaced_inputs(given.hints, given.strengths, latent)
        with controls, self._open.replaced_inputs(given.prompts):
            return self._launched(given)

    def _launched(self, given: FrameInputs) -> Made:
        latent = self._empty(given.image) if self.settings.from_noise else self._vae.encode(given.image)
        if given.work is None:
            with self._tokens_kept():
                sampled = self._open.sample_frame(latent, given.noise, self.settings)
            return Made(self._vae.decode(sampled))
        sampled, work = self._open.step_all(latent, given.noise, given.work, self.settings)
        return Made(self._vae.decode(sampled), sampled, work)

    def change(self, changes: Changes) -> None:
        """Change settings from the next frame on; nothing is built or loaded, except the text encoder for a prompt.

        Raises:
            ValueError: there is no text encoder for a new prompt, or it fails; the text is for the user. All else
                is changed then.
        """
        given = {name: getattr(changes, name) for name in ("seed", "steps", "denoise", "cfg")}
        given = {name: value for name, value in given.items() if value is not None}
        if "denoise" in given:
            given["denoise"] = min(1.0, max(LEAST_DENOISE, given["denoise"]))
        self.settings = replace(self.settings, **given)
        if changes.strengths is not None:
            self.controls.strengths(changes.strengths)
        texts = {"positive": changes.prompt, "negative": changes.negative}
        new, failed = {}, None
        for name, text in texts.items():
            try:
                new |= {} if text is None else {name: self._encoded(self._conds[name], text)}
            except ValueError as error:
                failed = error
        if new:
            self._conds = {**self._conds, **new}
            self._texts |= {name: texts[name] for name in new}
            self._edition += 1
            self._reload()
            if self._open:
                self._open.take(self._conds)
        if failed is not None:
            raise failed

    def now(self) -> Changes:
        """Return the settings that may be changed; an empty prompt where its text is not known."""
        own, texts = self.settings, self._texts
        strengths = tuple(control.strength for control in self.controls.controls)
        return Changes(texts["positive"], texts["negative"], strengths, own.seed, own.steps, own.denoise, own.cfg)

    def _encoded(self, conditioning: Conditioning, text: str) -> Conditioning:
        if self._clip is None:
            raise ValueError("The prompt stays as it is: connect CLIP to TRT Stream to change it while it runs.")
        try:
            tensor, options = self._encode(text)
        except model_management.InterruptProcessingException:
            raise
        except Exception as error:  # of any kind: parentheses in thousands, files of embeddings, memory
            self._reload()
            raise ValueError(f"The prompt stays as it is: the text encoder failed ({error!r:.200}).") from error
        return [[tensor, {**before, **options}] for _, before in conditioning]

    def _encode(self, text: str) -> tuple[torch.Tensor, dict[str, Any]]:
        return self._clip.encode_from_tokens_scheduled(self._clip.tokenize(text))[0]

    def _empty(self, image: torch.Tensor) -> torch.Tensor:
        """Return ComfyUI's empty latent for an image's size."""
        return torch.zeros(self._latent_shape(image))

    def _latent_shape(self, image: torch.Tensor) -> tuple[int, ...]:
        return self._vae.latent_shape(image, self._model.get_model_object("latent_format").latent_channels)

    def _sample_alone(self, latent: torch.Tensor, seed: int) -> torch.Tensor:
        """Sample as ComfyUI's KSampler node does."""
        own = self.settings
        latent = comfy.sample.fix_empty_latent_channels(self._model, latent.cpu())
        noise = comfy.sample.prepare_noise(latent, seed)
        positive, negative = self._conds["positive"], self._conds["negative"]
        with self._tokens_kept():
            return comfy.sample.sample(
                self._model, noise, own.steps, own.cfg, own.sampler_name, own.scheduler, positive, negative, latent,
                denoise=own.denoise, disable_pbar=True, seed=seed,
            )  # fmt: skip

    def _reload(self) -> None:
        """Load the models of the open sampling again if other models replaced them."""
        if self._open:
            self._open.reload()


def with_kept(model: ModelPatcher, frames: int) -> tuple[ModelPatcher, KeptTokens | None]:
    """Return a clone whose self-attention sees so many earlier frames, and their memory; None for no frames.

    Live weights may compute it too. File engines cannot.

    Raises:
        ValueError: this kind of model has no such place; the text is for the user.
    """
    if not frames:
        return model.clone(), None
    layers = model.get_model_object("diffusion_model").modules()
    if not any(isinstance(layer, BasicTransformerBlock) for layer in layers):
        raise ValueError(
            "This kind of model cannot attend to earlier frames, only UNets can, so there are no pictures. "
            "Set 'attend to earlier frames' of TRT Stream to 0."
        )
    kept, patched = KeptTokens(frames), with_tokens_kept(model.clone())
    patched.set_model_attn1_patch(kept)
    return patched, kept
