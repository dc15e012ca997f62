"""The dashboard as its readers meet it."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.dashboard.conftest import ADMIN_KEY, REFUSAL, Opened, Stack
from tests.gateway.end_to_end.processes import Gateway, Process, chat

pytestmark = pytest.mark.browser

Visit = Callable[..., Opened]

LOAD_MS_MAX = 1000
FONT_PX_MIN = 12
SMALL_TEXT = """
[...document.querySelectorAll("body *")]
  .filter((element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()))
  .filter((element) => parseFloat(getComputedStyle(element).fontSize) < 12 && element.checkVisibility())
  .map((element) => `${element.tagName}.${element.className}: ${element.textContent.slice(0, 40)}`)
"""
PROMPT = "You are careful and brief. " * 40


def ask(stack: Stack, text: str, **fields: object) -> httpx.Response:
    answer: httpx.Response = stack.gateway.post(chat(PROMPT + text, **fields))
    assert answer.status_code == 200, answer.text
    return answer


def open_worker(opened: Opened, worker: str) -> None:
    opened.page.click(f"#tiles button[aria-label^='{worker}']")
    opened.page.wait_for_selector("#worker-dialog[open]")


def test_it_loads_within_a_second(stack: Stack, visit: Visit) -> None:
    """From the address to numbers of the live gateway."""
    assert visit(stack.gateway.url).live_ms() < LOAD_MS_MAX


def test_it_asks_for_nothing_but_its_own_gateway(stack: Stack, visit: Visit) -> None:
    opened = visit(f"{stack.gateway.url}/dashboard")
    opened.wait_live()
    assert len(opened.asked) > 10
    assert [url for url in opened.asked if not url.startswith(f"{stack.gateway.url}/")] == []


def test_live_values_change_under_load(stack: Stack, visit: Visit) -> None:
    opened = visit(stack.gateway.url)
    opened.wait_live()
    before = opened.text("#numbers div:first-child .note")
    for number in range(6):
        ask(stack, f"question {number}", stream=True)
    opened.wait(
        "(before) => document.querySelector('#numbers div:first-child .note').textContent !== before", argument=before
    )
    opened.wait("document.querySelectorAll('#receipt-list li').length >= 6")
    newest = stack.gateway.status()["receipts"][0]
    opened.wait("(words) => document.querySelector('#receipt-list .words').textContent === words", newest["words"])
    assert " tokens cached, starts in " in newest["words"]
    opened.wait("document.querySelector('#prefix-tree li b')?.textContent.endsWith('tokens')")
    opened.wait("document.querySelector('.chart svg').getAttribute('aria-label').includes('%')")
    opened.wait("document.querySelector('#shadows th[scope=row]')?.textContent === 'least-loaded'")


def test_a_worker_is_drained_and_taken_back(stack: Stack, visit: Visit) -> None:
    worker = stack.fleet.names[0]
    opened = visit(stack.gateway.url)
    opened.wait_live()
    for draining, button in ((True, "Drain"), (False, "Undrain")):
        if not opened.page.locator("#worker-dialog[open]").count():
            open_worker(opened, worker)
        opened.wait("(text) => document.getElementById('worker-drain').textContent === text", button)
        opened.page.click("#worker-drain")
        opened.confirm()
        assert worker in opened.notice("done")
        assert stack.gateway.worker(worker)["draining"] is draining
        state = "draining" if draining else "takes requests"
        opened.wait("(text) => document.querySelector('#worker-dialog .state').textContent.includes(text)", state)


def test_what_is_not_confirmed_is_not_done(stack: Stack, visit: Visit) -> None:
    opened = visit(stack.gateway.url)
    opened.wait_live()
    open_worker(opened, stack.fleet.names[1])
    opened.page.click("#worker-drain")
    opened.page.wait_for_selector("#confirm-dialog[open]")
    opened.page.keyboard.press("Escape")
    opened.page.wait_for_selector("#confirm-dialog:not([open])", state="attached")
    assert not stack.gateway.worker(stack.fleet.names[1])["draining"]
    assert opened.page.locator(".notice").count() == 0


def test_a_worker_is_warmed(stack: Stack, visit: Visit) -> None:
    for _ in range(3):
        ask(stack, "the same")
    opened = visit(stack.gateway.url)
    opened.wait_live()
    open_worker(opened, stack.fleet.names[2])
    opened.page.click("#worker-warm")
    opened.confirm()
    assert "prefixes warmed" in opened.notice("done")


def test_a_session_is_pinned_and_let_go(stack: Stack, visit: Visit) -> None:
    worker = stack.fleet.names[1]
    opened = visit(stack.gateway.url)
    opened.wait_live()
    opened.page.fill("#pin-value", "conversation-7")
    opened.page.select_option("#pin-worker", worker)
    opened.page.click("#pin-form button[type=submit]")
    opened.confirm()
    assert "is pinned to" in opened.notice("done")
    answer = stack.gateway.post(chat("pinned"), {"x-ropeway-session": "conversation-7"})
    assert answer.headers["x-ropeway-worker"] == worker
    opened.page.click("#pin-list button")
    opened.confirm()
    opened.notice("done")
    assert stack.gateway.operator.get("/admin/pins").json() == {"pins": []}


def test_a_policy_is_tried_then_applied(stack: Stack, visit: Visit) -> None:
    ask(stack, "to have a decision")
    opened = visit(stack.gateway.url)
    opened.wait_live()
    for policy in ("least-loaded", "kv-aware"):
        opened.wait("document.getElementById('policy-select').options.length > 3")
        opened.page.select_option("#policy-select", policy)
        opened.page.click("#policy-try")
        assert "decisions taken again" in opened.notice("done")
        assert "would go elsewhere" in opened.text("#policy-result")
        opened.page.click("#policy-form button[type=submit]")
        opened.confirm()
        assert f"{policy} decides" in opened.notice("done")
        assert stack.gateway.status()["policy"] == policy
        opened.wait("(policy) => document.getElementById('fact-policy').textContent === policy", policy)


def test_weights_are_applied(stack: Stack, visit: Visit) -> None:
    opened = visit(stack.gateway.url)
    opened.wait_live()
    opened.page.click("#weight-add")
    row = opened.page.locator("#weight-rows .weight").last
    row.locator("input").first.fill("acme")
    row.locator("input").last.fill("3")
    opened.page.click("#policy-form button[type=submit]")
    opened.confirm()
    opened.notice("done")
    assert stack.gateway.operator.get("/admin/policy").json()["weights"] == {"acme": 3.0}


def test_without_the_key_nothing_is_shown(stack: Stack, visit: Visit) -> None:
    opened = visit(stack.gateway.url, key=None, may_say=REFUSAL)
    opened.page.wait_for_selector("#key-dialog[open]")
    assert opened.text("#link") == "key needed"
    assert opened.page.locator("#tiles li").count() == 0
    opened.page.fill("#key-input", "not the key, but long")
    opened.page.keyboard.press("Enter")
    opened.wait("document.getElementById('key-why').textContent.includes('does not know that key')")
    opened.page.fill("#key-input", ADMIN_KEY)
    opened.page.keyboard.press("Enter")
    opened.wait_live()
    assert [url for url in opened.asked if ADMIN_KEY in url] == []


def test_every_action_is_refused_without_the_key(stack: Stack, visit: Visit) -> None:
    opened = visit(stack.gateway.url, may_say=REFUSAL)
    opened.wait_live()
    opened.wait("document.getElementById('policy-select').options.length > 3")
    opened.page.evaluate("sessionStorage.clear()")
    before = stack.gateway.status()["policy"]

    def refused(press: str, confirmed: bool = True) -> None:
        opened.page.click(press)
        if confirmed:
            opened.confirm()
        assert "refused" in opened.notice("failed")
        opened.page.wait_for_selector("#key-dialog[open]")
        opened.page.click("#key-cancel")

    open_worker(opened, stack.fleet.names[0])
    refused("#worker-drain")
    refused("#worker-warm")
    opened.page.keyboard.press("Escape")
    opened.page.select_option("#policy-select", "round-robin")
    refused("#policy-try", confirmed=False)
    refused("#policy-form button[type=submit]")
    opened.page.fill("#pin-value", "nobody")
    refused("#pin-form button[type=submit]")
    assert not stack.gateway.worker(stack.fleet.names[0])["draining"]
    assert stack.gateway.status()["policy"] == before
    assert stack.gateway.operator.get("/admin/pins").json() == {"pins": []}


def test_the_playground_shows_each_answers_receipt(stack: Stack, visit: Visit) -> None:
    opened = visit(stack.gateway.url)
    opened.wait_live()
    opened.wait("document.getElementById('chat-model').options.length > 0")
    opened.page.fill("#chat-text", PROMPT)
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_selector("#chat .answered .receipt")
    assert opened.text("#chat .answered .said")
    first = opened.page.locator("#chat .answered .receipt").first
    shown = first.locator("dd").first.inner_text()
    assert (
        stack.gateway.operator.get(f"/status/receipts/{shown}").json()["words"] == first.locator(".words").inner_text()
    )
    opened.page.fill("#chat-text", "and another")
    opened.page.click("#chat-send")
    opened.wait("document.querySelectorAll('#chat .answered .receipt').length === 2")


def test_it_can_be_used_by_keyboard_alone(stack: Stack, visit: Visit) -> None:
    opened = visit(stack.gateway.url)
    opened.wait_live()
    opened.page.keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.className") == "skip"
    opened.page.focus("#tiles button")
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_selector("#worker-dialog[open]")
    opened.page.keyboard.press("Escape")
    assert opened.page.locator("#worker-dialog[open]").count() == 0
    assert opened.page.evaluate("document.activeElement.className") == "tile"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_is_readable(stack: Stack, visit: Visit, width: int, scheme: str) -> None:
    ask(stack, "one", stream=True)
    ask(stack, "two", stream=True)
    opened = visit(stack.gateway.url, width=width, color_scheme=scheme)
    opened.wait_live()
    opened.wait("document.querySelector('#prefix-tree li') !== null")
    opened.page.click("#receipt-list summary >> nth=0")
    assert opened.page.evaluate("document.documentElement.scrollWidth") == width
    assert opened.page.evaluate(SMALL_TEXT) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violation(stack: Stack, visit: Visit, scheme: str) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe is not installed: make test-dashboard"
    )
    ask(stack, "one", stream=True)
    ask(stack, "two", stream=True)
    # The page's own policy lets no other script in.
    opened = visit(stack.gateway.url, color_scheme=scheme, bypass_csp=True)
    opened.wait_live()
    opened.wait("document.querySelector('#prefix-tree li') !== null")
    opened.page.click("#receipt-list summary >> nth=0")
    found = [violations(axe, opened)]
    open_worker(opened, stack.fleet.names[0])
    found.append(violations(axe, opened))
    opened.page.click("#worker-drain")
    found.append(violations(axe, opened))
    assert found == [[], [], []]


def violations(axe: object, opened: Opened) -> list[str]:
    response = axe.Axe().run(opened.page).response  # type: ignore[attr-defined]
    assert len(response["passes"]) > 10
    return [
        f"{violation['id']}: {node['html'][:120]} ({node.get('failureSummary', '')[:200]})"
        for violation in response["violations"]
        if violation["impact"] in ("serious", "critical")
        for node in violation["nodes"]
    ]


def test_a_gateway_that_goes_is_missed_and_found_again(stack: Stack, visit: Visit, directory: Path) -> None:
    with Gateway(directory, stack.fleet.urls, name="mortal") as gateway:
        opened = visit(gateway.url, key=None, may_say="net::ERR_")
        opened.wait_live()
        gateway.kill()
        opened.page.wait_for_selector("#link[data-state=lost]")
        with Process("reborn", ["serve", "-c", str(directory / "mortal.yaml")], directory):
            opened.wait_live()


def test_receipts_stand_still_while_they_are_pointed_at(stack: Stack, visit: Visit) -> None:
    ask(stack, "first", stream=True)
    opened = visit(stack.gateway.url)
    opened.wait_live()
    opened.page.hover("#receipt-list li >> nth=0")
    opened.wait("document.getElementById('receipts-note').textContent.startsWith('held')")
    before = opened.page.locator("#receipt-list .words").all_inner_texts()
    ask(stack, "second", stream=True)
    newest = stack.gateway.status()["receipts"][0]["words"]
    opened.wait("document.querySelector('#numbers .note').textContent.endsWith('in all')")
    assert opened.page.locator("#receipt-list .words").all_inner_texts()[0] == before[0] != newest
    opened.page.mouse.move(2, 2)
    opened.wait("(words) => document.querySelector('#receipt-list .words').textContent === words", newest)
