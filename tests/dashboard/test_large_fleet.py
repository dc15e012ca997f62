"""Two hundred workers that change all the time."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.dashboard.conftest import Opened
from tests.dashboard.many_workers import WORKERS
from tests.gateway.end_to_end.processes import HOST, Process, free_ports

pytestmark = pytest.mark.browser

LOAD_MS_MAX = 1000
TASK_MS_MAX = 250
LONGEST_TASK = """
new Promise((resolve) => {
  let longest = 0;
  const observer = new PerformanceObserver((list) => {
    for (const entry of list.getEntries()) longest = Math.max(longest, entry.duration);
  });
  observer.observe({ type: "longtask" });
  setTimeout(() => resolve(longest), 5000);
})
"""


class ManyWorkers(Process):
    module = "tests.dashboard.many_workers"

    def __init__(self, directory: Path) -> None:
        (port,) = free_ports(1)
        super().__init__("many-workers", [str(port)], directory)
        self.url = f"http://{HOST}:{port}"
        self.wait_for(lambda: httpx.get(f"{self.url}/healthz", trust_env=False).status_code == 200, "listening")


@pytest.fixture(scope="module")
def gateway(directory: Path) -> Iterator[ManyWorkers]:
    with ManyWorkers(directory) as gateway:
        yield gateway


def names(opened: Opened) -> list[str]:
    return [str(name) for name in opened.page.locator("#tiles .name").all_inner_texts()]


@pytest.mark.parametrize("width", [1280, 390])
def test_it_shows_them_all(gateway: ManyWorkers, visit: Callable[..., Opened], width: int) -> None:
    opened = visit(gateway.url, key=None, width=width)
    opened.wait_live()
    assert names(opened) == [f"gpu-{number:03}" for number in range(WORKERS)]
    assert opened.text("#fleet-summary") == "196 of 200 healthy, 4 draining"
    assert opened.page.locator("#attention li[data-level=bad]").count() == 4
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width


def test_it_loads_and_follows_them_without_a_halt(gateway: ManyWorkers, visit: Callable[..., Opened]) -> None:
    opened = visit(gateway.url, key=None)
    assert opened.live_ms() < LOAD_MS_MAX
    before = opened.page.locator("#tiles .load").all_inner_texts()
    assert opened.page.evaluate(LONGEST_TASK) < TASK_MS_MAX
    assert opened.page.locator("#tiles .load").all_inner_texts() != before


def test_one_is_found_among_them(gateway: ManyWorkers, visit: Callable[..., Opened]) -> None:
    opened = visit(gateway.url, key=None)
    opened.wait_live()
    opened.page.fill("#fleet-find", "gpu-137")
    assert names(opened) == ["gpu-137"]
    opened.page.fill("#fleet-find", "")
    opened.page.select_option("#fleet-show", "unwell")
    assert names(opened) == ["gpu-007", "gpu-057", "gpu-107", "gpu-157"]
