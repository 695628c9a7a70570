// The view: text, blocks, lattice, controls. Everything here answers from the stored scores, without the server.

const view = element.querySelector(".lattice");
const still = matchMedia("(prefers-reduced-motion: reduce)");
const STEP_MILLISECONDS = 900;

const at = (parent, tag, attributes, text) => parent.appendChild(html(tag, attributes, text));
const button = (parent, name, label, act) => {
  const node = at(parent, "button", { type: "button", class: name, "aria-label": label }, label);
  node.addEventListener("click", act);
  return node;
};
const slider = (parent, name, label, attributes, act) => {
  const wrap = at(parent, "label", { class: "slider " + name });
  const caption = at(wrap, "span", { class: "caption" }, label);
  const input = at(wrap, "input", { type: "range", "aria-label": label, ...attributes });
  input.addEventListener("input", act);
  return { input, caption };
};

// --- parts ---------------------------------------------------------------------------------------------------------

const about = at(view, "div", { class: "about" });
const prompt = at(view, "p", { class: "prompt" });
const text = at(view, "div", { class: "text", dir: "auto" });
const blockRow = at(view, "div", { class: "row blocks" });
const blockSlider = slider(blockRow, "block", "Block", { min: 1, max: 1, step: 1 }, (event) => select(event.target.value - 1));
const spark = blockRow.appendChild(svg("svg", { class: "spark", "aria-hidden": "true", height: 40 }));
const strip = at(view, "p", { class: "strip" });
const scroller = at(view, "div", { class: "scroller" });
const say = at(view, "p", { class: "say", "aria-live": "polite" });
const walkRow = at(view, "div", { class: "row walkrow" });
const playButton = button(walkRow, "play", "Play", () => (timer ? pause() : play()));
button(walkRow, "back", "Step back", () => jump(state.step - 1)).textContent = "‹";
button(walkRow, "forward", "Step forward", () => jump(state.step + 1)).textContent = "›";
const stepSlider = slider(walkRow, "step", "Step", { min: 0, step: 1 }, (event) => jump(Number(event.target.value)));
const resetButton = button(walkRow, "reset", "Back to the recorded walk", () => reset());
const optionRow = at(view, "div", { class: "row options" });
const threshold = slider(optionRow, "threshold", "Links above", { min: -1, max: 1, step: 0.05, value: 1 }, (event) => {
  state.threshold = Number(event.target.value);
  refresh();
});
const viterbiWrap = at(optionRow, "label", { class: "check" });
const viterbiBox = at(viterbiWrap, "input", { type: "checkbox" });
at(viterbiWrap, "span", {}, "Best sum of scores (Viterbi)");
viterbiBox.addEventListener("change", () => {
  state.viterbi = viterbiBox.checked;
  refresh();
});
const actions = at(optionRow, "span", { class: "actions" });
button(actions, "link", "Copy link", () => copyLink());
button(actions, "json", "Trace as JSON", () => download(fileName(trace.title, "json"), "application/json", JSON.stringify(trace)));
button(actions, "picture", "Picture as SVG", () => download(fileName(trace.title, "svg"), "image/svg+xml", standalone(chart.root(), trace.title)));
const legend = at(view, "p", { class: "legend" });
const details = at(view, "details");
at(details, "summary", {}, "The same block as a table");
const tablePlace = at(details, "div", { class: "table" });

// --- state ---------------------------------------------------------------------------------------------------------

let trace = null;
let live = false;
let timer = null;
let current = 0;
let followed = true;
const state = { step: 0, path: [], picks: new Map(), focus: null, cursor: { slot: 0, rank: 0 }, threshold: 1, viterbi: false };
const block = () => trace.blocks[current];
const slots = () => block().candidates.length;
const chart = makeChart(scroller, {
  describe: (slot, rank) => describeCell(trace, block(), state.path, state.step, slot, rank),
});

const receive = () => {
  const value = props.value;
  if (!value || !value.trace) return;
  const grows = live && trace && value.trace.prompt === trace.prompt && value.trace.blocks.length >= trace.blocks.length;
  const before = grows && trace.blocks.length ? current : null;
  [trace, live] = [value.trace, value.live];
  if (!grows) {
    followed = true;
    const asked = new URLSearchParams(location.search);
    current = value.example && asked.get("example") === value.example ? Math.trunc(Number(asked.get("block")) || 1) - 1 : 0;
  } else if (followed) {
    current = trace.blocks.length - 1;
  }
  view.querySelector(".link").hidden = !value.example;
  drawText();
  if (!trace.blocks.length) return empty();
  view.classList.remove("empty");
  current = Math.max(0, Math.min(current, trace.blocks.length - 1));
  if (before !== current) show();
  else drawBlocks();
};

const empty = () => {
  view.classList.add("empty");
  scroller.replaceChildren();
  say.textContent = live ? "Reading the prompt…" : "This trace has no block: the text ended with its first token.";
};

// --- text and blocks -----------------------------------------------------------------------------------------------

const drawText = () => {
  about.replaceChildren(html("h2", {}, trace.title));
  if (trace.note) about.append(html("p", { class: "note" }, trace.note));
  prompt.textContent = trace.prompt;
  prompt.hidden = !trace.prompt;
  text.replaceChildren(html("span", { class: "opening" }, trace.opening));
  trace.blocks.forEach((each, i) => {
    const span = at(text, "span", { class: "block tone" + (i % 2), "data-block": i }, each.text);
    span.title = `Block ${i + 1}: ${each.accepted} accepted, then the target's own token`;
    span.addEventListener("click", () => select(i));
  });
};

const drawBlocks = () => {
  const count = trace.blocks.length;
  text.querySelectorAll(".block").forEach((span, i) => span.classList.toggle("on", i === current));
  blockRow.classList.toggle("single", count === 1);
  blockSlider.input.max = count;
  blockSlider.input.value = current + 1;
  blockSlider.input.setAttribute("aria-valuetext", `block ${current + 1} of ${count}, ${plural(block().accepted, "token")} accepted`);
  blockSlider.caption.textContent = `Block ${current + 1} of ${count}`;
  drawSpark(count);
  drawStrip();
};

const drawSpark = (count) => {
  const width = Math.max(2, Math.min(14, Math.min(420, view.clientWidth) / count));
  const most = Math.max(...trace.blocks.map((each) => each.accepted)) + 1;
  spark.setAttribute("width", count * width);
  spark.replaceChildren(...trace.blocks.map((each, i) => {
    const height = (36 * (each.accepted + 1)) / most;
    const bar = svg("rect", { x: i * width, y: 38 - height, width: width * 0.86, height, rx: 1.5, class: i === current ? "on" : "" });
    bar.addEventListener("click", () => select(i));
    return bar;
  }));
};

const drawStrip = () => {
  const count = trace.blocks.length;
  const tau = trace.blocks.reduce((sum, each) => sum + each.accepted + 1, 0) / count;
  const items = [`${tau.toFixed(2)} tokens per target pass`, plural(count, "block")];
  const timed = trace.blocks.filter((each) => each.draft_seconds !== null && each.drafted > 0);
  if (timed.length) {
    items.push(`draft and score ${milliseconds(median(timed.map((each) => each.draft_seconds)))}, verify ` +
      `${milliseconds(median(timed.map((each) => each.verify_seconds)))} a block (median)`);
    if (trace.device) items.push(trace.device);
  } else {
    items.push("times not measured");
  }
  strip.replaceChildren(...items.map((item) => html("span", {}, item)));
};

const select = (index) => {
  followed = index === trace.blocks.length - 1;
  current = Math.max(0, Math.min(Number(index), trace.blocks.length - 1));
  show();
};

const show = () => {
  pause();
  state.picks.clear();
  Object.assign(state, { focus: null, cursor: { slot: 0, rank: 0 }, path: block().walk, step: slots() });
  chart.build(trace, block(), scroller.clientWidth);
  stepSlider.input.max = slots();
  drawBlocks();
  refresh();
};

// --- walk ----------------------------------------------------------------------------------------------------------

const refresh = () => {
  state.path = walkWith(block(), state.picks);
  chart.update(state);
  stepSlider.input.value = state.step;
  stepSlider.caption.textContent = `Step ${state.step} of ${slots()}`;
  threshold.caption.textContent = state.threshold < 1 ? `Links above ${state.threshold.toFixed(2)}` : "Links above: none";
  const scored = hasScores(block());
  threshold.input.disabled = viterbiBox.disabled = !scored;
  resetButton.hidden = !state.picks.size;
  const { focus, path, step, picks } = state;
  say.textContent = focus
    ? describeCell(trace, block(), path, step, focus.slot, focus.rank) + "."
    : describeStep(trace, block(), path, step, picks);
  legend.textContent = scored
    ? "In a cell: upper bar, the drafter's probability; lower bar, LiLiCorr's after the walk so far; ✓ what the text says. " +
      "On a link: cosine of an out and an in vector. Pick any candidate to see the walk from there."
    : "In a cell: the drafter's probability where it was recorded; ✓ what the text says.";
  if (scored && state.viterbi) {
    const best = idsOf(block(), viterbi(block())).map((id) => quote(trace, id)).join(" ");
    legend.append(html("span", { class: "best" }, ` Dashed: ${best}, the path with the greatest sum of scores.`));
  }
  if (details.open) tablePlace.replaceChildren(buildTable(trace, block(), path));
};

const goTo = (step) => {
  state.step = Math.max(0, Math.min(step, slots()));
  state.focus = null;
  refresh();
  chart.reveal(state.step - 1);
};

const jump = (step) => {
  pause();
  goTo(step);
};

const pick = (slot, rank) => {
  if (!hasScores(block())) return;
  pause();
  for (const later of [...state.picks.keys()]) if (later >= slot) state.picks.delete(later);
  state.picks.set(slot, rank);
  state.step = slots();
  state.focus = null;
  refresh();
};

const reset = () => {
  state.picks.clear();
  refresh();
};

const play = () => {
  if (still.matches) return goTo(slots());
  if (state.step >= slots()) goTo(0);
  playButton.textContent = "Pause";
  playButton.setAttribute("aria-label", "Pause");
  timer = setInterval(() => {
    goTo(state.step + 1);
    if (state.step >= slots()) pause();
  }, STEP_MILLISECONDS);
};

const pause = () => {
  clearInterval(timer);
  timer = null;
  playButton.textContent = "Play";
  playButton.setAttribute("aria-label", "Play");
};

// --- pointer and keyboard ------------------------------------------------------------------------------------------

const cellOf = (event) => {
  const cell = event.target.closest?.(".cell");
  return cell && { slot: Number(cell.dataset.slot), rank: Number(cell.dataset.rank) };
};

const look = (focus) => {
  if (state.focus?.slot === focus?.slot && state.focus?.rank === focus?.rank) return;
  state.focus = focus;
  refresh();
};

scroller.addEventListener("pointerover", (event) => look(cellOf(event)));
scroller.addEventListener("pointerleave", () => look(null));
scroller.addEventListener("focusin", (event) => {
  const cell = cellOf(event);
  if (!cell || !event.target.matches(":focus-visible")) return;
  state.cursor = cell;
  look(cell);
  chart.reveal(cell.slot);
});
scroller.addEventListener("focusout", () => look(null));
scroller.addEventListener("click", (event) => {
  const cell = cellOf(event);
  if (!cell) return;
  state.cursor = cell;
  pick(cell.slot, cell.rank);
});

const MOVES = {
  ArrowRight: ({ slot, rank }) => ({ slot: slot + 1, rank }),
  ArrowLeft: ({ slot, rank }) => ({ slot: slot - 1, rank }),
  ArrowDown: ({ slot, rank }) => ({ slot, rank: rank + 1 }),
  ArrowUp: ({ slot, rank }) => ({ slot, rank: rank - 1 }),
  Home: ({ rank }) => ({ slot: 0, rank }),
  End: ({ rank }) => ({ slot: slots() - 1, rank }),
};

scroller.addEventListener("keydown", (event) => {
  const cell = cellOf(event);
  if (!cell) return;
  if (event.key === "Enter" || event.key === " ") pick(cell.slot, cell.rank);
  else if (event.key === "Escape") reset();
  else if (MOVES[event.key]) moveTo(MOVES[event.key](cell));
  else return;
  event.preventDefault();
});

const moveTo = (cell) => {
  if (!chart.cell(cell.slot, cell.rank)) return;
  state.cursor = cell;
  look(cell);
  chart.cell(cell.slot, cell.rank).focus({ preventScroll: true });
  chart.reveal(cell.slot);
};

details.addEventListener("toggle", () => refresh());

const copyLink = async () => {
  const url = new URL(location.href);
  url.search = new URLSearchParams({ example: props.value.example, block: current + 1 });
  await navigator.clipboard.writeText(url.href);
  say.textContent = "Link copied.";
};

let drawnWidth = 0;
new ResizeObserver(() => {
  const width = scroller.clientWidth;
  if (!trace?.blocks.length || Math.abs(width - drawnWidth) < 2) return;
  drawnWidth = width;
  chart.build(trace, block(), width);
  refresh();
}).observe(scroller);

watch("value", receive);
receive();
