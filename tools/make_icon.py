#!/usr/bin/env python3
"""Draw the icon and the banner that the registry shows.

    python tools/environment.py --browser run -- python tools/make_icon.py
"""

from __future__ import annotations

from pathlib import Path

from browser import chromium

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
BACK, GREEN, QUIET = "#1e1f22", "#4caf6a", "#c4c4c4"
#: A node with its sockets and, in it, a fast-forward sign; 400 x 400.
NODE = f"""<rect x="70" y="90" width="260" height="220" rx="36" fill="#2f3338" stroke="{GREEN}" stroke-width="14"/>
<circle cx="70" cy="160" r="22" fill="#b39ddb"/><circle cx="70" cy="240" r="22" fill="#6ee7b7"/>
<circle cx="330" cy="200" r="22" fill="#b39ddb"/>
<path d="M128 140v120l72-60zM200 140v120l72-60z" fill="{GREEN}"/>"""


def picture(width: int, height: int, drawing: str) -> str:
    """A dark picture with a drawing on it, as SVG."""
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif">\n'
            f'<rect width="{width}" height="{height}" fill="{BACK}"/>\n{drawing}\n</svg>\n')


def banner() -> str:
    """The icon, the name, and what the pack is for; 21 to 9."""
    return picture(1260, 540, f"""<g transform="translate(60 70)">{NODE}</g>
<text x="490" y="250" font-size="110" font-weight="bold" fill="#ffffff">Hybrid TRT</text>
<text x="494" y="330" font-size="44" fill="{GREEN}">The same picture, sooner</text>
<text x="494" y="390" font-size="34" fill="{QUIET}">Z-Image, Flux, Qwen, Wan, SDXL in ComfyUI</text>""")


def main() -> None:
    """Write both as PNG."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1300, "height": 600})
        for name, drawing in (("icon", picture(400, 400, NODE)), ("banner", banner())):
            page.set_content(f"<style>body {{ margin: 0 }}</style>{drawing}")
            page.locator("svg").screenshot(path=IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
