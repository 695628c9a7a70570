// The lattice in sentences and as a table, for those who read rather than look.

const quote = (trace, id) => "“" + visible(trace.tokens[id]) + "”";

const describeCell = (trace, block, path, step, slot, rank) => {
  const id = block.candidates[slot][rank];
  const parts = [`Slot ${slot + 1}, rank ${rank + 1}: ${quote(trace, id)}, token ${id}`];
  if (block.log_probs) parts.push("drafter " + percent(Math.exp(block.log_probs[slot][rank])));
  if (hasScores(block) && slot < step && slot <= path.length) {
    const before = slot ? block.candidates[slot - 1][path[slot - 1]] : block.anchor;
    const scores = scoresAfter(block, slot, path[slot - 1]);
    parts.push(`LiLiCorr ${percent(softmax(scores)[rank])} after ${quote(trace, before)}`);
  }
  if (slot < step && path[slot] === rank) parts.push("chosen");
  if (block.target[slot] === id) parts.push("in the text");
  return parts.join(", ");
};

const describeStep = (trace, block, path, step, picks) => {
  if (!block.candidates.length) return "Nothing was drafted here: there was room for one token only.";
  if (!hasScores(block)) return "This draft has no scores: every slot takes the drafter's most probable token.";
  if (step === 0) return `All links are scored already. The walk starts at the anchor ${quote(trace, block.anchor)}.`;
  const slot = step - 1;
  if (slot >= path.length) return "The walk ended early: no candidate was allowed in the next slot.";
  const scores = scoresAfter(block, slot, path[slot - 1]);
  const shares = softmax(scores);
  const before = quote(trace, slot ? block.candidates[slot - 1][path[slot - 1]] : block.anchor);
  const name = (rank) => quote(trace, block.candidates[slot][rank]);
  const cosine = (rank) => (scores[rank] / trace.logit_scale).toFixed(2);
  const chosen = path[slot];
  const sentence = `Slot ${step}: after ${before}, ${name(chosen)} has cosine ${cosine(chosen)} (${percent(shares[chosen])})`;
  if (picks.has(slot)) return sentence + ": your pick.";
  const others = scores.map((score, rank) => (rank === chosen ? -Infinity : score));
  const next = argmax(others);
  if (scores.length < 2) return sentence + ": chosen.";
  if (scores[next] > scores[chosen]) return `${sentence}: chosen under the rules of the request, not ${name(next)} with ${cosine(next)}.`;
  return `${sentence}: chosen. Next best is ${name(next)} with ${cosine(next)}.`;
};

const OUTCOMES = { accepted: "accepted", rejected: "rejected", unread: "not reached", unknown: "text ends" };

const buildTable = (trace, block, path) => {
  const table = html("table");
  const head = table.appendChild(html("thead")).appendChild(html("tr"));
  const names = ["Slot", "Candidates, most probable first", "Drafter alone", "Walk", "Target", "Walk against target"];
  for (const name of names) head.append(html("th", { scope: "col" }, name));
  const body = table.appendChild(html("tbody"));
  const words = verdicts(idsOf(block, path), block.target);
  for (let slot = 0; slot <= block.candidates.length; slot++) {
    const row = body.appendChild(html("tr"));
    row.append(html("th", { scope: "row" }, slot < block.candidates.length ? slot + 1 : "after"));
    for (const value of tableCells(trace, block, path, words, slot)) row.append(html("td", {}, value));
  }
  return table;
};

const tableCells = (trace, block, path, words, slot) => {
  const pool = block.candidates[slot];
  const inText = block.target[slot];
  const outside = pool && inText !== undefined && !pool.includes(inText) ? " (not in pool)" : "";
  const text = inText === undefined ? "" : quote(trace, inText) + outside;
  if (!pool) return ["", "", "", text, ""];
  const shares = hasScores(block) && slot < path.length ? softmax(scoresAfter(block, slot, path[slot - 1])) : null;
  const described = pool.map((id, rank) => {
    const numbers = [];
    if (block.log_probs) numbers.push(percent(Math.exp(block.log_probs[slot][rank])));
    if (shares) numbers.push(percent(shares[rank]));
    return quote(trace, id) + (numbers.length ? ` ${numbers.join(" → ")}` : "");
  });
  const walk = slot < path.length ? quote(trace, pool[path[slot]]) : "";
  return [described.join(", "), quote(trace, pool[0]), walk, text, OUTCOMES[words[slot]] ?? ""];
};
