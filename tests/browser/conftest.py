"""A real browser and a really running platform with a little history: answers of two tenants, one of them downgraded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webdriver import WebDriver

from support.platform_process import PlatformProcess, running_platform

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HOSTILE = "<script>window.hacked=1</script>"
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,1000",
)


@dataclass(frozen=True)
class History:
    """What was done before anybody looks. Requests: 3 of acme, one of them downgraded, and 2 of globex."""

    platform: PlatformProcess
    degraded_id: str


def ask(platform: PlatformProcess, tenant: str, **headers: str) -> httpx.Response:
    """One answered chat request."""
    answer = httpx.post(
        f"{platform.url}/v1/chat/completions",
        json={"model": "large", "messages": [{"role": "user", "content": "count to five"}], "max_tokens": 200},
        headers={"authorization": f"Bearer {platform.keys[tenant]}", **headers},
        timeout=60.0,
    )
    assert answer.status_code == 200, answer.text
    return answer


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    with running_platform(tmp_path_factory.mktemp("browser") / "state") as platform:
        for tenant in ("acme", "acme", "globex", "globex"):
            ask(platform, tenant)
        admin = {"authorization": f"Bearer {platform.keys['admin']}"}
        rung = {"rung": "small_tier", "ttl_s": 600, "why": "to be seen"}
        assert httpx.post(f"{platform.url}/admin/ladder", json=rung, headers=admin, timeout=30.0).status_code == 200
        degraded = ask(platform, "acme", **{"x-rungway-session": HOSTILE})
        assert degraded.headers["x-rungway-degraded"] == "small_tier"
        assert httpx.delete(f"{platform.url}/admin/ladder", headers=admin, timeout=30.0).status_code == 200
        yield History(platform, degraded.headers["x-request-id"])


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[WebDriver]:
    """A fresh profile for every test. Whatever the pages write to the console fails the test, but for the 401 that a
    wrong key earns."""
    binary = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs a Chromium and its chromedriver on the PATH")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield browser
        written = [entry["message"] for entry in browser.get_log("browser")]  # type: ignore[no-untyped-call]
        assert [text for text in written if "/login" not in text or "401" not in text] == []
    finally:
        browser.quit()
