"""Train small models on emoji and their names: an autoencoder, a UNet of SD1.5's kind, an edge ControlNet.

    python tools/train_demo.py draw --package iconify-json-noto-1.2.9.tgz --data emoji.npz
    python tools/train_demo.py train --comfyui ~/ComfyUI --data emoji.npz --out models --minutes 3 10 4

``draw`` needs resvg_py and the npm package @iconify-json/noto (Apache-2.0). ``train`` wants an NVIDIA GPU, and goes on
where an earlier run ended; ``--minutes`` are those of the three stages. ComfyUI's own classes are trained, so its stock
nodes load what comes out. SD1.5's text encoder has a size that ComfyUI fixes: it stays as ``tiny_models.py`` draws it
from a seed, and the UNet learns what its vectors mean.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIDE, STEPS, FREE = 128, 1000, 0.1
"""Pixels of a picture; steps of noise; part of the prompts that are left empty, for CFG."""
CATEGORIES = ("Activities", "Animals & Nature", "Food & Drink", "Objects", "Smileys & Emotion", "Symbols",
              "Travel & Places")  # fmt: skip
RATE = {"vae": 5e-4, "unet": 3e-4, "controlnet": 3e-4}
FILES = {"vae": "vae/trained_vae.safetensors", "unet": "diffusion_models/trained_unet.safetensors",
         "controlnet": "controlnet/trained_edges.safetensors"}  # fmt: skip
"""Networks, and their files in ComfyUI's folder of models."""
ENCODER, SCALE = "demo_clip_l", "|scale"
KEPT = 0.999
"""Part of the averaged weights that a step keeps."""
SHOWN = ("red apple", "rocket", "snowman", "pizza", "owl", "guitar", "cactus", "sailboat", "strawberry", "trophy")
"""Names in the sheet of samples."""
UNET = {"image_size": 32, "in_channels": 4, "model_channels": 320, "context_dim": 768, "num_heads": 8,
        "use_spatial_transformer": True, "channel_mult": [1], "num_res_blocks": [1], "transformer_depth": [1],
        "transformer_depth_middle": -1}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ pictures
def draw(package: Path, data: Path) -> None:
    """Draw each emoji of a package on white, and keep the pictures with their names."""
    import resvg_py

    with tarfile.open(package) as archive:
        icons, about = (json.load(archive.extractfile(f"package/{name}.json")) for name in ("icons", "metadata"))
    names = sorted({name for category in CATEGORIES for name in about["categories"][category]} & set(icons["icons"]))
    pictures = []
    for name in names:
        body = icons["icons"][name]["body"]
        svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 144 144">{body}</svg>'
        png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=SIDE, height=SIDE, background="white"))
        pictures.append(np.asarray(Image.open(io.BytesIO(png)).convert("RGB")))
    np.savez_compressed(data, names=[name.replace("-", " ") for name in names], pictures=np.stack(pictures))
    print(f"{len(names)} pictures")


# ------------------------------------------------------------------------------------------------------------ networks
def made(kind: str) -> Any:
    """Return one of ComfyUI's networks with the weights that torch's layers begin with."""
    import comfy.ops
    from comfy.cldm.cldm import ControlNet
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
    from comfy.taesd.taesd import TAESD

    ops = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.disable_weight_init}
    network = {"vae": TAESD,
               "unet": lambda: UNetModel(**UNET, out_channels=4, transformer_depth_output=[0, 0], **ops),
               "controlnet": lambda: ControlNet(**UNET, hint_channels=3, **ops)}[kind]()  # fmt: skip
    for layer in network.modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            type(layer).__mro__[1].reset_parameters(layer)
        elif isinstance(layer, torch.nn.GroupNorm | torch.nn.LayerNorm):
            torch.nn.init.ones_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
    return network


def ends_with_nothing(network: Any) -> None:
    """Have a ControlNet's outputs begin with zeros, so that it begins as no ControlNet."""

    for last in (network.input_hint_block[-1], *network.zero_convs, *network.middle_block_out):
        for parameter in last.parameters():
            torch.nn.init.zeros_(parameter)


def encoded(names: list[str], comfyui: Path, folder: Path) -> torch.Tensor:
    """Return the vectors of names, and of an empty prompt in front, by the text encoder that a seed draws."""
    import comfy.sd

    maker = Path(__file__).resolve().with_name("tiny_models.py")
    made_so = ["--comfyui", str(comfyui), "--models", str(folder), ENCODER]
    subprocess.run([sys.executable, str(maker), *made_so], check=True)  # which would have ComfyUI run on the CPU here
    file = folder / "text_encoders" / f"{ENCODER}.safetensors"
    clip = comfy.sd.load_clip([str(file)], clip_type=comfy.sd.CLIPType.STABLE_DIFFUSION)
    with torch.inference_mode():
        found = [clip.encode_from_tokens(clip.tokenize(name)).cpu() for name in ["", *names]]
    return torch.cat(found).clone()


# ------------------------------------------------------------------------------------------------------------ training
class Trained:
    """A network in training, with averaged weights, which is kept in a file.

    Attributes:
        average: the network whose weights are used.
    """

    def __init__(self, kind: str, out: Path, begin: Any = None):
        self.kind, self.file = kind, out / f"{kind}.pt"
        self.network = made(kind)
        if begin is not None:
            self.network.load_state_dict(begin.state_dict(), strict=False)
            ends_with_nothing(self.network)
        self.network = self.network.to(DEVICE).train()
        self.average = copy.deepcopy(self.network).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), RATE[kind], weight_decay=0.0)
        self.step = 0
        if self.file.exists():
            state = torch.load(self.file, map_location=DEVICE)
            for one in ("network", "average", "optimizer"):
                getattr(self, one).load_state_dict(state[one])
            self.step = state["step"]

    def train(self, loss: Callable[[Any], Any], minutes: float) -> None:
        """Take steps for some minutes; keep the state each minute."""
        until, kept = time.monotonic() + 60 * minutes, time.monotonic()
        total = 0.0
        while time.monotonic() < until:
            for group in self.optimizer.param_groups:  # to nothing at the end, so that weights come to rest
                left = (until - time.monotonic()) / (60 * minutes)
                group["lr"] = RATE[self.kind] * max(0.0, min(1.0, (self.step + 1) / 500, 2.5 * left))
            found = loss(self.network)
            self.optimizer.zero_grad(set_to_none=True)
            found.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            with torch.no_grad():
                rate = min(KEPT, self.step / (self.step + 10))
                for mean, now in zip(self.average.parameters(), self.network.parameters(), strict=True):
                    mean.lerp_(now, 1 - rate)
            if self.step % 200 == 0:
                total = float(found.detach())
                print(f"{self.kind} step {self.step}: {total:.4f}", flush=True)
            if time.monotonic() > kept + 60:
                kept = time.monotonic()
                self.keep()
        self.keep()

    def keep(self) -> None:
        state = {one: getattr(self, one).state_dict() for one in ("network", "average", "optimizer")}
        torch.save({**state, "step": self.step}, self.file.with_suffix(".new"))
        self.file.with_suffix(".new").replace(self.file)


def vae_loss(pictures: Any, batch: int) -> Callable[[Any], Any]:
    """Return the loss of an autoencoder: of pixels and their edges, with latents near a spread of one."""

    def loss(vae: Any) -> Any:
        given = pixels(pictures, torch.randint(len(pictures), (batch // 4,), device=DEVICE))
        shift = tuple(int(n) for n in torch.randint(-12, 13, (2,)))
        given = torch.roll(given, shift, (2, 3))
        with torch.autocast(DEVICE, torch.bfloat16):
            latent = vae.taesd_encoder(given * 0.5 + 0.5)
            found = vae.taesd_decoder(latent).float().sub(0.5).mul(2)
        across = sum(F.l1_loss(found.diff(dim=axis), given.diff(dim=axis)) for axis in (2, 3))
        spread = latent.float().var() - 1
        away = spread**2 + latent.float().mean() ** 2
        return F.l1_loss(found, given) + F.mse_loss(found, given) + across + 0.02 * away

    return loss


def pixels(pictures: Any, chosen: Any) -> Any:
    """Return pictures from -1 to 1, (batch, 3, height, width)."""
    return pictures[chosen].permute(0, 3, 1, 2).float() / 127.5 - 1


def edges(given: Any) -> Any:
    """Return white edges on black, as a ControlNet reads them, of pictures from -1 to 1."""

    grey = given.mean(1, keepdim=True)
    across = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]], device=given.device)[None, None]
    found = sum(F.conv2d(F.pad(grey, (1, 1, 1, 1), mode="replicate"), one).square() for one in (across, across.mT))
    return (found.sqrt() > 0.6).float().expand(-1, 3, -1, -1)


def kept_noise() -> Any:
    """Return the part of a picture that is left at each step of SD1.5's noise."""

    rates = torch.linspace(0.00085**0.5, 0.012**0.5, STEPS, dtype=torch.float64) ** 2
    return torch.cumprod(1 - rates, 0).float().to(DEVICE)


def noise_loss(latents: Any, texts: Any, pictures: Any, batch: int, unet: Any = None) -> Callable[[Any], Any]:
    """Return the loss of the noise that a UNet sees; with a trained ``unet``, that of its ControlNet."""

    left = kept_noise()

    def loss(network: Any) -> Any:
        chosen = torch.randint(len(latents), (batch,), device=DEVICE)
        times = torch.randint(STEPS, chosen.shape, device=DEVICE)
        alpha = left[times].view(-1, 1, 1, 1)
        noise = torch.randn_like(latents[chosen])
        noisy = latents[chosen] * alpha.sqrt() + noise * (1 - alpha).sqrt()
        prompt = torch.where(torch.rand(chosen.shape, device=DEVICE) < FREE, 0, chosen + 1)
        text = texts[prompt].float()
        with torch.autocast(DEVICE, torch.bfloat16):
            if unet is None:
                found = network(noisy, times.float(), context=text)
            else:
                control = network(x=noisy, hint=edges(pixels(pictures, chosen)), timesteps=times.float(), context=text)
                found = unet(noisy, times.float(), context=text, control=control)
        return F.mse_loss(found.float(), noise)

    return loss


def samples(unet: Any, vae: Any, texts: Any, numbers: list[int], cfg: float = 4.0, steps: int = 25) -> Any:
    """Return pictures, 0 to 1, of some prompts by DDIM."""

    left = torch.cat([kept_noise(), torch.ones(1, device=DEVICE)])
    generator = torch.Generator(DEVICE).manual_seed(1)
    x = torch.randn(len(numbers), 4, SIDE // 8, SIDE // 8, device=DEVICE, generator=generator)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        for now, then in pairs(steps):
            time_now = torch.full((2 * len(x),), float(now), device=DEVICE)
            text = texts[[*numbers, *[0] * len(x)]].float()
            wanted, free = unet(torch.cat([x, x]), time_now, context=text).float().chunk(2)
            noise = free + cfg * (wanted - free)
            clean = (x - (1 - left[now]).sqrt() * noise) / left[now].sqrt()
            x = left[then].sqrt() * clean + (1 - left[then]).sqrt() * noise
        return vae.taesd_decoder(x).float().clamp(0, 1)


def pairs(steps: int) -> Iterator[tuple[int, int]]:
    """Yield each step of noise and the next one; the last is no noise."""
    times = [*(round(t) for t in np.linspace(STEPS - 1, 0, steps)), STEPS]
    yield from zip(times[:-1], times[1:], strict=True)


def sheet(images: Any, path: Path) -> None:
    """Write images, 0 to 1, as rows of five."""
    rows = [np.concatenate(list(row), 1) for row in np.split((255 * images.permute(0, 2, 3, 1).cpu().numpy()), 2)]
    Image.fromarray(np.concatenate(rows, 0).astype(np.uint8)).save(path)


def train(comfyui: Path, data: Path, out: Path, minutes: list[float], batch: int) -> None:
    """Train the three networks one after another, and write them as ComfyUI reads them."""
    sys.path.insert(0, str(comfyui.resolve()))
    sys.argv = sys.argv[:1]

    out.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = True
    held = np.load(data)
    names, pictures = [str(name) for name in held["names"]], torch.from_numpy(held["pictures"]).to(DEVICE)
    texts = encoded(names, comfyui, out).to(DEVICE).half()
    vae = Trained("vae", out)
    vae.train(vae_loss(pictures, batch), minutes[0])
    with torch.no_grad():
        latents = torch.cat([vae.average.taesd_encoder(pixels(pictures, part) * 0.5 + 0.5).float()
                             for part in torch.arange(len(pictures), device=DEVICE).split(64)])
        print(f"latents: mean {float(latents.mean()):.3f}, spread {float(latents.std()):.3f}")
        shown = [names.index(name) for name in SHOWN if name in names]
        sheet(vae.average.taesd_decoder(latents[shown]).float().clamp(0, 1), out / "vae.png")
    unet = Trained("unet", out)
    unet.train(noise_loss(latents, texts, pictures, batch), minutes[1])
    sheet(samples(unet.average, vae.average, texts, [number + 1 for number in shown]), out / "unet.png")
    control = Trained("controlnet", out, begin=unet.average)
    control.train(noise_loss(latents, texts, pictures, batch, unet.average), minutes[2])
    write({"vae": vae.average, "unet": unet.average, "controlnet": control.average}, out / "demo.safetensors")


def write(networks: Mapping[str, Any], file: Path) -> None:
    """Keep networks in one file: weights in 8 bits with a scale for each row, all else in float16."""
    kept: dict[str, torch.Tensor] = {}
    for kind, network in networks.items():
        for name, value in network.cpu().state_dict().items():
            if value.ndim < 2:
                kept[f"{kind}.{name}"] = value.half()
                continue
            scale = value.flatten(1).abs().amax(1).clamp(min=1e-12) / 127
            rows = value / scale.view(-1, *[1] * (value.ndim - 1))
            kept[f"{kind}.{name}"] = rows.round().to(torch.int8).contiguous()
            kept[f"{kind}.{name}{SCALE}"] = scale
    save_file(kept, file)


def unpack(file: Path, models: Path) -> None:
    """Write the networks of such a file in float16, where ComfyUI's loaders look for them."""
    kept, found = load_file(file), {kind: {} for kind in FILES}
    for key, value in kept.items():
        kind, _, name = key.partition(".")
        if key.endswith(SCALE):
            continue
        if (scale := kept.get(key + SCALE)) is not None:
            value = value * scale.view(-1, *[1] * (value.ndim - 1))
        found[kind][("control_model." if kind == "controlnet" else "") + name] = value.half()
    found["vae"] |= {"vae_scale": torch.tensor(0.18215), "vae_shift": torch.tensor(0.0)}
    for kind, weights in found.items():
        (models / FILES[kind]).parent.mkdir(parents=True, exist_ok=True)
        save_file(weights, models / FILES[kind])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    drawing, training = commands.add_parser("draw"), commands.add_parser("train")
    drawing.add_argument("--package", type=Path, required=True)
    training.add_argument("--comfyui", type=Path, required=True)
    training.add_argument("--out", type=Path, required=True)
    training.add_argument("--minutes", type=float, nargs=3, default=[3, 10, 4])
    training.add_argument("--batch", type=int, default=256, help="pictures of a step (256)")
    for command in (drawing, training):
        command.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "draw":
        draw(options.package, options.data)
    else:
        train(options.comfyui, options.data, options.out, options.minutes, options.batch)


if __name__ == "__main__":
    main()
