"""Shipped workflows with TRT Stream: a webcam's frames, and those of a video."""

from __future__ import annotations

from dataclasses import replace

from workflow_parts import (
    CONTROLS,
    ENGINES,
    MODELS,
    SAMPLE,
    SD15,
    Family,
    Nodes,
    Recipe,
    accelerate,
    apply,
    group,
    loaders,
    node,
    note,
    prompts,
    recipe,
)

LCM = "lcm-lora-sdv1-5.safetensors"
LORA_HINT = "The LoRA is *pytorch_lora_weights.safetensors* of *latent-consistency/lcm-lora-sdv1-5*, saved under the " \
    "name shown: it makes four steps enough."
FINDERS = {"depth_anything_3_small.safetensors": "Comfy-Org/Depth-Anything-3/geometry_estimation",
           "sdpose_wholebody_fp16.safetensors": "Comfy-Org/SDPose/checkpoints"}
PICTURES = "report.latent or any"


def webcam() -> Recipe:
    """A webcam's frames become pictures while it runs."""
    text = f"""# Webcam to picture, accelerated

What a webcam sees becomes a picture, many times a second, and a ControlNet holds its edges.

1. **1 Models**: choose your checkpoint, an LCM LoRA and your ControlNet for edges.
2. Open the panel *TRT live* in the sidebar and press *Start with webcam*. The first run builds what is missing, which \
takes minutes.
3. Change **strength**, **denoise**, **seed** and the prompt there while it runs. *Stop* keeps the last picture in \
*Save Image*.

*TRT Stream* takes live frames because nothing is connected to **frames**. The ControlNet's picture is made of each \
frame, so *No picture yet* is never seen. For more speed use 1 to 2 **steps**, or load the VAE taesd.

{LORA_HINT}
"""
    nodes = _before(text) | {
        "image_1": node("EmptyImage", "No picture yet", {"width": 512, "height": 512}, size=(300, 0))}
    nodes |= apply(((0.7, 0.0, 1.0),)) | _stream(0.6) | {
        "save": node("SaveImage", None, {"filename_prefix": "hybrid-trt"}, {"images": PICTURES}, (360, 340))}
    return recipe("sd15_webcam", SD15, "webcam to picture", nodes, [
        group("1 Models", MODELS, ["note"], ["checkpoint", "lora", "net_1"]),
        group("2 Accelerate", ENGINES, ["accelerate"]),
        group("3 Prompt", CONTROLS, ["positive", "negative"], ["image_1", "apply"]),
        group("4 Stream", SAMPLE, ["stream"], ["report", "save"]),
    ])


def depth_and_pose() -> Recipe:
    """A webcam's frames become pictures that have their depth and pose."""
    text = f"""# Webcam with depth and pose, accelerated

What a webcam sees becomes a picture. One ControlNet holds its depth, another one the pose of a person.

1. **1 Models**: choose your checkpoint, an LCM LoRA, and your ControlNets for depth and pose. *Load Depth Anything 3* \
and *Load SDPose* take the models that find depth and pose.
2. Open the panel *TRT live* in the sidebar and press *Start with webcam*. The first run builds what is missing, which \
takes minutes.
3. Change each **strength**, **denoise**, **seed** and the prompt there while it runs.

*TRT Frame* stands for the frame: all nodes between it and *TRT Apply ControlNet* run again for each frame. Put any \
others there, for example those of your own packs. *Depth* and *Pose* are optional: bypass what you do not need.

Each frame waits for these models; *TRT Report* shows the times. SDPose is a large model.

{LORA_HINT}
"""
    family = replace(SD15, nets=SD15.nets[1:3], downloads=SD15.downloads | FINDERS)
    file = {"ckpt_name": "sdpose_wholebody_fp16.safetensors"}
    nodes = _before(text, family) | {
        "depth_model": node("LoadDA3Model", "Load Depth Anything 3",
                            {"model_name": "depth_anything_3_small.safetensors"}, size=(330, 0)),
        "pose_model": node("CheckpointLoaderSimple", "Load SDPose", file, size=(330, 0)),
        "frame": node("TRTFrame", None, {}, {}, (330, 0)),
        "depth": node("DA3Inference", "Depth", {"resolution": 252},
                      {"da3_model": "depth_model.DA3_MODEL", "image": "frame.frame"}, (330, 0)),
        "image_1": node("DA3Render", "Depth as an image", {}, {"da3_geometry": "depth.da3_geometry"}, (330, 0)),
        "pose": node("SDPoseKeypointExtractor", "Pose", {"batch_size": 1},
                     {"model": "pose_model.MODEL", "vae": "pose_model.VAE", "image": "frame.frame"}, (330, 0)),
        "image_2": node("SDPoseDrawKeypoints", "Pose as an image", {}, {"keypoints": "pose.keypoints"}, (330, 0)),
    }
    nodes |= apply(((0.6, 0.0, 1.0), (0.8, 0.0, 1.0))) | _stream(0.7, control_images="as connected") | {
        "save": node("SaveImage", None, {"filename_prefix": "hybrid-trt"}, {"images": PICTURES}, (360, 340))}
    return recipe("sd15_depth_and_pose", family, "webcam with depth and pose", nodes, [
        group("1 Models", MODELS, ["note"], ["checkpoint", "lora", "net_1", "net_2"], ["depth_model", "pose_model"]),
        group("2 Accelerate", ENGINES, ["accelerate"]),
        group("3 Depth and pose", CONTROLS, ["frame", "depth", "image_1"], ["pose", "image_2"]),
        group("4 Prompt", CONTROLS, ["positive", "negative"], ["apply"]),
        group("5 Stream", SAMPLE, ["stream"], ["report", "save"]),
    ])


def video() -> Recipe:
    """A video is painted anew, frame by frame."""
    text = f"""# Video to video, accelerated

Each frame of a video is painted anew after a prompt; a ControlNet holds its edges.

1. **1 Models**: choose your checkpoint, an LCM LoRA and your ControlNet for edges.
2. **3 Video and prompt**: put in *Video*, and say what it shall become.
3. Press **Run**. The first run builds what is missing, which takes minutes; later runs find it.

*TRT Stream* samples all frames in one go. **denoise** says how much may change, and the same seed for each frame \
keeps the pictures steady. *Save Video* keeps the result with its sound.

{LORA_HINT}
"""
    nodes = _before(text) | {
        "video": node("LoadVideo", "Video", {"file": "video.mp4"}, size=(300, 300)),
        "frames": node("GetVideoComponents", None, {}, {"video": "video.VIDEO"}, (300, 0)),
        "image_1": node("EmptyImage", "No picture yet", {"width": 512, "height": 512}, size=(300, 0)),
    }
    parts = {"images": PICTURES, "fps": "frames.fps", "audio": "frames.audio"}
    nodes |= apply(((0.7, 0.0, 1.0),)) | _stream(0.5, frames="frames.images") | {
        "joined": node("CreateVideo", None, {}, parts, (360, 0)),
        "save": node("SaveVideo", None, {"filename_prefix": "video/hybrid-trt"}, {"video": "joined.VIDEO"}, (360, 340)),
    }
    return recipe("sd15_video", SD15, "video to video", nodes, [
        group("1 Models", MODELS, ["note"], ["checkpoint", "lora", "net_1"]),
        group("2 Accelerate", ENGINES, ["accelerate"]),
        group("3 Video and prompt", CONTROLS, ["video", "frames"], ["positive", "negative"], ["image_1", "apply"]),
        group("4 Stream", SAMPLE, ["stream"], ["report", "joined", "save"]),
    ])


def _before(text: str, family: Family | None = None) -> Nodes:
    """Models, the one node that accelerates them, and prompts; with all ControlNets of a family, else with one."""
    nets = 1 if family is None else len(family.nets)
    file = {"lora_name": LCM, "strength_model": 1.0, "strength_clip": 1.0}
    lora = node("LoraLoader", "Load LoRA", file, {"model": "checkpoint.MODEL", "clip": "checkpoint.CLIP"}, (330, 0))
    return ({"note": note(text, 480)} | loaders(family or SD15, nets) | {"lora": lora}
            | accelerate(nets, "lora.MODEL") | prompts("lora.CLIP"))


def _stream(denoise: float, control_images: str = "edges of the frame", **frames: str) -> Nodes:
    """The stream and its report."""
    widgets = {"control_images": control_images, "steps": 4, "cfg": 1.0, "sampler_name": "lcm",
               "scheduler": "sgm_uniform", "denoise": denoise, "seed": 20, "control_after_generate": "fixed"}
    inputs = {"model": "accelerate.model", "vae": "accelerate.vae", "clip": "lora.CLIP", "positive": "apply.positive",
              "negative": "apply.negative", **frames}
    return {"stream": node("TRTStream", None, widgets, inputs, (330, 0)),
            "report": node("TRTReport", None, {}, {"after": "stream.pictures"}, (360, 230))}
