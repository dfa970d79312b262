"""The report in a real browser: nothing on the console, every picture drawn, and no line wider than a phone."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hrmlm.studies.collect import collect
from hrmlm.studies.report import write

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --allow-file-access-from-files --enable-logging=stderr"
)
PROBE = """<script>addEventListener('load',()=>{const wide=e=>e.getBoundingClientRect().right>innerWidth+1;
const drawn=[...document.querySelectorAll('svg')].map(e=>e.getBBox().width>100&&e.querySelectorAll('path').length>5);
document.title=JSON.stringify({width:innerWidth,scroll:document.documentElement.scrollWidth,drawn,
images:document.images.length,wide:[...document.querySelectorAll('body *')].filter(wide).map(e=>e.tagName),
rows:[...document.querySelectorAll('tbody tr')].map(e=>e.getBoundingClientRect().height),
ink:getComputedStyle(document.body).color,page:getComputedStyle(document.body).backgroundColor})})</script>"""
# A window of a headless browser is at least 500 pixels wide; a frame is as wide as it is told to be.
FRAME = """<body><iframe src="page.html" width={width} height=900 style="border:0"></iframe><script>
addEventListener('load',()=>setTimeout(()=>document.title=document.querySelector('iframe').contentDocument.title,50))
</script></body>"""

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")


@pytest.fixture(scope="module")
def page(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    text = write(collect(finished), folder)[0].read_text("utf-8")
    assert text.count("</body>") == 1
    (folder / "page.html").write_text(text.replace("</body>", f"{PROBE}</body>"), "utf-8")
    return folder


def look(folder: Path, width: int, *flags: str) -> tuple[dict, str]:
    """What the page measured of itself in a frame of this width, and what the browser wrote on its console."""
    (folder / f"frame-{width}.html").write_text(FRAME.format(width=width), "utf-8")
    command = [str(BROWSER), *FLAGS.split(), f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", *flags]
    done = subprocess.run(
        [*command, "--virtual-time-budget=3000", "--dump-dom", f"file://{folder}/frame-{width}.html"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    console = "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return json.loads(found.group(1)), console


@pytest.mark.parametrize("width", [390, 800, 920, 1200])
def test_page_fits_and_is_drawn(page: Path, width: int) -> None:
    seen, console = look(page, width)
    assert seen["width"] == width
    assert console == ""
    assert seen["scroll"] <= width
    assert seen["wide"] == []
    assert len(seen["drawn"]) >= 4
    assert all(seen["drawn"])
    assert seen["images"] == 0, "pictures are part of the page"
    assert all(height > 0 for height in seen["rows"])


def test_page_follows_the_colours_that_the_reader_asked_for(page: Path) -> None:
    light, _ = look(page, 390, "--blink-settings=preferredColorScheme=1")
    dark, _ = look(page, 390, "--blink-settings=preferredColorScheme=0")
    assert brightness(light["page"]) > 200 > 60 > brightness(light["ink"])
    assert brightness(dark["page"]) < 60 < 200 < brightness(dark["ink"])


def brightness(colour: str) -> float:
    """Mean of the three parts of "rgb(r, g, b)"."""
    parts = [float(part) for part in re.findall(r"[\d.]+", colour)[:3]]
    return sum(parts) / 3
