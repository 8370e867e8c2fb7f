"""VAEs of Wan on engines: one build decodes, or encodes, every number of frames at every size as native does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from comfy.ldm.wan import vae as wan21
from comfy.ldm.wan import vae2_2 as wan22
from comfy.sd import VAE
from comfy_process import ComfyProcess
from compiling import COMPILES, compiled
from hybrid_trt.architectures import Role, architectures
from hybrid_trt.architectures.blocks import in_blocks
from hybrid_trt.architectures.families.wan_vae import KEPT, _convolved
from hybrid_trt.architectures.shapes import Dim, Picture, RequestedSizes
from hybrid_trt.backends.torch_inductor.compiled import lifted
from hybrid_trt.backends.torch_inductor.opened_files import open_one
from hybrid_trt.comfy_model.network import NativeNetwork
from hybrid_trt.engine_library.engine import relative_error
from hybrid_trt.sampling.engine_handle import EngineHandle
from hybrid_trt.sampling.vae import EngineVAEModel, vae_with_engines
from safetensors.torch import save_file
from scenarios import Prompt, latent_of, node, relative_difference
from vaes import as_vae, engine_of, interrupt

LIMIT = 1e-5
SHAPE = {"dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]}
NETWORKS = {"wan21": (wan21.WanVAE, {**SHAPE, "z_dim": 16}),
            "wan22": (wan22.WanVAE, {**SHAPE, "dec_dim": 16, "z_dim": 48})}  # fmt: skip
KINDS = {("wan21", Role.VAE_DECODER): 19, ("wan21", Role.VAE_ENCODER): 22, ("wan22", Role.VAE_DECODER): 26,
         ("wan22", Role.VAE_ENCODER): 30}  # fmt: skip
"""Kinds of blocks: for a first chunk, and for each number of frames behind it."""
CALLS = ((1, 4, 6), (2, 3, 5), (3, 4, 4), (1, 1, 1), (6, 2, 7), (1, 7, 3), (11, 1, 2), (1, 20, 24), (3, 26, 18),
         (2, 22, 33))  # fmt: skip
"""Latent frames, height and width."""
COMPILED = 3
"""The last of these, of sizes for which torch takes the same code for a single image on a CPU as for the example."""


def module_of(kind: str) -> torch.nn.Module:
    """A tiny VAE with random weights."""
    make, settings = NETWORKS[kind]
    module, generator = make(**settings), torch.Generator().manual_seed(3)
    for name, weight in module.named_parameters():
        draw = torch.randn(weight.shape, generator=generator)
        kernel = weight.ndim > 1 and "gamma" not in name
        weight.data = draw * weight[0].numel() ** -0.5 if kernel else 0.1 * draw + (0.0 if "bias" in name else 1.0)
    return module.eval().requires_grad_(False)


def call_of(role: Role, architecture: Any, module: torch.nn.Module, frames: int, height: int, width: int, seed: int = 1
            ) -> tuple[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if role is Role.VAE_DECODER:
        return "decode", torch.randn(1, module.z_dim, frames, height, width, generator=generator)
    sides = (architecture.pixels * height, architecture.pixels * width)
    return "encode", torch.rand(1, 3, 4 * frames - 3, *sides, generator=generator) * 2 - 1


@COMPILES
@pytest.mark.parametrize(("kind", "role"), [
    pytest.param(*one, marks=[] if one == ("wan21", Role.VAE_DECODER) else [pytest.mark.slow]) for one in KINDS])
def test_one_build_serves_every_number_of_frames_and_every_size(
    kind: str, role: Role, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    vae = as_vae(module_of(kind))
    if kind == "wan21":  # ComfyUI loads no smaller one of Wan 2.2
        vae = VAE(sd=vae.first_stage_model.state_dict(), device=torch.device("cpu"), dtype=torch.float32)
    module = vae.first_stage_model.requires_grad_(False)
    comfy = request.getfixturevalue("comfy") if kind == "wan21" else None
    library = tmp_path if comfy is None else comfy.base / "models" / "trt_engines"
    handle = engine_of(vae, role, library, "torch", RequestedSizes(64, 64, 64))
    served, architecture = EngineVAEModel(vae, {role: handle}), handle.network.architecture()
    plain = []
    for number, sizes in enumerate(CALLS):
        name, images = call_of(role, architecture, module, *sizes, seed=number)
        expected = getattr(module, name)(images)
        assert relative_error(getattr(served, name)(images), expected) <= LIMIT, sizes
        blocks = handle.session.active.live.compiled
        plain.append(blocks.plain)
    assert (handle.stats.engine, handle.stats.native) == (len(CALLS), 0), handle.stats.details
    assert (len(blocks.kinds), plain[-1] - plain[-1 - COMPILED]) == (KINDS[kind, role], 0)
    interrupt(lambda: getattr(served, name)(images))
    assert relative_error(getattr(served, name)(images), expected) <= LIMIT
    if role is Role.VAE_ENCODER:  # native leaves out what makes no whole latent frame
        images = torch.rand(2, 3, 7, 32, 32)
        assert relative_error(served.encode(images), module.encode(images)) <= LIMIT
        assert handle.stats.native == 0
    if kind == "wan21" and role is Role.VAE_DECODER:
        comfyuis_own_ways_to_decode(vae, handle)
    if comfy is not None:
        through_comfyui(comfy, module, role)


def through_comfyui(comfy: ComfyProcess, module: torch.nn.Module, role: Role) -> None:
    """A still and a video; stock nodes take the frames of a video as images."""
    save_file(module.state_dict(), comfy.base / "models" / "vae" / "tiny_wan_vae.safetensors")
    call = "decode" if role is Role.VAE_DECODER else "encode"
    for frames in (1, 6):
        prompts = [graph_of(call, frames, backed) for backed in (False, True)]
        native, engine = (comfy.queue(one, timeout=300) for one in prompts)
        assert relative_difference(latent_of(engine), latent_of(native)) <= LIMIT
        (row,) = engine.output("report", "report")[0]["rows"]
        assert (row["engine"], row["native"]) == (1, 0), row["details"]


def graph_of(call: str, frames: int, backed: bool) -> Prompt:
    """Images that are encoded, and decoded again where that is asked for; one of both by the engine's node."""
    vae = {name: ["node" if backed and name == call else "loader", 0] for name in ("encode", "decode")}
    built = {
        "loader": node("VAELoader", vae_name="tiny_wan_vae.safetensors"),
        "image": node("TestImage", seed=1, width=56, height=72, batch=frames, channels=3),
        "encode": node("VAEEncode", pixels=["image", 0], vae=vae["encode"]),
        "save": node("TestSaveLatent", latent=["encode", 0], name="vae"),
    }
    if call == "decode":
        built["decode"] = node("VAEDecode", samples=["encode", 0], vae=vae["decode"])
        built["pixels"] = node("TestPixels", image=["decode", 0])
        built["save"]["inputs"]["latent"] = ["pixels", 0]
    if backed:
        built["node"] = node("TRTVAEEngine", vae=["loader", 0], backend="torch", when_missing="use native",
                             min_size=64, opt_size=64, max_size=64)  # fmt: skip
        built["report"] = node("TRTReport", after=[call, 0])
    return built


def comfyuis_own_ways_to_decode(native: VAE, handle: EngineHandle) -> None:
    """Videos whole, in tiles, and in tiles for want of memory; and the memory that ComfyUI is asked for."""
    backed = vae_with_engines(native, {Role.VAE_DECODER: handle})
    latent = torch.randn(1, 16, 3, 9, 13, generator=torch.Generator().manual_seed(8))
    tiles = {"tile_x": 6, "tile_y": 6, "overlap": 2, "tile_t": 2, "overlap_t": 1}
    before = handle.stats.engine
    with torch.inference_mode():  # as in ComfyUI's server
        assert relative_error(backed.decode(latent), native.decode(latent)) <= LIMIT
        assert handle.stats.engine == before + 1
        assert relative_error(backed.decode_tiled(latent, **tiles), native.decode_tiled(latent, **tiles)) <= LIMIT
    assert handle.stats.engine > before + 4
    assert handle.stats.native == 0, handle.stats.details
    still, video = (1, 16, 1, 30, 40), (1, 16, 9, 30, 40)
    for shape in (still, video):
        assert backed.memory_used_decode(shape, torch.float32) <= native.memory_used_decode(shape, torch.float32)


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("role", [Role.VAE_DECODER, Role.VAE_ENCODER])
def test_a_video_in_our_chunks_is_natives(kind: str, role: Role) -> None:
    module = module_of(kind)
    network = NativeNetwork.of_vae(as_vae(module), role, "a VAE")
    architecture = network.architecture()
    name, images = call_of(role, architecture, module, 4, 3, 5)
    with torch.inference_mode():
        (found,) = architecture.function(module_of(kind))(images)
        assert relative_error(found, getattr(module, name)(images)) <= LIMIT
    (call,) = architecture.calls(architecture.profile(RequestedSizes(64, 64, 64)), Picture(96, 80, (1,), length=13))
    words = {8: (12, 10), 16: (6, 5)}[architecture.pixels]
    assert (call["W"], call["H"], architecture.call_words(call)) == (*words, "96x80, 13 frames")


@COMPILES
def test_frames_that_a_chunk_hands_on_lie_in_memory_alone() -> None:
    """Of one video they lie dense among a chunk's frames; a compiler takes a clone of such for nothing to do."""
    def convolved(conv: torch.nn.Module, x: torch.Tensor, frames: torch.Tensor) -> Any:
        return _convolved(conv, x, (frames,), x.shape[2])

    (block,) = in_blocks([wan21.CausalConv3d(8, 8, 3, padding=1)], convolved)
    frames, kept = (torch.randn(1, 8, count, 6, 5).to(memory_format=torch.channels_last_3d) for count in (4, KEPT))
    kind = compiled(block, [frames, kept])
    run = open_one(kind.contents)
    with torch.inference_mode():
        found, handed_on = run(*lifted(block).values(), frames, kept)
    assert torch.equal(handed_on, frames[:, :, -KEPT:])
    assert handed_on.untyped_storage().nbytes() == handed_on.nbytes, f"they hold {found.shape[2] + KEPT} frames"


@pytest.mark.parametrize("dim", [Dim("L", up=4, plus=1), Dim("L", plus=1), Dim("H", down=2) * Dim("W", down=2)])
def test_a_dimension_is_read_as_it_is_written(dim: Dim) -> None:
    assert Dim.parse(str(dim)) == dim


def test_every_vae_of_wan_has_a_decoder_and_an_encoder() -> None:
    found = {name for name in architectures() if name.startswith("wan2") and "_vae_" in name}
    assert found == {f"{kind}_vae_{half}" for kind in NETWORKS for half in ("decoder", "encoder")}
