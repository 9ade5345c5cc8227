"""The dashboard as people use it: a real browser against a really running platform."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import Select, WebDriverWait

from browser.conftest import HOSTILE, History

pytestmark = [pytest.mark.browser, pytest.mark.serve]
WAIT_S = 60.0


def until(browser: WebDriver, condition: Callable[[], object], what: str) -> None:
    """Wait, bounded; what is redrawn meanwhile is looked up again."""
    waiter = WebDriverWait(browser, WAIT_S, 0.1, ignored_exceptions=[StaleElementReferenceException])
    waiter.until(lambda _: condition(), what)


def run(browser: WebDriver, script: str, *values: object) -> object:
    return browser.execute_script(script, *values)  # type: ignore[no-untyped-call]


def text(browser: WebDriver, selector: str) -> str:
    """The visible text of all that a selector finds, read in one go because pages redraw themselves."""
    script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText).join('\\n')"
    return str(run(browser, script, selector))


def shows(browser: WebDriver, selector: str, *parts: str) -> None:
    until(browser, lambda: all(part in text(browser, selector) for part in parts), f"{selector} shows {parts}")


def click(browser: WebDriver, selector: str) -> None:
    def clicked() -> bool:
        found = browser.find_elements(By.CSS_SELECTOR, selector)
        if found:
            found[0].click()
        return bool(found)

    until(browser, clicked, f"{selector} can be clicked")


def sign_in(browser: WebDriver, history: History, who: str) -> None:
    browser.get(f"{history.platform.url}/dashboard")
    browser.find_element(By.ID, "key").send_keys(history.platform.keys[who])
    click(browser, "form button")
    shows(browser, "#title", "Overview")


def cost_rows(browser: WebDriver) -> dict[str, list[str]]:
    """The cost table: tenant -> cells."""
    script = (
        "return [...document.querySelectorAll('#cost-table tbody tr')]"
        ".map((row) => [...row.children].map((cell) => cell.innerText))"
    )
    rows = run(browser, script)
    assert isinstance(rows, list)
    return {row[0]: row[1:] for row in rows}


def open_view(browser: WebDriver, name: str, title: str) -> None:
    click(browser, f'nav a[data-view="{name}"]')
    shows(browser, "#title", title)


def test_an_admin_sees_the_costs_of_real_requests_and_can_filter(browser: WebDriver, history: History) -> None:
    sign_in(browser, history, "admin")
    shows(browser, ".tiles", "5 answered", "1 answers")
    open_view(browser, "cost", "Cost")
    until(browser, lambda: {"acme", "globex"} <= cost_rows(browser).keys(), "both tenants are listed")
    rows = cost_rows(browser)
    assert (rows["acme"][0], rows["globex"][0]) == ("3", "2")
    used = httpx.get(
        f"{history.platform.url}/v1/usage",
        headers={"authorization": f"Bearer {history.platform.keys['globex']}"},
        timeout=30.0,
    ).json()
    shown = float(rows["globex"][6].lstrip("$"))
    assert used["totals"]["cost_usd"] > 0
    assert shown == pytest.approx(used["totals"]["cost_usd"], abs=10 ** -len(rows["globex"][6].partition(".")[2]))
    Select(browser.find_element(By.ID, "pick-tenant")).select_by_value("globex")
    until(browser, lambda: list(cost_rows(browser)) == ["globex"], "only globex is listed")
    click(browser, '[data-range="1h"]')
    shows(browser, '[data-range="1h"][aria-pressed="true"]', "1 h")
    linked = "return document.getElementById('csv')?.search"
    until(browser, lambda: run(browser, linked) == "?range=1h&tenant=globex", "the CSV is of what is shown")
    assert browser.find_elements(By.CSS_SELECTOR, ".plot svg rect"), "the charts are empty"


def test_a_downgrade_leads_to_the_decision_behind_it(browser: WebDriver, history: History) -> None:
    sign_in(browser, history, "admin")
    open_view(browser, "decisions", "Decisions")
    Select(browser.find_element(By.ID, "pick-kind")).select_by_value("downgrade")
    until(browser, lambda: text(browser, ".log .pill") == "downgrade", "one downgrade is listed")
    click(browser, ".log .more")
    shows(browser, ".detail", "large/fake-large", "small/fake-small", "Pressure at that moment")
    rows = "return [...document.querySelectorAll('.detail tr, #view tr')].map(row => row.innerText)"
    assert any(row.split() == ["large", "0", "override", "small_tier", "1.1"] for row in run(browser, rows))
    click(browser, ".log .id a")
    shows(browser, "#view", history.degraded_id, "small/fake-small was given at rung 4", "Audit", HOSTILE)
    assert run(browser, "return window.hacked === undefined")


BROKEN_WORDS = """
document.querySelector("#view").style.width = "780px";
const parts = [...document.querySelectorAll(".step b")].flatMap((name) => [...name.childNodes]);
const lines = (part) => { const range = document.createRange(); range.selectNode(part); return range.getClientRects().length; };
return parts.filter((part) => part.nodeType === 3 && lines(part) > 1).map((part) => part.data);
"""


def test_the_live_view_moves_and_shows_the_ladder(browser: WebDriver, history: History) -> None:
    sign_in(browser, history, "admin")
    open_view(browser, "live", "Live")
    shows(browser, ".stairs", "full", "small_tier", "defer", "interactive")
    shows(browser, "#view", "Pool large", "fake-small", "ready")
    assert run(browser, BROKEN_WORDS) == [], "names of rungs break behind an underscore, if at all"
    before = text(browser, "#stamp")
    until(browser, lambda: text(browser, "#stamp") not in ("", before), "the page reads again by itself")


def test_an_admin_can_verify_the_audit_chain(browser: WebDriver, history: History) -> None:
    sign_in(browser, history, "admin")
    open_view(browser, "audit", "Audit")
    click(browser, "#verify")
    shows(browser, ".verdict", "The chain holds", "entries read in")


def test_a_tenant_sees_only_itself(browser: WebDriver, history: History) -> None:
    sign_in(browser, history, "globex")
    shows(browser, ".tiles", "2 answered")
    assert not browser.find_elements(By.ID, "pick-tenant")
    assert not browser.find_elements(By.CSS_SELECTOR, 'nav a[data-view="audit"]')
    open_view(browser, "cost", "Cost")
    until(browser, lambda: list(cost_rows(browser)) == ["globex"], "only globex is listed")
    open_view(browser, "decisions", "Decisions")
    shows(browser, "#view", "Nothing is recorded here")
    assert "acme" not in text(browser, "body")
    asked = run(browser, "return fetch('/dashboard/data/usage?tenant=acme').then((answer) => answer.text())")
    assert "globex" in str(asked) and "acme" not in str(asked)


def test_signing_out_ends_it(browser: WebDriver, history: History) -> None:
    sign_in(browser, history, "acme")
    key = history.platform.keys["acme"]
    assert key not in browser.page_source
    (cookie,) = browser.get_cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/dashboard")
    assert key not in cookie["value"]
    kept = "return [localStorage.length, sessionStorage.length, document.cookie, location.href]"
    assert run(browser, kept) == [0, 0, "", f"{history.platform.url}/dashboard"]
    click(browser, "#out")
    shows(browser, "h1", "Sign in")
    assert browser.get_cookies() == []


def test_a_wrong_key_is_told_so(browser: WebDriver, history: History) -> None:
    browser.get(f"{history.platform.url}/dashboard")
    browser.find_element(By.ID, "key").send_keys("rw_acme_nobody")
    click(browser, "form button")
    shows(browser, "#notice", "This API key is not known here")
