"""VAEs on engines: what they decode and encode is what ComfyUI's own VAE gives."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.model_management as comfy_management
import pytest
import torch
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
from comfy.ldm.wan.vae import WanVAE
from comfy.sd import VAE
from comfy.taesd import taesd
from comfy.taesd.taesd import TAESD
from comfy.utils import load_torch_file
from comfy_process import ComfyProcess
from compiling import COMPILES
from hybrid_trt.architectures import Role
from hybrid_trt.architectures.shapes import Picture, RequestedSizes
from hybrid_trt.architectures.shapes import outside as outside_words
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library import Library, Unavailable
from hybrid_trt.engine_library.measurements import FLOORS
from hybrid_trt.page_api.graph_pictures import asked_pictures
from hybrid_trt.page_api.workflow_graph import vae_calls
from hybrid_trt.sampling.engine_handle import EngineHandle
from hybrid_trt.sampling.vae import EngineVAEModel, native_vae, vae_with_engines
from scenarios import Prompt, Scenario, latent_of, node, prompt, relative_difference
from vaes import as_vae, engine_of

LIMIT = 1e-5
SETTINGS = {"when_missing": "build now", "min_size": 32, "opt_size": 128, "max_size": 256}
"""The last tile of a row is narrower than a picture."""
KINDS = {"kl": "tiny_kl.safetensors", "taesd": "tiny_sdxl_taesd.safetensors"}


def graph(kind: str, call: str, backend: str = "", width: int = 136, height: int = 120, batch: int = 1, **tiles: int
          ) -> Prompt:
    """A picture that a VAE encodes; to decode, what native encodes is decoded. Without a backend all is native."""
    vae = ["node", 0] if backend else ["loader", 0]
    tiled, last = ("Tiled", tiles) if tiles else ("", {})
    built = {
        "loader": node("VAELoader", vae_name=KINDS[kind]),
        "image": node("TestImage", seed=1, width=width, height=height, batch=batch, channels=3),
        "encode": node(f"VAEEncode{tiled}", pixels=["image", 0], vae=["loader", 0], **last),
        "save": node("TestSaveLatent", latent=["encode", 0], name="vae"),
    }
    built["encode"]["inputs"]["vae"] = vae if call == "encode" else ["loader", 0]
    if call == "decode":
        built["decode"] = node(f"VAEDecode{tiled}", samples=["encode", 0], vae=vae, **last)
        built["pixels"] = node("TestPixels", image=["decode", 0])
        built["save"]["inputs"]["latent"] = ["pixels", 0]
    if backend:
        built["node"] = node("TRTVAEEngine", vae=["loader", 0], backend=backend, **SETTINGS)
        built["report"] = node("TRTReport", after=[call, 0])
    return built


def compared(comfy: ComfyProcess, native: Prompt, engine: Prompt) -> dict[str, Any]:
    """Hold a prompt's picture against native's, and return the VAE's row of the report."""
    expected = latent_of(comfy.queue(native))
    history = comfy.queue(engine, timeout=300)
    assert relative_difference(latent_of(history), expected) <= LIMIT
    (row,) = history.output("report", "report")[0]["rows"]
    return row


def test_torch_compiles_a_vae_once_for_pictures_of_all_sizes(comfy: ComfyProcess) -> None:
    """The second picture has another size, and its node builds nothing."""
    for when, size in (("build now", {}), ("use native", {"width": 64, "height": 200})):
        engine = graph("taesd", "decode", "torch", **size)
        engine["node"] = node("TRTVAEEngine", vae=["loader", 0], backend="torch", **SETTINGS | {"when_missing": when})
        row = compared(comfy, graph("taesd", "decode", **size), engine)
        assert (row["engine"], row["native"]) == (1, 0), row["details"]


def sampled(backend: str = "", width: int = 224, height: int = 224, batch: int = 1, **tiles: int) -> Prompt:
    """Pictures that are sampled, then decoded by TAESD."""
    scenario = Scenario(unet="tiny_sd15_flat_unet", controls=(), width=width, height=height, batch=batch, steps=1)
    built = prompt(scenario, engines=False, name="latent") | graph("taesd", "decode", backend, **tiles)
    built["decode"]["inputs"]["samples"] = ["sampler", 0]
    return {name: one for name, one in built.items() if name not in ("image", "encode")}


def sampled_tiles(backend: str = "", tile: int = 128) -> Prompt:
    """A picture that is decoded in tiles; each pass over it has tiles of one shape alone."""
    return sampled(backend, tile_size=tile, overlap=32, temporal_size=64, temporal_overlap=8)


@pytest.mark.slow
def test_tiles_of_every_shape_are_decoded_on_the_engine(comfy: ComfyProcess) -> None:
    built = sampled_tiles("torch")
    row = compared(comfy, sampled_tiles(), built)
    assert (row["native"], row["reasons"]) == (0, {}), row["details"]
    assert row["engine"] == 4 + 6 + 6
    told = comfy.post("/hybrid_trt/nodes", {"prompt": built, "nodes": ["node"]})["nodes"]["node"]
    assert (told["state"], told["uncompiled"]) == ("ready", None)


def test_a_graph_asks_for_the_tiles_that_its_vae_is_called_with() -> None:
    def sizes(graph: Prompt, name: str = "vae") -> list[tuple[int, int]]:
        return [(picture.width, picture.height) for picture in asked_pictures(graph, "node", name)]

    built = sampled_tiles("torch")
    assert sizes(built) == [(128, 128), (64, 224), (224, 64)], "no tile is larger than the picture"
    assert sizes(sampled_tiles("torch", 64)) == [(64, 64), (32, 128), (128, 32)]
    assert sizes(sampled_tiles("torch", 1024)) == [(224, 224)], "the picture is one tile"
    assert sizes(built | {"whole": node("VAEDecode", samples=["sampler", 0], vae=["node", 0])})[0] == (224, 224)
    unknown = built | {"latent": node("LoadLatent", latent="a")}
    assert sizes(unknown) == [(128, 128), (64, 256), (256, 64)]
    linked = built | {"decode": node("VAEDecodeTiled", samples=["sampler", 0], vae=["node", 0], tile_size=["n", 0])}
    assert sizes(linked) == [(224, 224)]
    assert sizes(built, "model") == [(224, 224)], "a diffusion model never has tiles"
    encode = node("VAEEncodeTiled", pixels=["decode", 0], vae=["node", 0], tile_size=256)
    assert sizes(built | {"encode": encode}, "vae:encode") == [(224, 224), (128, 224), (224, 128)]


@pytest.mark.parametrize(("flag", "backend", "precision"), [
    pytest.param("--fp16-vae", "onnxruntime", "float16", marks=pytest.mark.slow),
    pytest.param("--bf16-vae", "torch", "bfloat16", marks=pytest.mark.slow),
])  # fmt: skip
def test_in_the_precision_of_comfyuis_flag_it_is_as_near_to_float32_as_native(
    comfy: ComfyProcess, flag: str, backend: str, precision: str
) -> None:
    """Without a flag a CPU computes in float32."""
    size = {"width": 104, "height": 136, "batch": 3}
    exact = latent_of(comfy.queue(sampled(**size)))
    with ComfyProcess(comfy.comfyui, comfy.base, arguments=[flag], log=comfy.base / "flag.log") as other:
        native = latent_of(other.queue(sampled(**size)))
        history = other.queue(sampled(backend, **size), timeout=300)
        found = latent_of(history)
        told = other.post("/hybrid_trt/nodes", {"prompt": sampled(backend, **size), "nodes": ["node"]})["nodes"]["node"]
    (row,) = history.output("report", "report")[0]["rows"]
    assert (row["engine"], row["native"]) == (3, 0), row["details"]
    assert told["engine"]["precision"] == precision
    own = relative_difference(native, exact)
    assert own > 1e-4, "the flag acts"
    assert relative_difference(found, exact) <= 1.2 * own
    assert 0 < told["engine"]["rel_err"] <= max(1.2 * told["engine"]["native_rel_err"], FLOORS[precision])


def test_the_one_node_accelerates_a_vae_beside_its_model(comfy: ComfyProcess) -> None:
    built = graph("taesd", "decode", "onnxruntime")
    built["node"] = node("TRTAccelerate", model=["unet", 0], vae=["loader", 0], backend="onnxruntime", max_images=1,
                         max_tokens=77, precision="auto", **SETTINGS | {"when_missing": "use native"})
    built["unet"] = node("UNETLoader", unet_name="tiny_sd15_unet.safetensors", weight_dtype="default")
    built["decode"]["inputs"]["vae"] = ["node", 1]
    alone = graph("taesd", "decode", "onnxruntime")
    assert comfy.queue(alone, timeout=300).ok
    assert latent_of(comfy.queue(built)).tobytes() == latent_of(comfy.queue(alone)).tobytes()
    told = comfy.post("/hybrid_trt/nodes", {"prompt": built, "nodes": ["node"]})["nodes"]["node"]
    (vae,) = told["others"]
    assert (vae["input"], vae["state"], vae["label"]) == ("vae", "ready", f"VAE decode: {KINDS['taesd']}")
    own = comfy.post("/hybrid_trt/nodes", {"prompt": alone, "nodes": ["node"]})["nodes"]["node"]
    assert own["key"] == vae["key"], "a workflow that gets the one node needs no new engine"


def test_a_graph_tells_whether_a_vae_decodes_or_encodes() -> None:
    built = graph("kl", "decode", "torch")
    assert vae_calls(built, "node") == ["vae"]
    built["again"] = node("VAEEncode", pixels=["decode", 0], vae=["node", 0])
    assert vae_calls(built, "node") == ["vae", "vae:encode"]
    assert vae_calls(graph("kl", "encode", "torch"), "node") == ["vae:encode"]
    for given in ({"start_image": ["a", 0]}, {"image2": ["a", 0]}, {"refs.ref_image_0": ["a", 0]}, {"video": ["a", 0]}):
        video = node("WanImageToVideo", vae=["node", 0], **given)
        assert vae_calls(graph("kl", "decode", "torch") | {"begin": video}, "node") == ["vae", "vae:encode"], given
    for given in ({"clip_vision_start_image": ["a", 0]}, {"start_image": "none"}, {"video_latent": ["a", 0]}):
        video = node("WanImageToVideo", vae=["node", 0], **given)
        assert vae_calls(graph("kl", "decode", "torch") | {"begin": video}, "node") == ["vae"], given
    apply = node("ControlNetApplyAdvanced", control_net=["net", 0], image=["image", 0], vae=["node", 0])
    control = {"node": built["node"], "apply": apply}
    assert vae_calls(control, "node") == ["vae"], "few ControlNets encode, and an encoder takes a while to build"
    ours = {"rows.control_net_1": ["net", 0], "rows.image_1": ["image", 0], "vae": ["node", 0]}
    assert vae_calls({"node": built["node"], "apply": node("TRTApplyControlNet", **ours)}, "node") == ["vae"]


def test_a_vae_of_no_family_runs_at_normal_speed_and_says_why() -> None:
    module = WanVAE(dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, attn_scales=[1.0], temperal_downsample=[False])
    with pytest.raises(Unavailable, match=r"video.safetensors is of a family that has no engines yet \(WanVAE\)"):
        NativeNetwork.of_vae(as_vae(module), Role.VAE_DECODER, "video.safetensors").architecture()


@pytest.fixture
def decoder(comfy: ComfyProcess, tmp_path: Path) -> tuple[VAE, VAE, EngineHandle]:
    """TAESD natively and with an engine to decode, and the engine's handle."""
    path = comfy.base / "models" / "vae" / KINDS["taesd"]
    vae = VAE(sd=load_torch_file(str(path)), device=torch.device("cpu"), dtype=torch.float32)
    handle = engine_of(vae, Role.VAE_DECODER, tmp_path)
    return vae, vae_with_engines(vae, {Role.VAE_DECODER: handle}), handle


SMALL = {"double_z": True, "z_channels": 16, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
         "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0}  # fmt: skip


def like_flux() -> AutoencodingEngine:
    """The KL autoencoder of Flux.1 and SD3: 16 channels, and no layers around the latent."""
    configs = {f"{part}_config": {"target": f"comfy.ldm.modules.diffusionmodules.model.{part.title()}",
                                  "params": SMALL} for part in ("encoder", "decoder")}  # fmt: skip
    regularizer = {"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"}
    return AutoencodingEngine(regularizer_config=regularizer, **configs)


def like_flux2() -> AutoencoderKL:
    """That of Flux.2: statistics of the latent, of which four elements are one."""
    module = AutoencoderKL(ddconfig=SMALL | {"z_channels": 8, "batch_norm_latent": True}, embed_dim=8)
    generator = torch.Generator().manual_seed(5)
    module.bn.running_mean.normal_(generator=generator)
    module.bn.running_var.uniform_(0.3, 3.0, generator=generator)
    return module


LAYOUTS = {"Flux.1 and SD3": (like_flux, 16, 8), "Flux.2": (like_flux2, 32, 16),
           "Flux.2, tiny": (lambda: TAESD(latent_channels=128), 128, 16)}  # fmt: skip
"""Module, channels of its latent, and pixels of a latent element."""


def vae_of(module: AutoencodingEngine, generator: torch.Generator) -> SimpleNamespace:
    """A VAE with random weights, as far as the pack reads it."""
    for name, weight in module.named_parameters():
        spread = weight[0].numel() ** -0.5 if weight.ndim > 1 else 0.05
        weight.data = torch.randn(weight.shape, generator=generator) * spread
        if weight.ndim == 1 and "norm" in name and name.endswith("weight"):
            weight.data += 1
    return as_vae(module.eval().requires_grad_(False))


def differs(image: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((image - wanted).norm() / wanted.norm())


def check_engine(vae: Any, role: Role, handle: EngineHandle, images: torch.Tensor, before: int = 0) -> None:
    """Compare what an engine makes of images with native's; some calls were ``before``."""
    call = "decode" if role is Role.VAE_DECODER else "encode"
    expected = getattr(vae.first_stage_model, call)(images)
    assert differs(getattr(EngineVAEModel(vae, {role: handle}), call)(images), expected) <= LIMIT
    assert (handle.stats.engine, handle.stats.native) == (before + len(images), 0), handle.stats.details


@pytest.mark.parametrize(("layout", "role"), [
    ("Flux.2", Role.VAE_DECODER), ("Flux.1 and SD3", Role.VAE_ENCODER), ("Flux.2, tiny", Role.VAE_DECODER),
    ("Flux.2, tiny", Role.VAE_ENCODER)])
def test_the_layouts_of_flux_and_sd3_are_served(layout: str, role: Role, tmp_path: Path) -> None:
    make, channels, pixels = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(4)
    vae = vae_of(module := make(), generator)
    handle = engine_of(vae, role, tmp_path)
    architecture, profile = handle.network.architecture(), handle.choice.profile
    assert architecture.words(profile) == "64 to 256 px"
    (call,) = architecture.calls(profile, Picture(96, 80, (1,)))
    assert (call["W"] * pixels, call["H"] * pixels, architecture.call_words(call)) == (96, 80, "96x80")
    wide = architecture.calls(profile, Picture(512, 64, (1,)))[0]
    why = outside_words(profile, wide, architecture.symbols)
    assert why == "width 512 px is outside the engine's 64 to 256 px"
    check_engine(vae, role, handle, torch.rand(1, 3, 80, 96, generator=generator) * 2 - 1 if role is Role.VAE_ENCODER
                 else torch.randn(2, channels, 72 // pixels, 96 // pixels, generator=generator))  # fmt: skip
    if layout == "Flux.2":
        other = copy.deepcopy(module)
        other.bn.running_mean += 0.1
        network = NativeNetwork.of_vae(as_vae(other), role, "other")
        handle = EngineHandle.look_up(network, handle.choice, Library([tmp_path]), "other statistics")
        assert handle.session is None, "an engine has the statistics that it was built with"


@COMPILES
@pytest.mark.parametrize(("layout", "role", "kinds"), [
    ("Flux.2, tiny", Role.VAE_DECODER, 1),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        ("Flux.2", Role.VAE_DECODER, 10), ("Flux.2", Role.VAE_ENCODER, 11), ("Flux.2, tiny", Role.VAE_ENCODER, 1)))
])
def test_one_build_serves_pictures_of_every_size(layout: str, role: Role, kinds: int, tmp_path: Path) -> None:
    """On a CPU torch takes other code for small pictures than for the last one, which is like the example."""
    make, channels, pixels = LAYOUTS[layout]
    vae = vae_of(make(), torch.Generator().manual_seed(4))
    handle, plain = engine_of(vae, role, tmp_path, "torch", RequestedSizes(64, 64, 64)), []
    for number, (height, width) in enumerate(((3, 5), (1, 1), (7, 2), (20, 24), (26, 31))):
        shape = ((channels, height, width) if role is Role.VAE_DECODER else (3, pixels * height, pixels * width))
        check_engine(vae, role, handle, torch.rand(1, *shape, generator=torch.Generator().manual_seed(number)) * 2 - 1,
                     number)  # fmt: skip
        blocks = handle.session.active.live.compiled
        plain.append(blocks.plain)
    assert (len(blocks.kinds), plain[-1] - plain[-2] < len(blocks.kinds)) == (kinds, True)


def test_comfyui_frees_what_a_compiled_call_needs_and_natives_estimate_elsewhere(
    decoder: tuple[VAE, VAE, EngineHandle]
) -> None:
    vae, backed, handle = decoder
    architecture = handle.network.architecture()
    inside, outside = (4, 4, 16, 16), (1, 4, 64, 64)
    own = architecture.working_memory({"B": 1, "H": 16, "W": 16}, torch.float32)
    assert backed.memory_used_decode(inside, torch.float32) == own < vae.memory_used_decode(inside, torch.float32)
    assert backed.memory_used_decode(outside, torch.float32) == vae.memory_used_decode(outside, torch.float32)
    assert backed.memory_used_encode is vae.memory_used_encode
    assert native_vae(backed).first_stage_model is vae.first_stage_model
    assert native_vae(backed).patcher.is_clone(vae.patcher)
    assert native_vae(vae) is vae
    assert handle.patcher in backed.patcher.model_patches_models(), "ComfyUI loads the engine beside the VAE"
    assert handle.patcher not in vae.patcher.model_patches_models()


def test_what_lacks_memory_as_a_whole_is_decoded_in_tiles_on_the_engine(
    decoder: tuple[VAE, VAE, EngineHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newer versions of ComfyUI ask for the memory of a tile alone, and choose tiles of videos by what is free."""
    vae, backed, handle = decoder
    latent, pictures, asked = torch.randn(1, 4, 28, 28, generator=torch.Generator().manual_seed(1)), [], []
    load = comfy_management.load_models_gpu
    monkeypatch.setattr(comfy_management, "load_models_gpu", lambda models, memory_required=0, **more: (
        asked.append(memory_required) or load(models, memory_required=memory_required, **more)))  # fmt: skip
    for one in (backed, vae):
        own, calls = one.first_stage_model.decode, []

        def short(z: torch.Tensor, own: Any = own, calls: list = calls) -> torch.Tensor:
            calls.append(z.shape)
            if len(calls) == 1:
                raise torch.OutOfMemoryError("no room for the whole picture")
            return own(z)

        with monkeypatch.context() as patch:
            patch.setattr(one.first_stage_model, "decode", short)
            pictures += [one.decode(latent), one.decode_tiled(latent, tile_x=16, tile_y=16, overlap=4)]
        assert len(calls) > 4
    assert all(ours < natives for ours, natives in zip(asked[:2], asked[2:], strict=True)), "engines need less"
    for ours, natives in zip(pictures[:2], pictures[2:], strict=True):
        assert differs(ours, natives) <= LIMIT
    assert handle.stats.engine > 4
    assert handle.stats.native == 0, handle.stats.details


@pytest.mark.fault("a VAE's engine gives values that are no numbers", see="normal speed: *engine failed*")
def test_a_decoder_that_gives_no_numbers_is_replaced_by_native(
    decoder: tuple[VAE, VAE, EngineHandle], monkeypatch: pytest.MonkeyPatch
) -> None:
    vae, backed, handle = decoder
    latent = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    expected = vae.first_stage_model.decode(latent)
    served = backed.first_stage_model.decode(latent)
    assert handle.stats.engine == 2
    assert differs(served, expected) <= LIMIT
    nothing = {"result": torch.full((1, 3, 128, 128), float("nan"))}
    monkeypatch.setattr(type(handle.session), "run", lambda *_: nothing)
    assert torch.equal(backed.first_stage_model.decode(latent), expected)
    assert handle.stats.native == 1


@pytest.mark.parametrize("place", [(TAESD, "decode"), (taesd.Clamp, "forward")])
def test_another_packs_code_in_a_vae_makes_it_run_on_native(
    decoder: tuple[VAE, VAE, EngineHandle], monkeypatch: pytest.MonkeyPatch, place: tuple[type, str]
) -> None:
    kind, method = place
    own = getattr(kind, method)
    monkeypatch.setattr(kind, method, lambda self, x: own(self, x) * 0.9)
    _, _, handle = decoder
    handle.refresh()
    assert handle.session is None
    assert f"has replaced {kind.__name__}.{method}" in handle.fallback.detail
