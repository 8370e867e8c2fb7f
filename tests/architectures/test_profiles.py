"""Sizes: what fits a family when no numbers are given, and how long a first build takes."""

from __future__ import annotations

import json
import secrets
from dataclasses import replace
from pathlib import Path

import pack
import pytest
from fake_engine import publish_engine
from hybrid_trt.architectures import architectures
from hybrid_trt.architectures.shapes import MOST, SIZE_NAMES
from hybrid_trt.architectures.sizes import ANY
from hybrid_trt.engine_builder.expected_time import BLOCKS, MANY_KINDS, MEASURED, expected
from hybrid_trt.engine_library import Library, trust
from profiles import profile_of

ROOT: Path = pack.ROOT
PORTRAITS = ((832, 1216), (896, 1152), (768, 1344), (640, 1536), (1024, 1024))


def takes(profile: object, width: int, height: int, batch: int = 2) -> bool:
    ranges = profile.ranges
    return ranges["W"].contains(width // 8) and ranges["H"].contains(height // 8) and ranges["B"].contains(batch)


@pytest.mark.parametrize("name", sorted(name for name in architectures() if name.startswith("sd")))
def test_without_numbers_the_profile_is_what_the_family_is_used_for(name: str) -> None:
    sizes = architectures()[name].sizes
    profile = profile_of(defaults=sizes)
    best = 1024 if name.startswith("sdxl") else 512
    assert profile.sizes("opt") == {"B": 2, "H": best // 8, "W": best // 8, "T": 77, "HB": 1}
    assert (profile.ranges["B"].max, profile.ranges["T"].max) == (2, 231), "one image with CFG, three chunks of prompt"
    if name.startswith("sdxl"):
        assert all(takes(profile, width, height) and takes(profile, height, width) for width, height in PORTRAITS)
        assert not takes(profile, 2048, 1024)
    else:
        assert all(takes(profile, *size) for size in ((512, 768), (768, 512), (1024, 512), (512, 512), (256, 256)))
        assert not takes(profile, 1536, 1024)


def test_numbers_are_taken_as_they_are_and_win_over_what_fits() -> None:
    sdxl = architectures()["sdxl_unet"].sizes
    assert profile_of(64, 512, 1024, 4, 616, defaults=sdxl) == profile_of(64, 512, 1024, 4, 616)
    assert ANY.words(profile_of(max_size=256, defaults=sdxl)) == "1 image, 256 px, 231 tokens"
    assert ANY.words(profile_of(min_size=2048, defaults=sdxl)) == "1 image, 2048 px, 231 tokens"
    many = profile_of(opt_size=320, max_images=4, defaults=sdxl)
    assert ANY.words(many) == "up to 4 images, 320 to 1536 px, 231 tokens"
    assert profile_of(min_size=512, max_size=768, defaults=sdxl).ranges["H"].opt == 96


@pytest.mark.parametrize("sizes", [(512, 256, 0), (512, 0, 256), (0, 512, 256), (8, 0, 0)])
def test_sizes_that_contradict_each_other_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="must rise in this order, from 16 on"):
        profile_of(*sizes)


@pytest.mark.parametrize("name", SIZE_NAMES)
@pytest.mark.parametrize("beyond", [-1, MOST["max_size"] + 1, 10**10])
def test_numbers_that_no_node_takes_are_refused_by_their_name(name: str, beyond: int) -> None:
    assert profile_of(**{name: MOST[name]})
    with pytest.raises(ValueError, match=f"{name} .{beyond}. must lie between 0 and {MOST[name]}; 0 is what fits"):
        profile_of(**{name: beyond})


@pytest.mark.parametrize(("kind", "backend"), sorted(MEASURED))
def test_a_first_build_is_told_the_time_that_we_measured(kind: str, backend: str, tmp_path: Path) -> None:
    library = Library([tmp_path])
    for parameters, took in MEASURED[kind, backend]:
        assert expected(library, kind, "", backend, "float16", "any", int(parameters)) == round(took)
    assert expected(library, kind, "", backend, "float16", "any", 3_000_000) is None, "a tiny network"
    assert expected(library, kind, "", "another", "float16", "any", int(8e8)) is None, "never measured"


def test_a_network_in_blocks_is_told_the_time_of_its_family_whatever_its_size(tmp_path: Path) -> None:
    library = Library([tmp_path])
    rows = json.loads((ROOT / "benchmarks" / "results" / "first_minutes_h200.json").read_text())["rows"]
    assert round(BLOCKS) in {round(row["ready_s"]) for row in rows if "ready_s" in row}
    for parameters in (6e9, 12e9):
        assert expected(library, "unet", "zimage", "torch", "bfloat16", "any", int(parameters)) == BLOCKS
    assert expected(library, "unet", "zimage", "torch", "bfloat16", "any", 3_000_000) is None, "a tiny network"
    like = publish_engine(tmp_path / "another").manifest
    identity = replace(like.identity, architecture="zimage", backend="torch", precision="bfloat16")
    for seconds, family in ((19.0, "zimage"), (2.0, "zimage"), (90.0, "flux1")):
        manifest = replace(like, identity=replace(identity, architecture=family, weights=secrets.token_hex(32)),
                           parameters=int(6e9), seconds={"compile": seconds})  # fmt: skip
        with library.building_folder() as work:
            library.publish(work, manifest, record=trust.BUILT_HERE)
    told = expected(library, "unet", "zimage", "torch", "bfloat16", identity.device, int(6e9))
    assert told == 19.0, "the second one found compiled blocks"


def test_how_long_another_machine_built_says_nothing_about_this_one(tmp_path: Path) -> None:
    library, like = Library([tmp_path]), publish_engine(tmp_path / "another").manifest
    manifest = replace(like, parameters=10**6, seconds={"build": 300.0})
    for record, seconds in ((trust.Record(trust.REFUSED), None), (trust.BUILT_HERE, 300.0)):
        with library.building_folder() as work:
            library.publish(work, manifest, record=record)
        assert expected(library, "unet", "", "onnxruntime", "float16", "any", 10**6) == seconds, record


def test_the_times_are_those_of_the_result_files() -> None:
    results = ROOT / "benchmarks" / "results"
    builds = json.loads((results / "builds.json").read_text())["builds"]
    for kind, word in (("unet", "SD1.5 unet"), ("controlnet", "SD1.5 controlnet")):
        for backend in ("tensorrt_rtx", "onnxruntime"):
            took = [b["total_wall_s"] for b in builds if b["network"].startswith(word) and b["backend"] == backend]
            assert any(abs(MEASURED[kind, backend][0][1] / one - 1) < 1 for one in took)
    found = json.loads((results / "tensorrt86_h200.json").read_text())
    took = {row["case"]: row["tensorrt_wall_s"] for row in (*found["builds"], *found["third_run"]["builds"])
            if "tensorrt_wall_s" in row}
    for kind, cases in (("unet", ("sd15_unet_build", "sdxl_unet_build")), ("controlnet", ("sd15_controlnet_0_build",))):
        assert [seconds for _, seconds in MEASURED[kind, "tensorrt"]] == [took[case] for case in cases]
    rows = {row["case"]: row for row in json.loads((results / "unet_blocks_h200.json").read_text())["rows"]}
    assert {kind: rows[f"sd15_{kind}"]["build_s"] for kind in MANY_KINDS} == MANY_KINDS
