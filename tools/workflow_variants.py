"""More shipped workflows for SD 1.5: from an image, many ControlNets with ranges, building, native beside engines."""

from __future__ import annotations

from typing import Any

from workflow_parts import ENGINE, LOADER, SD15, Recipe, group, node, with_downloads

Nodes = dict[str, dict[str, Any]]

SETTINGS = {"when_missing": "build now"}  # the numbers stay 0: what fits the model
MODELS, ENGINES, CONTROLS, SAMPLE = "#3f789e", "#8A8", "#b58b2a", "#a1309b"
NETS = (
    *SD15.nets,
    ("pose", "control_v11p_sd15_openpose_fp16.safetensors"),
    ("lines", "control_v11p_sd15_lineart_fp16.safetensors"),
)
#: Strength, start and end of each row of the stack.
RANGES = ((0.8, 0.0, 1.0), (0.6, 0.0, 0.7), (0.7, 0.1, 0.9), (0.4, 0.3, 1.0))
DOWNLOADS = SD15.downloads | {file: "comfyanonymous/ControlNet-v1-1_fp16_safetensors" for _, file in NETS}


def text_to_image() -> Recipe:
    """A prompt becomes a picture, by one node more than without engines."""
    note = """# Text to image, accelerated

1. **1 Model**: choose your checkpoint.
2. Press **Run**. The first run builds the engine, which takes minutes. Later runs find it.

*TRT Accelerate* is the only node that you need besides those that you know: the model goes through it on its way to \
*KSampler*. ControlNets may go through it too. *TRT Report* says what ran, *What ran where* shows every call, and \
*Save Image* keeps the picture.
"""
    accelerate = node("TRTAccelerate", None, SETTINGS, {"model": "checkpoint.MODEL", "vae": "checkpoint.VAE"}, ENGINE)
    nodes = {
        "note": node("MarkdownNote", "How to use this workflow", {"text": note}, size=(330, 260)),
        "checkpoint": node("CheckpointLoaderSimple", widgets={"ckpt_name": SD15.checkpoint}, size=LOADER),
        "accelerate": accelerate, "latent": _latent(),
    } | _prompts() | _sampling("latent.LATENT")
    del nodes["patch"]
    nodes["sampler"]["inputs"] |= {
        "model": "accelerate.model", "positive": "positive.CONDITIONING", "negative": "negative.CONDITIONING"}
    nodes["decode"]["inputs"] |= {"vae": "accelerate.vae"}
    return _recipe("sd15_text_to_image", "text to image", nodes, [
        group("1 Model", MODELS, ["note", "checkpoint"]),
        group("2 Accelerate", ENGINES, ["accelerate"]),
        group("3 Prompt", CONTROLS, ["positive", "negative", "latent"]),
        group("4 Sample", SAMPLE, ["sampler", "report", "decode"], ["ran", "save"]),
    ])


def img2img() -> Recipe:
    """A picture is repainted, held by one ControlNet."""
    note = """# SD 1.5, image to image with a ControlNet on engines

1. **1 Models**: choose your checkpoint and your ControlNet.
2. **3 Images and ControlNet**: put in *Picture to repaint* and *Control image 1 (edges)*, for example its edges.
3. Press **Run**. **denoise** on *KSampler* says how much may change. *Save Image* keeps the picture, *What ran where* \
shows every call.

Pictures of 256 to 1024 pixels fit the engines, larger ones run native; for others choose **sizes** on the engine nodes.
"""
    nodes = _models(note, NETS[:1]) | {
        "image": node("LoadImage", "Picture to repaint", {"image": "example.png"}, size=(280, 330)),
        "encode": node("VAEEncode", None, {}, {"pixels": "image.IMAGE", "vae": "checkpoint.VAE"}, (300, 0)),
    }
    nodes |= _images(NETS[:1]) | _prompts() | {"apply": _apply(NETS[:1], ((0.8, 0.0, 1.0),))}
    nodes |= _sampling("encode.LATENT", denoise=0.65)
    return _recipe("sd15_img2img_controlnet", "repaint a picture", nodes, [
        group("1 Models", MODELS, ["note", "checkpoint", "net_1"]),
        group("2 Engines", ENGINES, ["unet_engine", "engine_1"]),
        group("3 Images and ControlNet", CONTROLS, ["image", "image_1"], ["positive", "negative", "apply", "encode"]),
        group("4 Sample", SAMPLE, ["patch", "sampler", "report"], ["decode", "ran", "save"]),
    ])


def stack() -> Recipe:
    """Four ControlNets, each with a strength and a range of its own."""
    note = """# SD 1.5 with a stack of four ControlNets on engines

Each row of *TRT Apply ControlNet* has its own image, **strength**, **start** and **end**: here the depth lets go at \
70 % of the steps and the lines come in at 30 %. Strength 0 switches a row off. **rows** goes up to 16.

Put in *Control image 1* to *4* and press **Run**. Engines run only in their range: *What ran where* shows how many \
calls each of them had.
"""
    nodes = _models(note, NETS) | _images(NETS) | _prompts()
    nodes |= {"apply": _apply(NETS, RANGES), "latent": _latent()} | _sampling("latent.LATENT")
    return _recipe("sd15_controlnet_stack", "four ControlNets", nodes, [
        group("1 Models", MODELS, ["note", "checkpoint", "net_1", "net_2", "net_3", "net_4"]),
        group("2 Engines", ENGINES, ["unet_engine", "engine_1", "engine_2"], ["engine_3", "engine_4"]),
        group("3 ControlNets", CONTROLS, ["image_1", "image_2"], ["image_3", "image_4"],
              ["positive", "negative", "apply"]),
        group("4 Sample", SAMPLE, ["patch", "latent", "sampler", "decode"], ["report", "ran", "save"]),
    ])


def build_only() -> Recipe:
    """Builds engines and samples nothing."""
    note = """# Build engines, and nothing else

1. Choose your checkpoint and your ControlNets, and the sizes on the engine nodes.
2. Press **Build engine** on a node of **2 Engines** to build that one, or **Run** to build all that are missing, one \
after the other. *Engine 1* to *3* on the right then say what there is.

The engines are kept in *models/trt_engines*. Every workflow with the same model and sizes finds them there; the \
panel *TRT engines* on the left lists, checks and deletes them.
"""
    nodes = _models(note, NETS[:2])
    for i, engine in enumerate(("unet_engine.engine", "engine_1.control_net", "engine_2.control_net"), start=1):
        nodes[f"report_{i}"] = node("TRTReport", f"Engine {i}", {}, {"after": engine}, (330, 220))
    return _recipe("sd15_build_engines", "build engines only", nodes, [
        group("1 Models", MODELS, ["note", "checkpoint", "net_1", "net_2"]),
        group("2 Engines", ENGINES, ["unet_engine", "engine_1", "engine_2"]),
        group("3 What there is", SAMPLE, ["report_1", "report_2", "report_3"]),
    ])


def compare() -> Recipe:
    """The same seed twice: by ComfyUI alone and on engines."""
    note = """# Native beside engines

The same seed is sampled twice: in **4 Native** without any of this pack's nodes, and in **5 On engines**. *Save \
Image* gets both side by side (left native), *Difference* what differs (black: nothing), *What ran where* every call.

Half precision rounds differently in an engine, so a faint difference is normal. Run it twice to compare the times \
that ComfyUI shows on the two samplers, since the first run also builds.
"""
    nodes = _models(note, NETS[:2]) | _images(NETS[:2]) | _prompts()
    nodes |= {"apply": _apply(NETS[:2], RANGES[:2]), "latent": _latent()} | _sampling("latent.LATENT")
    positive, negative = "positive.CONDITIONING", "negative.CONDITIONING"
    for i, (shows, _) in enumerate(NETS[:2], start=1):
        strength, start, end = RANGES[i - 1]
        nodes[f"native_{i}"] = node(
            "ControlNetApplyAdvanced", f"Native ControlNet {i} ({shows})",
            {"strength": strength, "start_percent": start, "end_percent": end},
            {"positive": positive, "negative": negative, "control_net": f"net_{i}.CONTROL_NET",
             "image": f"image_{i}.IMAGE"}, (300, 0))
        positive, negative = f"native_{i}.positive", f"native_{i}.negative"
    nodes["native_sampler"] = nodes["sampler"] | {"title": "KSampler (native)", "inputs": {
        "model": "checkpoint.MODEL", "positive": positive, "negative": negative, "latent_image": "latent.LATENT"}}
    nodes["sampler"] |= {"title": "KSampler (engines)"}
    nodes["native_decode"] = node("VAEDecode", "VAE Decode (native)", {},
                                  {"samples": "native_sampler.LATENT", "vae": "checkpoint.VAE"}, (360, 0))
    nodes["both"] = node("ImageStitch", None, {"direction": "right"},
                         {"image1": "native_decode.IMAGE", "image2": "decode.IMAGE"}, (360, 0))
    nodes["blend"] = node("ImageBlend", None, {"blend_factor": 1.0, "blend_mode": "difference"},
                          {"image1": "native_decode.IMAGE", "image2": "decode.IMAGE"}, (360, 0))
    nodes["difference"] = node("PreviewImage", "Difference", {}, {"images": "blend.IMAGE"}, (360, 300))
    nodes["save"] |= {"inputs": {"images": "both.IMAGE"}}
    return _recipe("sd15_compare_native_and_engines", "native beside engines", nodes, [
        group("1 Models", MODELS, ["note", "checkpoint", "net_1", "net_2"]),
        group("2 Engines", ENGINES, ["unet_engine", "engine_1", "engine_2"]),
        group("3 Images and prompts", CONTROLS, ["image_1", "image_2"], ["positive", "negative", "latent"]),
        group("4 Native", MODELS, ["native_1", "native_2", "native_sampler", "native_decode"]),
        group("5 On engines", SAMPLE, ["apply", "patch", "sampler"], ["report", "decode", "ran"]),
        group("6 Compare", ENGINES, ["both", "blend", "difference", "save"]),
    ])


def _models(note: str, nets: tuple[tuple[str, str], ...]) -> Nodes:
    nodes = {
        "note": node("MarkdownNote", "How to use this workflow", {"text": note}, size=(330, 320)),
        "checkpoint": node("CheckpointLoaderSimple", widgets={"ckpt_name": SD15.checkpoint}, size=LOADER),
        "unet_engine": node("TRTUNetEngine", None, SETTINGS, {"model": "checkpoint.MODEL"}, ENGINE),
    }
    for i, (shows, file) in enumerate(nets, start=1):
        nodes[f"net_{i}"] = node("ControlNetLoader", f"Load ControlNet {i} ({shows})", {"control_net_name": file},
                                 size=LOADER)
        nodes[f"engine_{i}"] = node("TRTControlNetEngine", f"TRT ControlNet Engine {i}", SETTINGS,
                                    {"control_net": f"net_{i}.CONTROL_NET"}, ENGINE)
    return nodes


def _images(nets: tuple[tuple[str, str], ...]) -> Nodes:
    return {
        f"image_{i}": node("LoadImage", f"Control image {i} ({shows})", {"image": "example.png"}, size=(280, 330))
        for i, (shows, _) in enumerate(nets, start=1)
    }


def _prompts() -> Nodes:
    return {
        "positive": node("CLIPTextEncode", "Prompt", {"text": "a house by a lake, morning light, photograph"},
                         {"clip": "checkpoint.CLIP"}, (300, 130)),
        "negative": node("CLIPTextEncode", "Negative prompt", {"text": "blurry, low quality, text, watermark"},
                         {"clip": "checkpoint.CLIP"}, (300, 130)),
    }


def _latent() -> dict[str, Any]:
    return node("EmptyLatentImage", None, {"width": SD15.size, "height": SD15.size, "batch_size": 1}, size=(300, 0))


def _apply(nets: tuple[tuple[str, str], ...], ranges: tuple[tuple[float, float, float], ...]) -> dict[str, Any]:
    widgets: dict[str, Any] = {"rows": str(len(nets))}
    inputs = {"positive": "positive.CONDITIONING", "negative": "negative.CONDITIONING"}
    for i, (strength, start, end) in enumerate(ranges, start=1):
        widgets |= {f"rows.strength_{i}": strength, f"rows.start_{i}": start, f"rows.end_{i}": end}
        inputs |= {f"rows.control_net_{i}": f"engine_{i}.control_net", f"rows.image_{i}": f"image_{i}.IMAGE"}
    return node("TRTApplyControlNet", None, widgets, inputs, (300, 210 + 80 * len(nets)))  # Vue nodes are taller


def _sampling(latent: str, denoise: float = 1.0) -> Nodes:
    return {
        "patch": node("TRTSamplerPatch", None, {}, {"model": "checkpoint.MODEL", "engine": "unet_engine.engine"},
                      (300, 140)),
        "sampler": node(
            "KSampler", None,
            {"seed": 20, "control_after_generate": "fixed", "steps": 20, "cfg": 7.0, "sampler_name": "euler",
             "scheduler": "normal", "denoise": denoise},
            {"model": "patch.model", "positive": "apply.positive", "negative": "apply.negative",
             "latent_image": latent}, (300, 0)),
        "report": node("TRTReport", None, {}, {"after": "sampler.LATENT"}, (360, 230)),
        "decode": node("VAEDecode", None, {}, {"samples": "report.after", "vae": "checkpoint.VAE"}, (360, 0)),
        "ran": node("PreviewImage", "What ran where", {}, {"images": "report.plot"}, (360, 390)),
        "save": node("SaveImage", None, {"filename_prefix": "hybrid-trt"}, {"images": "decode.IMAGE"}, (360, 340)),
    }


def _recipe(name: str, title: str, nodes: Nodes, groups: list[dict[str, Any]]) -> Recipe:
    return Recipe(name, f"SD 1.5 - {title}", with_downloads(nodes, DOWNLOADS), groups)
