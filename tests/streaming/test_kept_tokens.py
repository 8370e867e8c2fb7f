"""Streams whose self-attention sees earlier frames: their keys and values stand beside those of the frame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import comfy.sd
import pytest
import torch
from comfy.utils import load_torch_file
from comfy_process import ComfyProcess
from earlier_keys import EarlierKeys
from given_frames import Given, apart, image, prompts, random, stock, streamed
from hybrid_trt.streaming.frames import Frame, Settings
from hybrid_trt.streaming.stream import Stream, with_kept
from memory_fixtures import file
from patched import load
from scenarios import SETTINGS, node
from streams import Case, compared, pictures_of
from streams import streamed as prompt_of

__all__ = ["file"]  # a fixture: pytest finds it by name

OWN = Settings(steps=2, cfg=2.0, sampler_name="euler", scheduler="simple", denoise=0.6, seed=7, remembered=1)
LIMIT = 1e-5


def pictures_by(file: Path, models: dict[str, Path], own: Settings, frames: list[torch.Tensor]) -> list[torch.Tensor]:
    vae, source = comfy.sd.VAE(sd=load_torch_file(str(models["tiny_kl"]))), Given(*map(Frame, range(9), frames))
    stream = Stream(load(file), vae, *prompts(), own)
    times = streamed(stream, source)
    assert times.one_by_one == ""
    return [source.pictures[n] for n in range(len(frames))]


@pytest.mark.parametrize("remembered", [1, 2])
def test_a_frame_sees_the_keys_and_values_of_those_before_it_at_its_own_step(
    file: Path, models: dict[str, Path], remembered: int
) -> None:
    frames, own = [image(n) for n in range(3)], replace(OWN, remembered=remembered)
    model, vae = load(file), comfy.sd.VAE(sd=load_torch_file(str(models["tiny_kl"])))
    attention = EarlierKeys(remembered)
    model.model_options["transformer_options"] = {"optimized_attention_override": attention}
    wanted = []
    for frame in frames:
        wanted.append(stock(model, vae, *prompts(), own, frame))
        attention.next_frame()
    found = pictures_by(file, models, own, frames)
    assert max(map(apart, found, wanted)) <= LIMIT
    plain = pictures_by(file, models, replace(own, remembered=0), frames)
    assert apart(found[0], plain[0]) <= LIMIT, "nothing is before the first frame"
    assert min(map(apart, found[1:], plain[1:])) > 10 * LIMIT


def test_frames_that_do_not_change_have_the_pictures_of_stock_nodes(file: Path, models: dict[str, Path]) -> None:
    plain, found = (pictures_by(file, models, replace(OWN, remembered=n), [image(3)] * 3) for n in (0, 3))
    assert max(map(apart, found, plain)) <= LIMIT


def test_pictures_of_a_trembling_video_differ_less_from_frame_to_frame(file: Path, models: dict[str, Path]) -> None:
    frames = [(image(3) + 0.1 * random(1, 64, 64, 3, seed=n)).clamp(0, 1) for n in range(4)]

    def unrest(remembered: int) -> float:
        made = pictures_by(file, models, replace(OWN, remembered=remembered), frames)
        return sum(float((a - b).abs().mean()) for a, b in zip(made, made[1:], strict=False))

    assert unrest(2) < unrest(0)


def test_another_size_begins_anew(file: Path, models: dict[str, Path]) -> None:
    frames = [image(0), image(1, 72), image(2, 72)]
    found, plain = (pictures_by(file, models, replace(OWN, remembered=n), frames) for n in (1, 0))
    assert apart(found[1], plain[1]) <= LIMIT
    assert apart(found[2], plain[2]) > 10 * LIMIT


def test_models_of_other_kinds_are_refused_with_a_sentence(models: dict[str, Path]) -> None:
    model = comfy.sd.load_diffusion_model(str(models["tiny_flux1_unet"]))
    with pytest.raises(ValueError, match="cannot attend to earlier frames, only UNets can"):
        with_kept(model, 1)
    assert with_kept(model, 0)[1] is None


def test_the_node_remembers_frames_when_asked_and_the_unet_stays_on_live_weights(comfy: ComfyProcess) -> None:
    case = Case(frames=3, steps=1)
    asked = prompt_of(case, remembered_frames=1)
    asked["accelerate"] = node("TRTAccelerate", model=["model", 0], **SETTINGS | {"backend": "torch"})
    asked["stream"]["inputs"]["model"] = ["accelerate", 0]
    history = comfy.queue(asked)
    found = pictures_of(history)
    _, plain = compared(comfy, case)
    assert abs(found[0] - pictures_of(plain)[0]).max() <= LIMIT
    assert abs(found[1:] - pictures_of(plain)[1:]).max() > 10 * LIMIT
    (row,) = history.output("report", "report")[0]["rows"]
    assert (row["engine"], row["native"]) == (3, 0)
