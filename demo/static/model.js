// What follows from a trace's numbers; no DOM. A path is one candidate index per slot.

const softmax = (scores) => {
  const top = Math.max(...scores);
  const weights = scores.map((score) => Math.exp(score - top));
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  return weights.map((weight) => weight / total);
};

const argmax = (scores) => scores.indexOf(Math.max(...scores));

const hasScores = (block) => block.start_scores !== null;

// Scores of a slot's candidates given the one before; slot 0 follows the anchor.
const scoresAfter = (block, slot, previous) =>
  slot === 0 ? block.start_scores : block.pair_scores[slot - 1][previous];

// The recorded walk, and after a candidate somebody picked the greedy walk from there on.
const walkWith = (block, picks) => {
  const first = Math.min(...picks.keys());
  if (!Number.isFinite(first)) return block.walk;
  const path = block.walk.slice(0, first);
  for (let slot = path.length; slot < block.candidates.length; slot++) {
    path.push(picks.get(slot) ?? argmax(scoresAfter(block, slot, path[slot - 1])));
  }
  return path;
};

// The path with the greatest sum of scores (appendix E of the paper).
const viterbi = (block) => {
  let best = block.start_scores;
  const origins = [];
  for (const pair of block.pair_scores) {
    const from = best.map((_, k) => argmax(best.map((sum, j) => sum + pair[j][k])));
    best = from.map((j, k) => best[j] + pair[j][k]);
    origins.unshift(from);
  }
  const path = [argmax(best)];
  for (const from of origins) path.unshift(from[path[0]]);
  return path;
};

const idsOf = (block, path) => path.map((index, slot) => block.candidates[slot][index]);

// How a row of tokens fares against the text: accepted, then one rejection, then never looked at.
const verdicts = (ids, target) => {
  let alive = true;
  return ids.map((id, slot) => {
    if (!alive) return "unread";
    if (slot >= target.length) return "unknown";
    alive = id === target[slot];
    return alive ? "accepted" : "rejected";
  });
};

const acceptedCount = (ids, target) => verdicts(ids, target).filter((word) => word === "accepted").length;

const INVISIBLE = { " ": "·", "\n": "↵", "\r": "␍", "\t": "⇥", "\u00a0": "⍽" };
const escapeCharacter = (character) =>
  INVISIBLE[character] ?? "⟨U+" + character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0") + "⟩";

// A token with everything that has no ink of its own made visible: spaces, ends of lines, controls, joiners, marks of direction.
const visible = (text) => (/^ +$/.test(text) ? text.replaceAll(" ", "␣") : showInvisible(text));
const showInvisible = (text) => text.replace(/[\s\p{Cc}\p{Cf}\p{Zs}\p{Zl}\p{Zp}\u034f\u115f\u1160\u3164]/gu, escapeCharacter);

const shorten = (text, length) => {
  const characters = Array.from(text);
  return characters.length > length ? characters.slice(0, length - 1).join("") + "…" : text;
};

const percent = (share) => (share > 0 && share < 0.005 ? "<1%" : Math.round(100 * share) + "%");
const plural = (count, noun) => count + " " + noun + (count === 1 ? "" : "s");
const milliseconds = (seconds) => (1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0) + " ms";
const median = (numbers) => [...numbers].sort((a, b) => a - b)[Math.floor(numbers.length / 2)];

const SVG = "http://www.w3.org/2000/svg";
const svg = (tag, attributes = {}, text = null) => fill(document.createElementNS(SVG, tag), attributes, text);
const html = (tag, attributes = {}, text = null) => fill(document.createElement(tag), attributes, text);
const fill = (node, attributes, text) => {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== null) node.textContent = text;
  return node;
};
