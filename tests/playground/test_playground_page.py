"""The playground's page, driven in headless Chromium where one is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest

from tests.core.sampling import one_in

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not (CHROMIUM and DRIVER):
    pytest.skip("no chromium and chromedriver on PATH", allow_module_level=True)
pytest.importorskip("uvicorn", reason="needs the extra [playground]")

webdriver = pytest.importorskip("selenium.webdriver", reason="drives the page by selenium")
Service = import_module("selenium.webdriver.chrome.service").Service
Keys = import_module("selenium.webdriver.common.keys").Keys

ROOT = Path(__file__).resolve().parents[2]
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)
SERVE = "from fkjit.cli.app import app; app(['playground', '--no-browser', '--folder', {!r}])"
IDLE = "'ready' in document.body.dataset && !document.body.classList.contains('working')"
NEW = (
    '#kernel=new_kernel.plain&arch=sm_90a&params={"dtype":"fp32","threads":64,"negated":true}'
    "&view=code"
)
FLASH = (
    "#kernel=attention.flash&arch=sm_90a&view=code&panel=banks&line={}"
    '&params={{"dtype":"fp16","head_dim":64,"head_dim_v":64,"block":16,"aligned":true}}'
)


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a server as a person starts it."""
    folder = tmp_path_factory.mktemp("page") / "kernels"
    command = [sys.executable, "-c", SERVE.format(str(folder))]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
    assert server.stdout is not None
    yield server.stdout.readline().strip()
    server.terminate()
    server.wait(10)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One browser for all tests, with a profile of its own."""
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    profile = tmp_path_factory.mktemp("profile")
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}", "--window-size=1280,800"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield made
    made.quit()


class Page:
    """What a person does with the page."""

    def __init__(self, browser, address):
        self.browser, self.address = browser, address

    def open(self, state: str) -> None:
        self.browser.get("about:blank")
        self.browser.get(self.address + state)
        self.wait(IDLE)

    def js(self, text: str):
        return self.browser.execute_script(f"return {text}")

    def wait(self, condition: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.js(condition):
            assert time.monotonic() < end, f"{condition}: {self.text('body')[:2000]}"
            time.sleep(0.03)

    def text(self, selector: str) -> str:
        return self.js(f"document.querySelector({selector!r}).innerText")

    def click(self, selector: str) -> None:
        self.browser.find_element("css selector", selector).click()

    def keys(self, *keys: str) -> None:
        webdriver.ActionChains(self.browser).send_keys(*keys).perform()

    def hold(self, key: str, *keys: str) -> None:
        chain = webdriver.ActionChains(self.browser).key_down(key)
        chain.send_keys(*keys).key_up(key).perform()

    def focus(self) -> str:
        return self.js("document.activeElement.id || document.activeElement.className")


@pytest.fixture
def page(browser, address):
    made = Page(browser, address)
    yield made
    severe = [one for one in browser.get_log("browser") if one["level"] == "SEVERE"]
    assert not severe  # the policy of contents refuses nothing, no script fails
    loaded = made.js("performance.getEntriesByType('resource').map((one) => one.name)")
    assert [name for name in loaded if not name.startswith(address)] == []


def test_by_keyboard_alone(page):
    """Into the editor, a mistake, its mark, back again, out of the editor, through the tabs."""
    page.open(NEW)
    assert "compiled and checked" in page.text("#status")
    page.keys(Keys.TAB)
    assert page.js("document.activeElement.className") == "skip"
    page.keys(Keys.ENTER, Keys.TAB)
    assert "cm-content" in page.focus()
    page.hold(Keys.CONTROL, Keys.END)
    page.keys("oops")
    page.wait(f"{IDLE} && document.querySelector('#marks li') !== null")
    assert "compile error" in page.text("#marks") and page.text("#marks").count("line 22") == 1
    assert page.js("document.querySelectorAll('.cm-lint-marker-error').length") == 1
    assert "error" in page.text("#status") and not page.js(
        "document.getElementById('edited').hidden"
    )
    page.hold(Keys.CONTROL, "z")
    page.wait(f"{IDLE} && document.querySelector('#marks li') === null")
    page.wait("document.getElementById('edited').hidden")
    page.keys(Keys.ESCAPE, Keys.TAB)
    assert "cm-content" not in page.focus()
    while page.js("document.activeElement.dataset.view") != "code":
        page.keys(Keys.TAB)
    page.keys(Keys.ARROW_LEFT)
    assert page.js("document.activeElement.dataset.view") == "ptx"
    assert "ld.param" in page.text("#code")
    while page.js("document.activeElement.id") != "split":
        page.keys(Keys.TAB)
    before = page.js("document.getElementById('panel').clientHeight")
    page.keys(Keys.ARROW_UP, Keys.ARROW_UP)
    assert page.js("document.getElementById('panel').clientHeight") > before


def test_lines_are_linked_both_ways(page):
    page.open(NEW)
    lines = page.js(
        "[...document.querySelectorAll('#template .cm-line')].map((l) => l.textContent)"
    )
    store = next(n for n, text in enumerate(lines) if "y[i] = " in text)
    page.browser.find_elements("css selector", "#template .cm-line")[store].click()
    page.wait("document.querySelector('#code .linked') !== null")
    linked = page.js("[...document.querySelectorAll('#code .linked')].map((l) => l.textContent)")
    assert any("STG" in text for text in linked)
    load = page.js("[...document.querySelectorAll('#code .cm-line')].findIndex((l) => "
                   "l.textContent.includes('LDG'))")  # fmt: skip
    page.browser.find_elements("css selector", "#code .cm-line")[load].click()
    page.wait("document.querySelector('#template .linked')?.textContent.includes('x[i]')")
    assert page.text("#place").endswith(f"new_kernel.cu:{1 + linked_at(page)}")


def linked_at(page: Page) -> int:
    """The number, from 0, of the template's linked line."""
    return page.js(
        "[...document.querySelectorAll('#template .cm-line')]"
        ".findIndex((l) => l.classList.contains('linked'))"
    )


def test_an_edited_state_is_in_the_address(page):
    page.open(NEW)
    page.click("#template .cm-line")
    page.hold(Keys.CONTROL, Keys.END)
    page.keys("// mine")
    page.wait(f"{IDLE} && location.hash.includes('text=')")
    address = page.js("location.hash")
    page.open(address)
    page.hold(Keys.CONTROL, Keys.END)
    assert "// mine" in page.text("#template") and not page.js(
        "document.getElementById('edited').hidden"
    )
    page.click("#compare")
    page.wait(f"{IDLE} && document.querySelector('table.compare') !== null")
    assert "registers" in page.text("#panel")
    page.click("[data-view=diff]")
    page.wait("document.querySelector('#code').innerText.includes('-// mine')")


def test_pictures_of_banks_and_fragments(page):
    template = (ROOT / "kernels_cu/attention/flash.cu").read_text().splitlines()
    (line,) = (at for at, text in enumerate(template, 1) if "ldmatrix_x4(q_fragments" in text)
    page.open(FLASH.format(line))
    page.wait("document.querySelectorAll('figure.banks').length >= 2")
    assert "8.00" not in page.text("#panel h3") and "Without the swizzle" in page.text("#panel")
    counts = page.js("[...document.querySelectorAll('figure.banks')].slice(0, 2)"
                     ".map((f) => f.querySelectorAll('.conflict').length)")  # fmt: skip
    assert counts[0] == 0 and counts[1] > 0
    page.click("[data-panel=fragments]")
    page.wait("document.querySelectorAll('figure.fragment').length === 4")
    assert page.js("document.querySelectorAll('figure.fragment g[data-lane]').length") == 4 * 64


@one_in(2)
@pytest.mark.parametrize("width", [1280, 800])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read(page, width, scheme):
    command = page.browser.execute_cdp_cmd
    command("Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False})  # fmt: skip
    command("Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]})  # fmt: skip
    page.open(NEW)
    assert page.js("document.documentElement.scrollWidth") <= width
    for selector in ("h1", ".hint", "#status", ".facts dt", "button.quiet", "#views button"):
        assert contrast(page, selector) >= 4.5, selector
    command("Emulation.clearDeviceMetricsOverride", {})
    command("Emulation.setEmulatedMedia", {"features": []})


def contrast(page: Page, selector: str) -> float:
    """Of a text with the nearest background behind it; WCAG 2.2, 1.4.3."""
    colours = page.js(
        "(() => { let e = document.querySelector(" + repr(selector) + ");"
        " const own = getComputedStyle(e).color; let back;"
        " do { back = getComputedStyle(e).backgroundColor; e = e.parentElement; }"
        " while (e && back.endsWith(', 0)')); return [own, back]; })()"
    )
    light, dark = sorted((luminance(colour) for colour in colours), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
