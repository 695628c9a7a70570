// Two lanes on one clock. While they run, each fills in as it is measured; afterwards both are replayed together.

const view = element.querySelector(".race");
const still = matchMedia("(prefers-reduced-motion: reduce)");
let frame = 0;

const at = (parent, tag, attributes = {}, text = null) => parent.appendChild(html(tag, attributes, text));

const buildLane = (parent, lane) => {
  const box = at(parent, "section", { class: "lane", "aria-label": lane.name });
  at(box, "h3", {}, lane.name);
  const speed = at(box, "p", { class: "speed" });
  const clock = at(box, "div", { class: "clock", "aria-hidden": "true" });
  return { lane, speed, bar: at(clock, "div", { class: "bar" }), text: at(box, "p", { class: "words", dir: "auto" }) };
};

// Everything a lane had at a moment of its own clock.
const drawLane = ({ lane, speed, bar, text }, seconds, longest) => {
  const steps = lane.steps.filter(([moment]) => moment <= seconds);
  text.replaceChildren(...steps.map(([, piece], i) => html("span", { class: "tone" + (i % 2) }, piece)));
  bar.style.width = longest ? (100 * Math.min(seconds, lane.seconds ?? 0)) / longest + "%" : "0";
  const finished = lane.seconds !== null && seconds >= lane.seconds;
  speed.textContent = finished
    ? `${lane.tokens_per_second.toFixed(1)} tokens/s · ${lane.tokens} tokens in ${lane.seconds.toFixed(1)} s · ${plural(lane.target_passes, "target pass").replace("passs", "passes")}`
    : steps.length ? `${seconds.toFixed(1)} s` : "waiting";
};

const show = () => {
  cancelAnimationFrame(frame);
  const value = props.value;
  view.replaceChildren();
  if (!value) return;
  const row = at(view, "div", { class: "lanes" });
  const lanes = value.lanes.map((lane) => buildLane(row, lane));
  const longest = Math.max(...value.lanes.map((lane) => lane.seconds ?? 0));
  const draw = (seconds) => lanes.forEach((lane) => drawLane(lane, seconds, longest));
  draw(Infinity);
  at(view, "p", { class: "verdict" }, verdict(value));
  if (value.running === null) addReplay(draw, longest);
};

const verdict = ({ lanes, running, identical, device }) => {
  if (running) return `Running ${running}. Each lane has the machine to itself, one after the other.`;
  const [plain, assisted] = lanes;
  const ratio = assisted.tokens_per_second / plain.tokens_per_second;
  const same = identical === null ? "sampled, so the texts differ by chance" : identical ? "identical text" : "the texts differ: `lilicorr generate` tells whether at a tie of the target's two best tokens";
  return `${ratio.toFixed(2)}x tokens per second, ${same}. One run each, measured one after the other on ${device}; the replay shows both on one clock.`;
};

const addReplay = (draw, longest) => {
  const button = at(view, "button", { type: "button" }, "Replay on one clock");
  const play = () => {
    cancelAnimationFrame(frame);
    if (still.matches) return draw(Infinity);
    const start = performance.now();
    const tick = (now) => {
      const seconds = (now - start) / 1000;
      draw(seconds < longest ? Math.max(0, seconds) : Infinity);
      if (seconds < longest) frame = requestAnimationFrame(tick);
    };
    frame = requestAnimationFrame(tick);
  };
  button.addEventListener("click", play);
};

watch("value", show);
show();
