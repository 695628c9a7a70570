"""The page in a real browser, on recorded traces: what is drawn, and what answers without the server."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch

import lilicorr_hf
from lilicorr_hf.demo import BlockTrace, Trace
from lilicorr_hf.demo.terminal import visible
from lilicorr_hf.modeling.lattice_lilicorr import conditional_scores


pytestmark = pytest.mark.browser


@pytest.fixture
def expect():
    from playwright.sync_api import expect

    return expect


def chosen(page):
    """Tokens of the cells on the walk, by slot."""
    cells = page.locator(".cell.chosen")
    return sorted(
        (int(cell.get_attribute("data-slot")), cell.locator(".token").text_content()) for cell in cells.all()
    )


def reading(page, row):
    """Tokens of a reading: 0 the drafter alone, 1 the walk, 2 the target."""
    return page.evaluate(
        """(row) => {
          const chips = [...document.querySelectorAll(".chip")];
          const top = (chip) => Number(chip.getAttribute("transform").split(/[ )]/)[1]);
          const rows = [...new Set(chips.map(top))].sort((a, b) => a - b);
          return chips.filter((chip) => top(chip) === rows[row])
            .map((chip) => [chip.querySelector(".token").textContent, chip.querySelector(".caption").textContent]);
        }""",
        row,
    )


def cell(page, slot, rank):
    return page.locator(f'.cell[data-slot="{slot}"][data-rank="{rank}"]')


def step_slider(page):
    return page.locator(".slider.step input")


def walk_after(block, picks):
    """The walk as recorded up to the first pick, then greedy from the stored scores."""
    path = block["walk"][: min(picks)]
    for slot in range(len(path), len(block["candidates"])):
        if slot in picks:
            path.append(picks[slot])
            continue
        start = torch.tensor(block["start_scores"])
        after = (
            conditional_scores(torch.tensor(block["pair_scores"][slot - 1]), torch.tensor(path[-1])) if slot else start
        )
        path.append(int(after.argmax()))
    return path


def tokens_of(trace, block, path):
    return [visible(trace["tokens"][str(block["candidates"][slot][k])]) for slot, k in enumerate(path)]


def test_figure_1_is_there_before_any_model(visit, expect):
    page = visit()
    expect(page.locator(".cell")).to_have_count(9)
    expect(page.locator(".anchor .token")).to_have_text("The")
    expect(page.locator("#lattice .text")).to_have_text("The cat meows softly.")
    assert chosen(page) == [(0, "·cat"), (1, "·meows"), (2, "·softly")]
    assert reading(page, 0) == [["·dog", "rejected"], ["·meows", ""], ["·sweetly", ""]]
    assert reading(page, 1) == [["·cat", "accepted"], ["·meows", "accepted"], ["·softly", "accepted"]]
    assert reading(page, 2)[3] == [".", "bonus"]
    expect(page.locator(".strip")).to_contain_text("times not measured")


def test_example_switches_to_a_real_trace(visit, expect, example):
    page, trace = visit(), example("smollm2")
    page.get_by_label("SmolLM2, recorded").check()
    expect(page.locator(".slider.block .caption")).to_have_text(f"Block 1 of {len(trace['blocks'])}")
    expect(page.locator(".cell")).to_have_count(7 * 8)
    expect(page.locator("#lattice .text .block")).to_have_count(len(trace["blocks"]))
    outside = [words for _, words in reading(page, 2) if "not in pool" in words]
    assert len(outside) == trace["blocks"][0]["coverage"].count(None) + (len(trace["blocks"][0]["target"]) > 7 and 0)


def test_link_opens_an_example_at_a_block(visit, expect):
    page = visit("example=smollm2&block=3")
    expect(page.locator(".slider.block .caption")).to_have_text(re.compile("Block 3 of"))


def test_link_is_copied_for_the_block_on_show(visit, expect):
    page = visit("example=smollm2&block=3")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy link").click()
    expect(page.locator(".say")).to_have_text("Link copied.")
    link = page.evaluate("navigator.clipboard.readText()")
    assert link == page.url.partition("?")[0] + "?example=smollm2&block=3"
    page.context.clear_permissions()


def test_step_slider_walks(visit, expect):
    page = visit()
    slider = step_slider(page)
    slider.press("Home")
    expect(page.locator(".slider.step .caption")).to_have_text("Step 0 of 3")
    assert chosen(page) == []
    slider.press("ArrowRight")
    slider.press("ArrowRight")
    assert chosen(page) == [(0, "·cat"), (1, "·meows")]
    expect(page.locator(".links .fan path")).to_have_count(3)
    assert page.locator(".score").all_text_contents() == ["0.81", "0.18", "0.36"]
    expect(page.locator(".say")).to_contain_text("after “·cat”, “·meows” has cosine 0.81")
    expect(page.locator(".word")).to_have_text("chosen")
    page.get_by_label("Step forward").click()
    page.get_by_label("Step back").click()
    expect(page.locator(".slider.step .caption")).to_have_text("Step 2 of 3")


def test_play_reaches_the_end_and_can_be_paused(visit, expect):
    page = visit()
    page.get_by_role("button", name="Play").click()
    expect(page.locator(".slider.step .caption")).to_have_text("Step 1 of 3")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Play")).to_be_visible()
    page.get_by_role("button", name="Play").click()
    expect(page.locator(".slider.step .caption")).to_have_text("Step 3 of 3")
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_reduced_motion_shows_the_end_at_once(visit, expect):
    page = visit(reduced_motion="reduce")
    step_slider(page).press("Home")
    page.get_by_role("button", name="Play").click()
    expect(page.locator(".slider.step .caption")).to_have_text("Step 3 of 3")
    expect(page.get_by_role("button", name="Pause")).to_have_count(0)


def test_what_if_recomputes_the_tail(visit, expect):
    page = visit()
    cell(page, 0, 0).click()
    assert [token for token, _ in reading(page, 1)] == ["·dog", "·barks", "·loudly"]
    expect(page.locator(".reading.name").nth(1)).to_have_text("What if")
    expect(page.locator(".cell.picked .token")).to_have_text("·dog")
    page.get_by_role("button", name="Back to the recorded walk").click()
    assert [token for token, _ in reading(page, 1)] == ["·cat", "·meows", "·softly"]


def test_what_if_on_a_real_lattice_equals_the_walk_from_stored_scores(visit, example):
    page, trace = visit("example=smollm2&block=2"), example("smollm2")
    page.get_by_text("Block 2 of").wait_for()
    block, picks = trace["blocks"][1], {}
    for slot, rank in ((0, 3), (2, 5), (4, 0)):
        cell(page, slot, rank).click()
        picks[slot] = rank
        assert [token for token, _ in reading(page, 1)] == tokens_of(trace, block, walk_after(block, picks))
    cell(page, 1, 2).click()
    assert [token for token, _ in reading(page, 1)] == tokens_of(trace, block, walk_after(block, {0: 3, 1: 2}))


def test_viterbi_and_threshold(visit, expect, example):
    page, trace = visit("example=smollm2&block=2"), example("smollm2")
    page.get_by_text("Block 2 of").wait_for()
    block = trace["blocks"][1]
    page.get_by_label("Best sum of scores (Viterbi)").check()
    start, pair = torch.tensor([block["start_scores"]]), torch.tensor([block["pair_scores"]])
    best = tokens_of(trace, block, lilicorr_hf.viterbi_path(start, pair)[0].tolist())
    expect(page.locator(".best")).to_contain_text(" ".join(f"“{token}”" for token in best))
    expect(page.locator(".viterbi path")).to_have_count(7)
    page.locator(".slider.threshold input").fill("0.5")
    scores = torch.cat([start.flatten(), pair.flatten()]) / trace["logit_scale"]
    expect(page.locator(".threshold path")).to_have_count(int((scores >= 0.5).sum()))


def test_block_slider_text_and_sparkline_agree(visit, expect, example):
    page, count = visit("example=smollm2"), len(example("smollm2")["blocks"])
    page.get_by_text(f"Block 1 of {count}").wait_for()
    page.locator(".slider.block input").press("End")
    expect(page.locator(".slider.block .caption")).to_have_text(f"Block {count} of {count}")
    expect(page.locator("#lattice .text .on")).to_have_attribute("data-block", str(count - 1))
    page.locator(".spark rect").nth(1).click()
    expect(page.locator(".slider.block .caption")).to_have_text(f"Block 2 of {count}")
    page.locator("#lattice .text .block").nth(2).click()
    expect(page.locator(".slider.block input")).to_have_value("3")


def test_grid_by_keyboard_alone(visit, expect):
    page = visit()
    expect(page.locator('.cell[tabindex="0"]')).to_have_count(1)
    page.locator('.cell[tabindex="0"]').focus()
    moves = [("ArrowRight", 1, 0), ("ArrowDown", 1, 1), ("End", 2, 1), ("ArrowRight", 2, 1), ("Home", 0, 1)]
    for key, slot, rank in [*moves, ("ArrowUp", 0, 0)]:
        page.keyboard.press(key)
        expect(cell(page, slot, rank)).to_be_focused()
        expect(cell(page, slot, rank)).to_have_attribute("tabindex", "0")
    expect(page.locator(".say")).to_contain_text(
        "Slot 1, rank 1: “·dog”, token 1, drafter 42%, LiLiCorr 22% after “The”"
    )
    expect(page.locator(".links .focus path")).to_have_count(1 + 3)
    page.keyboard.press("Enter")
    assert [token for token, _ in reading(page, 1)] == ["·dog", "·barks", "·loudly"]
    page.keyboard.press("Escape")
    assert [token for token, _ in reading(page, 1)] == ["·cat", "·meows", "·softly"]


def test_hover_shows_links_in_and_out(visit, expect, example):
    page = visit()
    cell(page, 1, 0).hover()
    expect(page.locator(".links .focus path")).to_have_count(3 + 3)
    assert sorted(page.locator(".score").all_text_contents()) == sorted(
        ["0.34", "0.81", "0.22", "0.31", "0.38", "0.73"]
    )
    page.locator("h1").hover()
    expect(page.locator(".links .focus path")).to_have_count(0)


def test_the_same_block_as_a_table(visit, expect):
    page = visit()
    page.get_by_text("The same block as a table").click()
    rows = page.locator("#lattice tbody tr")
    expect(rows).to_have_count(4)
    expect(rows.nth(0)).to_contain_text("“·dog” 42% → 22%, “·cat” 33% → 75%, “·bird” 11% → 3%")
    expect(rows.nth(3)).to_contain_text("“.”")


CONTRAST = """(selector) => {
  const channel = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const luminance = (color) => {
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((value) => channel(value / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const node = document.querySelector(selector);
  const style = getComputedStyle(node);
  const ink = luminance(node.namespaceURI.endsWith("svg") ? style.fill : style.color);
  const paper = luminance(getComputedStyle(document.querySelector("#lattice .lattice")).getPropertyValue("--paper"));
  return (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_in_both_themes(visit, theme):
    page = visit(f"__theme={theme}")
    assert page.evaluate("document.body.classList.contains('dark')") is (theme == "dark")
    parts = [".cell .token", ".say", ".note", ".strip span", "#lattice .tone0", ".score"]
    parts += [f".chart .{name}" for name in ("head", "detail", "word")]
    for selector in [*parts, ".chip.accepted .caption", ".chip.rejected .caption"]:
        assert page.evaluate(CONTRAST, selector) >= 4.5, selector


def test_phone_scrolls_columns_and_keeps_the_anchor(visit, expect):
    page = visit("example=smollm2&block=2", width=360)
    page.get_by_text("Block 2 of").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    scroller = page.locator("#lattice .scroller")
    assert scroller.evaluate("node => node.scrollWidth > node.clientWidth")
    step_slider(page).press("ArrowLeft")
    step_slider(page).press("ArrowRight")
    expect(page.locator(".pinned.afloat")).to_have_count(1)
    frame, anchor, last = (
        scroller.bounding_box(),
        page.locator(".anchor").bounding_box(),
        cell(page, 6, 0).bounding_box(),
    )
    assert anchor["x"] >= frame["x"] and last["x"] + last["width"] <= frame["x"] + frame["width"] + 1
    for name in ("Generate", "Stop", "Play"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 360


HOSTILE = [
    "</script><script>window.hacked=1</script>",
    '<img src=x onerror="window.hacked=1">',
    "${window.hacked=7*7}",
    "{{value}}",
    "`+alert(1)+`",
    "\n",
    r"\xe2\x82",
    "שלום",
    "\u200b\u202e",
    "&lt;b&gt;",
]


@pytest.fixture
def hostile(tmp_path):
    """A trace whose every text is an attack, with each token as anchor, candidate and truth."""
    count = len(HOSTILE)
    ids = list(range(count))
    block = BlockTrace(
        anchor=0,
        candidates=[ids, ids],
        walk=[1, 2],
        drafted=2,
        accepted=1,
        target=[1, 3],
        text="".join(HOSTILE),
        log_probs=[[-2.3] * count] * 2,
        start_scores=[0.1 * i for i in ids],
        pair_scores=[[[0.1 * (i + j) for j in ids] for i in ids]],
    )
    trace = Trace(
        title=HOSTILE[1], prompt=HOSTILE[0], note=HOSTILE[2], opening=HOSTILE[3], tokens=dict(enumerate(HOSTILE)),
        blocks=[block], logit_scale=8.0,
    )  # fmt: skip
    trace.save(tmp_path / "hostile.json")
    return tmp_path / "hostile.json"


def upload(page, path):
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Load a trace").click()
    chooser.value.set_files(path)


def test_hostile_text_is_shown_literally(visit, expect, hostile):
    page = visit()
    upload(page, hostile)
    expect(page.locator("#lattice h2")).to_have_text(HOSTILE[1])
    expect(page.locator(".prompt")).to_have_text(HOSTILE[0])
    expect(page.get_by_role("radio", checked=True)).to_have_count(0)
    expect(page.locator(".note")).to_have_text(HOSTILE[2])
    assert page.locator("#lattice .text").text_content() == HOSTILE[3] + "".join(HOSTILE)
    shown = page.locator('.cell[data-slot="0"] title').all_text_contents()
    assert shown == [f"{visible(text)} · id {i}" for i, text in enumerate(HOSTILE)]
    assert shown[5:9] == ["↵ · id 5", r"\xe2\x82 · id 6", "שלום · id 7", "⟨U+200B⟩⟨U+202E⟩ · id 8"]
    cell(page, 0, 1).focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".say")).to_contain_text(HOSTILE[2])
    page.get_by_text("The same block as a table").click()
    expect(page.locator("#lattice tbody tr").nth(0)).to_contain_text(visible(HOSTILE[1]))
    assert page.locator("#lattice img, #lattice script").count() == 0
    assert page.evaluate("window.hacked") is None
    page.get_by_label("The paper's Figure 1").check()
    expect(page.locator("#lattice h2")).to_have_text("The dog meows sweetly")


def test_a_walk_that_processors_ended_early_is_shown_as_far_as_it_goes(visit, expect, hostile):
    trace = Trace.load(hostile)
    trace.title, trace.blocks[0].walk, trace.blocks[0].drafted, trace.blocks[0].accepted = "Ended early", [], 0, 0
    trace.blocks[0].target = [1]
    trace.save(hostile)
    page = visit()
    upload(page, hostile)
    expect(page.locator("#lattice h2")).to_have_text("Ended early")
    expect(page.locator(".say")).to_contain_text("The walk ended early")
    expect(page.locator("#lattice .cell")).to_have_count(2 * len(HOSTILE))


def test_bad_file_is_named_and_the_view_stays(visit, expect, tmp_path):
    page = visit()
    (tmp_path / "mine.json").write_text('{"schema": "lilicorr-trace", "version": 9}')
    upload(page, tmp_path / "mine.json")
    expect(page.get_by_role("alert").filter(has_text="mine.json")).to_contain_text("version 9; this program reads 1")
    expect(page.locator(".anchor .token")).to_have_text("The")


def test_downloads_are_the_trace_and_a_picture(visit, tmp_path, example):
    page = visit()
    with page.expect_download() as download:
        page.get_by_role("button", name="Trace as JSON").click()
    download.value.save_as(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == example("figure1")
    assert Trace.load(tmp_path / "trace.json").text == "The cat meows softly."
    with page.expect_download() as download:
        page.get_by_role("button", name="Picture as SVG").click()
    assert download.value.suggested_filename == "the-dog-meows-sweetly.svg"
    download.value.save_as(tmp_path / "picture.svg")
    root = ElementTree.parse(tmp_path / "picture.svg").getroot()
    texts = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"·meows", "0.73", "bonus", "Drafter alone"} <= set(texts)
    assert "var(" not in (tmp_path / "picture.svg").read_text()


MEASURE = """() => {
  const slider = document.querySelector(".slider.step input");
  const root = document.querySelector(".lattice");
  const timed = (act) => {
    const start = performance.now();
    act();
    root.getBoundingClientRect();
    return performance.now() - start;
  };
  const steps = [], picks = [];
  for (let i = 0; i < 24; i++) {
    steps.push(timed(() => { slider.value = i % 8; slider.dispatchEvent(new Event("input", { bubbles: true })); }));
    const cell = document.querySelector(`.cell[data-slot="${i % 7}"][data-rank="${i % 8}"]`);
    picks.push(timed(() => cell.dispatchEvent(new MouseEvent("click", { bubbles: true }))));
  }
  return [Math.min(...steps), Math.min(...picks)];
}"""


def test_step_and_what_if_take_less_than_50_ms(visit, record_property):
    """Handler, new scene and layout of a 7 x 8 block. The fastest of 24: others run on this core too."""
    page = visit("example=smollm2&block=2")
    page.get_by_text("Block 2 of").wait_for()
    step, pick = page.evaluate(MEASURE)
    record_property("step_ms", step)
    record_property("what_if_ms", pick)
    assert step < 50 and pick < 50
