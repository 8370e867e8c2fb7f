"""Thumbnails of the shipped workflows: large words and what goes in and comes out, drawn without a page or a model.

The template browser shows them in squares of about 300 pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from workflow_parts import Recipe

SIZE, MARGIN, TOP, BOTTOM = 600, 24, 150, 450
BACK, TEXT, ENGINE, NATIVE = "#1e1f22", "#ffffff", "#4caf6a", "#f0b13c"
#: Sky, hill, lake, wall, roof, sun of the house by the lake, as each kind of image shows it.
SCENES = {
    "picture": ("#8ec5e8", "#5a8f57", "#3f7fae", "#d9b98a", "#8c3f2c", "#ffe9a8"),
    "winter": ("#c9d3dc", "#e8eef2", "#9fb4c4", "#b9b4ac", "#6b6f78", "#f6f6f0"),
    "depth": ("#101010", "#3c3c3c", "#6a6a6a", "#bdbdbd", "#9a9a9a", "#101010"),
    "edges": ("#000000",) * 6,
    "lines": ("#ffffff",) * 6,
}
OUTLINES = {"edges": "#ffffff", "lines": "#303030"}


def thumbnail(recipe: Recipe) -> Image.Image:
    """The picture of a workflow."""
    image = Image.new("RGB", (SIZE, SIZE), BACK)
    draw = ImageDraw.Draw(image)
    family, what = recipe.title.split(" - ", 1)
    _middle(draw, family, 64, 72, TEXT)  # the page's badge covers what is above
    _middle(draw, what, 490, _largest(what), ENGINE)
    DRAWN[recipe.name](image)
    return image


def write(recipe: Recipe, folder: Path) -> Path:
    """Write a workflow's thumbnail beside it."""
    path = folder / f"{recipe.title}.jpg"
    thumbnail(recipe).save(path, quality=88, optimize=True)
    return path


def _two(image: Image.Image, kinds: tuple[str, str] = ("edges", "depth")) -> None:
    for number, kind in enumerate(kinds):
        image.paste(_scene(kind, 146), (MARGIN, TOP + number * 154))
    _arrow(image, 182, 300)
    image.paste(_scene("picture", 300), (276, TOP))


def _prompt(image: Image.Image) -> None:
    _words(image)
    image.paste(_scene("picture", 232), (344, TOP + 34))


def _words(image: Image.Image) -> None:
    draw = ImageDraw.Draw(image)
    for number, words in enumerate(("a house", "by a lake,", "morning light")):
        draw.text((MARGIN, TOP + 80 + number * 50), words, TEXT, _font(36))
    _arrow(image, 264, 300)


def _lora(image: Image.Image) -> None:
    image.paste(_scene("winter", 200), (MARGIN, TOP + 50))
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle((248, TOP + 60, 352, TOP + 240), 16, "#6b4fa3")
    draw.text((300, TOP + 126), "LoRA", TEXT, _font(34), anchor="mm")
    draw.polygon([(278, TOP + 170), (278, TOP + 220), (326, TOP + 195)], TEXT)
    image.paste(_scene("picture", 200), (376, TOP + 50))


def _advanced(image: Image.Image) -> None:
    draw = ImageDraw.Draw(image)
    for number, name in enumerate(("UNet", "ControlNet 1", "ControlNet 2")):
        top = TOP + 4 + number * 102
        draw.rounded_rectangle((MARGIN + 90, top, SIZE - MARGIN - 90, top + 84), 14, "#2f3338", ENGINE, 4)
        draw.text((SIZE / 2, top + 42), name, TEXT, _font(40), anchor="mm")


def _one(image: Image.Image) -> None:
    image.paste(_scene("edges", 200), (MARGIN, TOP + 50))
    _arrow(image, 234, 300)
    image.paste(_scene("picture", 262), (314, TOP + 19))


def _changed(image: Image.Image) -> None:
    image.paste(_scene("picture", 232), (MARGIN, TOP + 34))
    _arrow(image, 264, 300)
    image.paste(_scene("winter", 232), (344, TOP + 34))


def _compare(image: Image.Image) -> None:
    draw = ImageDraw.Draw(image)
    for left, words, colour in ((MARGIN, "without", NATIVE), (314, "with", ENGINE)):
        image.paste(_scene("picture", 262), (left, TOP))
        draw.rectangle((left, TOP + 246, left + 262, TOP + 300), colour)
        at = left + (262 - _font(42).getlength(words)) / 2
        draw.text((at, TOP + 248), words, "#101010", _font(42))


def _held(image: Image.Image) -> None:
    for number, kind in enumerate(("winter", "edges")):
        image.paste(_scene(kind, 146), (MARGIN, TOP + number * 154))
    _arrow(image, 182, 300)
    image.paste(_scene("picture", 300), (276, TOP))


def _webcam(image: Image.Image) -> None:
    draw = ImageDraw.Draw(image)
    draw.rounded_rectangle((MARGIN, TOP + 70, 200, TOP + 200), 18, "#2f3338", TEXT, 5)
    draw.polygon([(200, TOP + 120), (240, TOP + 90), (240, TOP + 180), (200, TOP + 150)], TEXT)
    draw.ellipse((70, TOP + 95, 150, TOP + 175), "#8ec5e8", TEXT, 5)
    _arrow(image, 264, 300)
    image.paste(_scene("picture", 232), (344, TOP + 34))


def _video(image: Image.Image) -> None:
    _film(image, MARGIN, "winter")
    _arrow(image, 264, 300)
    _film(image, 344)


def _told(image: Image.Image) -> None:
    _words(image)
    _film(image, 344)


def _moved(image: Image.Image) -> None:
    image.paste(_scene("picture", 232), (MARGIN, TOP + 34))
    _arrow(image, 264, 300)
    _film(image, 344)


def _film(image: Image.Image, left: int, kind: str = "picture") -> None:
    draw = ImageDraw.Draw(image)
    draw.rectangle((left, TOP, left + 232, TOP + 300), "#101010")
    for side in (left + 8, left + 208):
        for hole in range(8):
            draw.rectangle((side, TOP + 10 + 36 * hole, side + 16, TOP + 30 + 36 * hole), "#d0d0d0")
    for number in range(2):
        image.paste(_scene(kind, 144), (left + 44, TOP + 4 + 148 * number))


def _three(image: Image.Image) -> None:
    for number, kind in enumerate(("picture", "winter", "lines")):
        image.paste(_scene(kind, 96), (MARGIN, TOP + number * 102))
    _arrow(image, 158, 300)
    image.paste(_scene("winter", 300), (264, TOP))


def _fill(image: Image.Image) -> None:
    image.paste(_scene("picture", 232), (MARGIN, TOP + 34))
    ImageDraw.Draw(image).ellipse((MARGIN + 40, TOP + 100, MARGIN + 170, TOP + 230), "#101010")
    _arrow(image, 264, 300)
    image.paste(_scene("picture", 232), (344, TOP + 34))


DRAWN: dict[str, Callable[[Image.Image], None]] = {
    **dict.fromkeys(("flux1_text_to_image", "zimage_text_to_image", "krea2_text_to_image", "qwen_text_to_image"),
                    _prompt),
    **dict.fromkeys(("zimage_lora", "krea2_lora"), _lora),
    **dict.fromkeys(("flux1_controlnet", "zimage_control"), _one),
    **dict.fromkeys(("flux2_edit", "flux1_kontext"), _changed), "qwen_edit": _three, "flux1_fill": _fill,
    "zimage_compare": _compare, "wan22_image_to_video": _moved,
    **dict.fromkeys(("wan22_text_to_video", "minimax_h3_text_to_video", "ltx23_text_to_video"), _told),
    "sd15_two_controlnets": _two, "sdxl_two_controlnets": _two, "sd15_img2img_controlnet": _held,
    "sd15_advanced": _advanced, "sd15_depth_and_pose": partial(_two, kinds=("depth", "pose")),
    "sd15_webcam": _webcam, "sd15_video": _video,
}  # fmt: skip


def _scene(kind: str, size: int) -> Image.Image:
    """A house by a lake, drawn at 300 pixels; or a pose."""
    image = Image.new("RGB", (300, 300), "#000000")
    draw = ImageDraw.Draw(image)
    if kind == "pose":
        joints = [(150, 60), (150, 150), (100, 210), (90, 285), (200, 210), (215, 285), (85, 120), (215, 105)]
        for (a, b), colour in zip(((0, 1), (1, 2), (2, 3), (1, 4), (4, 5), (6, 0), (0, 7)), _RAINBOW, strict=True):
            draw.line((*joints[a], *joints[b]), colour, 12)
        draw.ellipse((130, 20, 170, 60), "#ff5555")
        return image.resize((size, size), Image.Resampling.LANCZOS)
    sky, hill, lake, wall, roof, sun = SCENES[kind]
    line, width = OUTLINES.get(kind), 5 if kind in OUTLINES else 0
    draw.rectangle((0, 0, 300, 300), sky)
    draw.ellipse((215, 30, 265, 80), sun, line, width)
    draw.polygon([(-5, 200), (70, 120), (150, 175), (240, 105), (305, 160), (305, 230), (-5, 230)], hill, line, width)
    draw.rectangle((-6, 226, 306, 306), lake, line, width)
    draw.rectangle((80, 165, 190, 240), wall, line, width)
    draw.polygon([(65, 168), (135, 105), (205, 168)], roof, line, width)
    draw.rectangle((122, 195, 150, 240), roof, line, width)
    draw.arc((40, 245, 260, 275), 0, 180, line or wall, 4)
    return image.resize((size, size), Image.Resampling.LANCZOS)


_RAINBOW = ("#ff5555", "#ffb13c", "#ffe055", "#59d35b", "#4ad7d1", "#4a90d9", "#b06ae0")


def _arrow(image: Image.Image, left: int, middle: int) -> None:
    draw = ImageDraw.Draw(image)
    draw.rectangle((left, middle - 9, left + 44, middle + 9), TEXT)
    draw.polygon([(left + 40, middle - 32), (left + 40, middle + 32), (left + 72, middle)], TEXT)


def _middle(draw: ImageDraw.ImageDraw, words: str, top: int, size: int, colour: str) -> None:
    font = _font(size)
    draw.text(((SIZE - font.getlength(words)) / 2, top), words, colour, font)


def _largest(words: str) -> int:
    """The largest type in which some words fit a line."""
    return next(size for size in range(72, 20, -2) if _font(size).getlength(words) <= SIZE - 2 * MARGIN)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
