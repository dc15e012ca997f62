"""A real Chromium before a real gateway; without one, or without playwright, these tests are skipped and say so."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.gateway.end_to_end.logs import pytest_runtest_makereport as pytest_runtest_makereport
from tests.gateway.end_to_end.processes import Fleet, Gateway, eventually, new_keyring

ADMIN_KEY = "open-sesame-open-sesame"
LOADS = 5
REFUSAL = "the server responded with a status of 401"


class Stack(NamedTuple):
    fleet: Fleet
    gateway: Gateway


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboard")


@pytest.fixture(scope="session")
def stack(directory: Path) -> Iterator[Stack]:
    keyring, key_file = new_keyring(directory), directory / "admin.key"
    key_file.write_text(ADMIN_KEY)
    config = {
        "keyring": str(keyring),
        "admin": {"key_file": str(key_file)},
        "routing": {"shadow": ["least-loaded"]},
    }
    with (
        Fleet(directory, "--speed", "20", "--keyring", str(keyring), count=3) as fleet,
        Gateway(directory, fleet.urls, config, admin_key=ADMIN_KEY) as gateway,
    ):
        yield Stack(fleet, gateway)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: make test-dashboard")
    path = os.environ.get("ROPEWAY_CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """One page, all that it said on its console and all that it asked for."""

    def __init__(self, page: Any, url: str, may_say: str) -> None:
        self.page = page
        self.may_say = may_say
        self.url = url
        self.said: list[str] = []
        self.asked: list[str] = []
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(url)

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).inner_text())

    def wait_live(self) -> None:
        self.page.wait_for_selector("#link[data-state=live]")
        self.page.wait_for_selector("#tiles li")

    def live_ms(self) -> float:
        """From the address to the gateway's numbers, the best of a few: the machine may be busy with others."""
        taken = []
        for _ in range(LOADS):
            self.page.goto(self.url)
            self.wait_live()
            taken.append(float(self.page.evaluate("performance.getEntriesByName('live')[0].startTime")))
        return min(taken)

    def wait(self, script: str, argument: Any = None) -> None:
        """Until a JavaScript expression is true. Asked from here: the page's policy forbids to evaluate it there."""
        eventually(lambda: self.page.evaluate(script, argument), script, 20.0)

    def confirm(self) -> None:
        self.page.wait_for_selector("#confirm-dialog[open]")
        self.page.click("#confirm-yes")

    def notice(self, kind: str) -> str:
        """The newest notice of a kind, which goes away then."""
        notice = self.page.locator(f".notice.{kind}").last
        notice.wait_for()
        text = str(notice.locator("span").inner_text())
        self.page.evaluate("document.querySelectorAll('.notice').forEach((notice) => notice.remove())")
        return text


@pytest.fixture
def visit(chromium: Any, directory: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Opened]]:
    """Opens pages. None may say anything on its console but what a test is about."""
    contexts: list[Any] = []
    opened: list[Opened] = []

    def visit(
        url: str, key: str | None = ADMIN_KEY, width: int = 1280, may_say: str = "nothing", **options: Any
    ) -> Opened:
        context = chromium.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        context.set_default_timeout(20_000)
        if key is not None:
            context.add_init_script(f"sessionStorage.setItem('ropeway-admin-key', '{key}')")
        opened.append(Opened(context.new_page(), url, may_say))
        return opened[-1]

    yield visit
    for page in opened:
        page.page.screenshot(path=directory / f"{request.node.name}.png", full_page=True)
    for context in contexts:
        context.close()
    assert [line for page in opened for line in page.said if page.may_say not in line] == []
