"""The page on a tiny target that tests can hold back, and a real browser."""

import json
import os
import shutil
import threading
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from tiny import tiny_assistant, tiny_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast


os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
gradio = pytest.importorskip("gradio", reason='the page needs gradio: pip install "lilicorr_hf[demo]"')
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Of one wait; cores may be shared with anything.
PATIENCE_MS = 120_000


class Gate:
    """A hook that lets the target make as many passes as a test allows."""

    def __init__(self):
        self._condition = threading.Condition()
        self.open()

    def __call__(self, *_):
        with self._condition:
            self._condition.wait_for(lambda: self._allowed > 0)
            self._allowed -= 1
            self.passes += 1

    def open(self):
        self.close()
        self.let(10**9)

    def close(self):
        with self._condition:
            self._allowed, self.passes = 0, 0

    def let(self, passes):
        with self._condition:
            self._allowed += passes
            self._condition.notify_all()


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A target with a tokenizer of 64 words, and an assistant."""
    folder = tmp_path_factory.mktemp("pair")
    tiny_target("llama").save_pretrained(folder / "target")
    tiny_assistant(1).save_pretrained(folder / "assistant")
    words = {"<unk>": 0} | {f"w{i}": i for i in range(1, 64)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder / "target")
    return folder


@pytest.fixture(scope="session")
def session_gate():
    return Gate()


@pytest.fixture
def gate(session_gate):
    yield session_gate
    session_gate.open()


@pytest.fixture(scope="session")
def url(folder, session_gate):
    """Address of the page, served from this process."""
    from lilicorr_hf.demo import live
    from lilicorr_hf.demo.page import LOOK, build

    load_target = live.load_target

    def gated(*args, **kwargs):
        target, tokenizer = load_target(*args, **kwargs)
        target.register_forward_pre_hook(session_gate)
        return target, tokenizer

    live.load_target = gated
    page = build(str(folder / "target"), str(folder / "assistant"))
    _, address, _ = page.launch(prevent_thread_lock=True, quiet=True, inbrowser=False, **LOOK)
    yield address
    page.close()
    live.load_target = load_target


@pytest.fixture(scope="session")
def context():
    """One browser profile: its cache makes every page but the first load fast. Each page is a visitor of its own."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine; on Debian: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    sync_api.expect.set_options(timeout=PATIENCE_MS)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context()
        context.set_default_timeout(PATIENCE_MS)
        yield context
        browser.close()


@pytest.fixture
def visit(context, url, example):
    """Opens the page; in the end no console error and no request to another host may have been."""
    pages, complaints = [], []

    def visit(query="__theme=light", width=1280, **media):
        page = context.new_page()
        pages.append(page)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(**media)
        page.on("console", lambda message: message.type == "error" and complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: is_foreign(request.url, url) and complaints.append(request.url))
        page.goto(f"{url}?{query}")
        page.locator("#lattice .chart").wait_for()
        # The page opens on its first example, and shows what the address asks for a moment later.
        for name in parse_qs(query).get("example", []):
            page.get_by_text(example(name)["title"]).first.wait_for()
        return page

    yield visit
    for page in pages:
        page.close()
    assert complaints == []


def is_foreign(address: str, url: str) -> bool:
    return not address.startswith((url, url.replace("http", "ws", 1), "data:", "blob:"))


@pytest.fixture(scope="session")
def example():
    """The recorded examples as JSON has them."""
    from lilicorr_hf.demo.page import EXAMPLES

    return lambda name: json.loads((EXAMPLES / f"{name}.json").read_text())
