"""The shipped workflows of models that make videos: Wan 2.2, MiniMax H3 and LTX-2.3."""

from __future__ import annotations

from typing import Any

from workflow_families import H3_SOUND, LTX23, MINIMAX_H3, WAN_IMAGE, WAN_TEXT, Transformer
from workflow_parts import (
    CONTROLS,
    ENGINES,
    LOADER,
    MODELS,
    SAMPLE,
    Nodes,
    Recipe,
    accelerate,
    group,
    node,
    note,
    prompts,
    recipe,
    sampler,
    video,
)
from workflow_transformers import CHOOSE, VAE_TOO, conditioned, custom_sampler, loaders, lora, words
from workflow_variants import FIRST_RUN

TOLD = "*TRT Report* says how many models were accelerated, *What ran where* shows every call, and *Save Video* " \
    "keeps the video."
WHAT = "A prompt becomes a video, the same one as without this pack, only sooner."
SIZES = "Another size or **length** needs no new build on NVIDIA cards."
SIGMAS = "1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0"
"""LTX-2.3's eight steps, for which its distilled model was made."""


def wan(name: str, family: Transformer, image: bool) -> Recipe:
    """Wan 2.2: one model for the first steps, another one for the last, each on an engine of its own."""
    steps = ["**1 Models**: choose your two models, their LoRAs, the text encoder and the VAE."]
    if image:
        steps.append("**3 Picture and prompt**: put in *Picture to begin with*.")
    text = words(
        f"Wan 2.2, {'image' if image else 'text'} to video",
        "A picture becomes a video as the prompt says, the same one as without this pack, only sooner." if image
        else WHAT, *steps, FIRST_RUN,
        more="Wan 2.2 is two models: *First steps* runs the one for high noise, *Last steps* the other. Both are "
        "accelerated, each by its own *TRT Accelerate*. The LoRAs make four steps enough. Without them bypass both, "
        f"take 20 **steps**, **cfg** 3.5, and change models at step 10. {SIZES} {TOLD}")
    nodes = {"note": note(text, 480)} | loaders(family)
    nodes["model"]["title"], nodes["lora"]["title"] = "Model for high noise", "LoRA for high noise"
    nodes["model_low"] = node("UNETLoader", "Model for low noise", {"unet_name": family.second[0]}, size=LOADER)
    nodes["lora_low"] = lora("LoRA for low noise", (family.second[1], 1.0), "model_low.MODEL")
    for key, title, model, vae in (("high", "TRT Accelerate (high noise)", "lora.MODEL", None),
                                   ("low", "TRT Accelerate (low noise)", "lora_low.MODEL", "vae.VAE")):
        made = accelerate(model=model, vae=vae)["accelerate"]
        lines = {"size": (made["size"][0], 400)} if vae and image else {}  # the VAE encodes too: a line more
        nodes[f"accelerate_{key}"] = made | {"title": title} | lines
    for key in ("high", "low"):
        nodes[f"shift_{key}"] = node("ModelSamplingSD3", f"Shift for {key} noise", {"shift": family.shift},
                                     {"model": f"accelerate_{key}.model"}, (300, 0))
    nodes |= prompts("encoders.CLIP")
    size = {"width": family.size, "height": family.size, "length": 81, "batch_size": 1}
    given = {"positive": "positive.CONDITIONING", "negative": "negative.CONDITIONING"}
    if image:
        nodes["image"] = node("LoadImage", "Picture to begin with", {"image": "example.png"}, size=(280, 330))
        nodes["latent"] = node("WanImageToVideo", None, size, given | {
            "vae": "accelerate_low.vae", "start_image": "image.IMAGE"}, (300, 0))
        given = {"positive": "latent.positive", "negative": "latent.negative"}
    else:
        nodes["latent"] = node("EmptyHunyuanLatentVideo", "Size of the video", size, {}, (300, 0))
    empty, half = "latent.latent" if image else "latent.LATENT", family.sampling["steps"] // 2
    for key, title, model, latent, steps_of in (
        ("first", "First steps", "shift_high.MODEL", empty, {
            "add_noise": "enable", "noise_seed": 20, "start_at_step": 0, "end_at_step": half,
            "return_with_leftover_noise": "enable"}),
        ("sampler", "Last steps", "shift_low.MODEL", "first.LATENT", {
            "add_noise": "disable", "noise_seed": 0, "start_at_step": half, "end_at_step": 10000,
            "return_with_leftover_noise": "disable"}),
    ):  # fmt: skip
        nodes[key] = node("KSamplerAdvanced", title, family.sampling | steps_of | {"control_after_generate": "fixed"},
                          given | {"model": model, "latent_image": latent}, (300, 0))
    nodes |= video(16.0, "sampler.LATENT", "accelerate_low.vae")
    title = "3 Picture and prompt" if image else "3 Prompt"
    return recipe(name, family, f"{'image' if image else 'text'} to video", nodes, [
        group("1 Models", MODELS, ["note"], ["model", "lora", "model_low", "lora_low", "encoders", "vae"]),
        group("2 Accelerate", ENGINES, ["accelerate_high", "accelerate_low", "shift_high", "shift_low"]),
        group(title, CONTROLS, *([["image"]] if image else []), ["positive", "negative", "latent"]),
        group("4 Sample", SAMPLE, ["first", "sampler"], ["decode", "report", "ran"], ["joined", "save"]),
    ])


def minimax_h3() -> Recipe:
    """MiniMax H3 makes a video with its sound of a prompt."""
    text = words(
        "MiniMax H3, text to video", "A prompt becomes a video with its sound, the same one as without this pack, "
        "only sooner.", f"**1 Models**: {CHOOSE}", "**3 Prompt**: say what is seen and heard.", FIRST_RUN,
        more="Connect a picture to **first_frame** or **last_frame** of *Prompt and size*, and the video begins or "
        f"ends with it. {VAE_TOO} The sound's VAE runs at normal speed. {SIZES} {TOLD}")
    nodes = {"note": note(text, 400)} | loaders(MINIMAX_H3)
    nodes["sound_vae"] = node("VAELoader", "Load the sound's VAE", {"vae_name": H3_SOUND}, size=LOADER)
    nodes |= accelerate(model="model.MODEL", vae="vae.VAE")
    size = {"width": MINIMAX_H3.size, "height": 480, "length": 124}
    nodes["positive"] = node("MiniMaxH3ImageToVideo", "Prompt and size", {
        "prompt": "a house by a lake in the morning, birds sing, slow pan to the left"} | size,
        {"clip": "encoders.CLIP", "vae": "accelerate.vae"}, (360, 330))
    nodes["negative"] = node("ConditioningZeroOut", "No negative prompt", {}, {"conditioning": "positive.positive"},
                             (300, 0))
    nodes["sampler"] = sampler("positive.LATENT", settings=MINIMAX_H3.sampling)
    nodes["sampler"]["inputs"]["positive"] = "positive.positive"
    nodes["sound"] = node("VAEDecodeAudio", None, {}, {"samples": "sampler.LATENT", "vae": "sound_vae.VAE"}, (300, 0))
    nodes |= video(24.0, "sampler.LATENT", audio="sound.AUDIO")
    return recipe("minimax_h3_text_to_video", MINIMAX_H3, "text to video", nodes, [
        group("1 Models", MODELS, ["note"], ["model", "encoders", "vae", "sound_vae"]),
        group("2 Accelerate", ENGINES, ["accelerate"]),
        group("3 Prompt", CONTROLS, ["positive", "negative"]), _sampled("sampler", "sound"),
    ])


def ltx23() -> Recipe:
    """LTX-2.3 makes a video with its sound of a prompt, in eight steps."""
    text = words(
        "LTX-2.3, text to video", "A prompt becomes a video with its sound, the same one as without this pack, only "
        "sooner.", "**1 Models**: choose your checkpoint in all three loaders, and the text encoder.",
        "**3 Prompt**: say what is seen and heard.", FIRST_RUN,
        more="For another length change **length** on *Size of the video* and **frames_number** on *Length of the "
        f"sound* alike. {VAE_TOO} The sound's VAE runs at normal speed. {SIZES} {TOLD}")
    (encoder,) = LTX23.encoders
    nodes: Nodes = {
        "note": note(text, 440),
        "model": node("CheckpointLoaderSimple", None, {"ckpt_name": LTX23.model}, size=LOADER),
        "encoders": node("LTXAVTextEncoderLoader", None, {"text_encoder": encoder, "ckpt_name": LTX23.model},
                         size=LOADER),
        "sound_vae": node("LTXVAudioVAELoader", "Load the sound's VAE", {"ckpt_name": LTX23.model}, size=LOADER),
    }
    nodes |= accelerate(model="model.MODEL", vae="model.VAE") | conditioned(LTX23) | {
        "rate": node("LTXVConditioning", "Frames per second", {"frame_rate": 25.0}, {
            "positive": "positive.CONDITIONING", "negative": "negative.CONDITIONING"}, (300, 0)),
        "latent": node("EmptyLTXVLatentVideo", "Size of the video", {
            "width": LTX23.size, "height": 544, "length": 121, "batch_size": 1}, {}, (300, 0)),
        "silence": node("LTXVEmptyLatentAudio", "Length of the sound", {
            "frames_number": 121, "frame_rate": 25.0, "batch_size": 1}, {"audio_vae": "sound_vae.Audio VAE"}, (300, 0)),
        "both": node("LTXVConcatAVLatent", None, {}, {
            "video_latent": "latent.LATENT", "audio_latent": "silence.Latent"}, (300, 0)),
        "kind": node("KSamplerSelect", None, {"sampler_name": "euler"}, {}, (300, 0)),
        "sigmas": node("ManualSigmas", None, {"sigmas": SIGMAS}, {}, (300, 0)),
        "sampler": custom_sampler("accelerate.model", "rate.positive", "both.latent", LTX23.sampling),
        "parts": node("LTXVSeparateAVLatent", None, {}, {"av_latent": "sampler.output"}, (300, 0)),
        "sound": node("LTXVAudioVAEDecode", None, {}, {
            "samples": "parts.audio_latent", "audio_vae": "sound_vae.Audio VAE"}, (300, 0)),
    }  # fmt: skip
    nodes["sampler"]["inputs"]["negative"] = "rate.negative"
    nodes |= video(25.0, "parts.video_latent", audio="sound.Audio")
    return recipe("ltx23_text_to_video", LTX23, "text to video", nodes, [
        group("1 Models", MODELS, ["note"], ["model", "encoders", "sound_vae"]),
        group("2 Accelerate", ENGINES, ["accelerate"]),
        group("3 Prompt", CONTROLS, ["positive", "negative", "rate"], ["latent", "silence", "both"]),
        _sampled("kind", "sigmas", "sampler", "parts", "sound"),
    ])


def _sampled(*first: str) -> dict[str, Any]:
    return group("4 Sample", SAMPLE, [*first], ["decode", "report", "ran"], ["joined", "save"])


VIDEOS = (wan("wan22_text_to_video", WAN_TEXT, False), wan("wan22_image_to_video", WAN_IMAGE, True), minimax_h3(),
          ltx23())
