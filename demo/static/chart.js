// The lattice and the three readings under it as one SVG; built once a block, then only its classes and links change.

const LAYERS = ["threshold", "viterbi", "fan", "walk", "focus"];

const geometry = (width, slots, ranks) => {
  const compact = width < 620;
  const left = compact ? 82 : 104;
  const columns = slots + 1;
  const pitch = Math.max(compact ? 118 : 116, Math.min(288, (width - left - 6) / columns));
  const cell = compact ? 84 : Math.min(98, pitch - 34);
  const gap = pitch - cell;
  const height = 36;
  const rowPitch = 47;
  const top = 40;
  const readings = top + ranks * rowPitch + 34;
  return {
    left, cell, gap, height, readings, readingPitch: 62,
    width: left + columns * pitch + 6,
    total: readings + 3 * 62,
    x: (slot) => (slot < 0 ? 18 : left + gap + slot * pitch),
    end: (slot) => (slot < 0 ? left : left + (slot + 1) * pitch),
    y: (rank) => top + rank * rowPitch,
    middle: (rank) => top + rank * rowPitch + height / 2,
    anchorRank: (ranks - 1) / 2,
  };
};

const makeChart = (scroller, on) => {
  let trace, block, box, root, layers, labels, pinned, readings;
  let cells = [];

  const text = (id) => trace.tokens[id];
  const shown = (id, length) => shorten(visible(text(id)), length);
  const letters = () => Math.floor((box.cell - 8) / 7.6);

  const build = (newTrace, newBlock, width) => {
    [trace, block] = [newTrace, newBlock];
    const ranks = block.candidates.length ? block.candidates[0].length : 1;
    box = geometry(width, block.candidates.length, ranks);
    root = svg("svg", {
      class: "chart", role: "graphics-document", "aria-label": "Candidate lattice of the block",
      width: box.width, height: box.total, viewBox: `0 0 ${box.width} ${box.total}`,
    });
    buildHeads();
    const links = svg("g", { class: "links", "aria-hidden": "true" });
    layers = Object.fromEntries(LAYERS.map((name) => [name, links.appendChild(svg("g", { class: name }))]));
    root.append(links, buildGrid(ranks), (labels = svg("g", { class: "labels", "aria-hidden": "true" })));
    readings = root.appendChild(svg("g", { class: "readings", "aria-hidden": "true" }));
    root.append(buildPinned(ranks));
    scroller.replaceChildren(root);
    pin();
  };

  const buildHeads = () => {
    block.candidates.forEach((_, slot) => {
      root.append(svg("text", { class: "head", x: box.x(slot) + box.cell / 2, y: 13 }, "slot " + (slot + 1)));
    });
  };

  const buildGrid = (ranks) => {
    const grid = svg("g", { role: "grid", "aria-label": "Candidates by rank and slot" });
    cells = block.candidates.map(() => []);
    for (let rank = 0; rank < ranks; rank++) {
      const row = grid.appendChild(svg("g", { role: "row" }));
      block.candidates.forEach((slot, column) => {
        cells[column][rank] = row.appendChild(buildCell(slot[rank], column, rank));
      });
    }
    return grid;
  };

  const buildCell = (id, slot, rank) => {
    const group = svg("g", {
      class: "cell", role: "gridcell", tabindex: "-1", "data-slot": slot, "data-rank": rank,
      transform: `translate(${box.x(slot)} ${box.y(rank)})`,
    });
    const inner = box.cell - 16;
    group.append(
      svg("title", {}, visible(text(id)) + " · id " + id),
      svg("rect", { class: "frame", width: box.cell, height: box.height, rx: 8 }),
      svg("text", { class: "token", x: box.cell / 2, y: 18 }, shown(id, letters())),
      svg("rect", { class: "track", x: 8, y: 25, width: inner, height: 2.5, rx: 1.25 }),
      svg("rect", { class: "track", x: 8, y: 29.5, width: inner, height: 2.5, rx: 1.25 }),
      svg("rect", { class: "bar draft", x: 8, y: 25, width: inner * draftShare(slot, rank), height: 2.5, rx: 1.25 }),
      svg("rect", { class: "bar pair", x: 8, y: 29.5, width: 0, height: 2.5, rx: 1.25 }),
    );
    if (block.target[slot] === id) {
      group.classList.add("truth");
      group.append(svg("path", { class: "tick", d: `M${box.cell - 14} 8 l3 3.4 l5 -6.4` }));
    }
    return group;
  };

  const draftShare = (slot, rank) => (block.log_probs ? Math.exp(block.log_probs[slot][rank]) : 0);

  // What stays in view while the columns scroll: ranks, anchor, names of the readings.
  const buildPinned = (ranks) => {
    pinned = svg("g", { class: "pinned" });
    pinned.append(svg("rect", { class: "plate", x: 0, y: 0, width: box.left, height: box.total }));
    pinned.append(svg("text", { class: "head", x: 18 + (box.left - 18) / 2, y: 13 }, "anchor"));
    for (let rank = 0; rank < ranks; rank++) {
      pinned.append(svg("text", { class: "rank", x: 4, y: box.middle(rank) + 3.5 }, rank + 1));
    }
    const anchor = svg("g", { class: "anchor", transform: `translate(18 ${box.y(box.anchorRank)})` });
    anchor.append(
      svg("rect", { class: "frame", width: box.left - 18, height: box.height, rx: 8 }),
      svg("text", { class: "token", x: (box.left - 18) / 2, y: 22 }, shown(block.anchor, Math.floor((box.left - 26) / 7.6))),
    );
    pinned.append(anchor);
    return pinned;
  };

  const pin = () => {
    pinned.setAttribute("transform", `translate(${scroller.scrollLeft} 0)`);
    pinned.classList.toggle("afloat", scroller.scrollLeft > 0);
  };

  // --- links -------------------------------------------------------------------------------------------------------

  const cosine = (score) => (score / trace.logit_scale).toFixed(2);

  const curve = (slot, from, to) => {
    const [x1, y1] = [box.end(slot - 1), box.middle(slot ? from : box.anchorRank)];
    const [x2, y2] = [box.x(slot), box.middle(to)];
    const bend = (x2 - x1) * 0.5;
    return `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
  };

  const link = (slot, from, to, width) => svg("path", { d: curve(slot, from, to), "stroke-width": width.toFixed(2) });

  const label = (slot, from, to, score, atStart, chosen) => {
    const [x, y] = atStart ? [box.end(slot - 1) + 5, box.middle(slot ? from : box.anchorRank)] : [box.x(slot) - 5, box.middle(to)];
    labels.append(svg("text", {
      class: "score" + (chosen ? " chosen" : ""), x, y: y - 4, "text-anchor": atStart ? "start" : "end",
    }, cosine(score)));
  };

  const drawPath = (layer, path, length, width) => {
    const parts = path.slice(0, length).map((rank, slot) => link(slot, path[slot - 1], rank, width));
    layer.replaceChildren(...parts);
  };

  const drawFan = (slot, previous, chosen) => {
    const scores = scoresAfter(block, slot, previous);
    const shares = softmax(scores);
    scores.forEach((score, rank) => {
      layers.fan.append(link(slot, previous, rank, 0.7 + 3 * shares[rank]));
      label(slot, previous, rank, score, false, rank === chosen);
    });
  };

  const drawFocus = ({ slot, rank }) => {
    const into = slot === 0 ? [[0, block.start_scores[rank]]] : block.pair_scores[slot - 1].map((row, j) => [j, row[rank]]);
    for (const [from, score] of into) {
      layers.focus.append(link(slot, from, rank, 0.7 + 2 * Math.max(0, score / trace.logit_scale)));
      label(slot, from, rank, score, slot > 0, false);
    }
    if (slot + 1 < block.candidates.length) drawFocusOut(slot + 1, rank);
  };

  const drawFocusOut = (next, rank) => {
    const scores = scoresAfter(block, next, rank);
    const best = argmax(scores);
    softmax(scores).forEach((share, to) => {
      layers.focus.append(link(next, rank, to, 0.7 + 3 * share));
      label(next, rank, to, scores[to], false, to === best);
    });
  };

  const drawThreshold = (threshold) => {
    const parts = [];
    const keep = (slot, from, to, score) => {
      const value = score / trace.logit_scale;
      if (value >= threshold) parts.push(link(slot, from, to, 0.6 + 1.4 * Math.max(0, value)));
    };
    block.start_scores.forEach((score, to) => keep(0, 0, to, score));
    block.pair_scores.forEach((pair, s) => pair.forEach((row, i) => row.forEach((score, j) => keep(s + 1, i, j, score))));
    layers.threshold.replaceChildren(...parts);
  };

  // --- state -------------------------------------------------------------------------------------------------------

  const update = (state) => {
    const { step, path, focus, picks } = state;
    for (const layer of [layers.fan, layers.focus, layers.viterbi, layers.threshold, labels]) layer.replaceChildren();
    drawPath(layers.walk, path, Math.min(step, path.length), 2.6);
    if (hasScores(block)) {
      if (state.threshold < 1) drawThreshold(state.threshold);
      if (state.viterbi) drawPath(layers.viterbi, viterbi(block), block.candidates.length, 2);
      if (focus) drawFocus(focus);
      else if (step > 0 && step <= path.length) drawFan(step - 1, path[step - 2], path[step - 1]);
    }
    block.candidates.forEach((slot, column) => {
      const shares = hasScores(block) && column < step && column <= path.length ? softmax(scoresAfter(block, column, path[column - 1])) : null;
      slot.forEach((_, rank) => updateCell(state, column, rank, shares));
    });
    root.classList.toggle("focused", Boolean(focus));
    drawReadings(path, picks);
  };

  const updateCell = ({ step, path, picks, focus, cursor }, slot, rank, shares) => {
    const cell = cells[slot][rank];
    const chosen = slot < step && path[slot] === rank;
    cell.classList.toggle("chosen", chosen);
    cell.classList.toggle("current", slot === step - 1);
    cell.classList.toggle("future", slot >= step);
    cell.classList.toggle("picked", picks.get(slot) === rank);
    cell.classList.toggle("focus", Boolean(focus) && focus.slot === slot && focus.rank === rank);
    cell.setAttribute("aria-selected", chosen);
    cell.setAttribute("tabindex", cursor.slot === slot && cursor.rank === rank ? "0" : "-1");
    cell.querySelector(".pair").setAttribute("width", shares ? (box.cell - 16) * shares[rank] : 0);
    cell.setAttribute("aria-label", on.describe(slot, rank));
    if (chosen && slot === step - 1 && !focus) {
      const word = picks.get(slot) === rank ? "picked" : "chosen";
      labels.append(svg("text", { class: "word", x: box.x(slot) + box.cell / 2, y: box.y(rank) - 3 }, word));
    }
  };

  // --- readings ----------------------------------------------------------------------------------------------------

  const drawReadings = (path, picks) => {
    readings.replaceChildren();
    pinned.querySelectorAll(".reading").forEach((node) => node.remove());
    const limit = picks.size ? block.candidates.length : block.drafted;
    const walkIds = idsOf(block, path).slice(0, limit);
    const argmaxIds = block.candidates.map((slot) => slot[0]).slice(0, limit);
    readings.append(svg("line", { class: "rule", x1: 0, x2: box.width, y1: box.readings - 20, y2: box.readings - 20 }));
    drawDraft(0, "Drafter alone", argmaxIds, "");
    drawDraft(1, picks.size ? "What if" : "LiLiCorr", walkIds, "walk");
    drawTarget(2, acceptedCount(walkIds, block.target));
  };

  const drawDraft = (row, name, ids, kind) => {
    const words = verdicts(ids, block.target);
    const accepted = words.filter((word) => word === "accepted").length;
    nameReading(row, name, `${accepted} of ${ids.length} kept`, kind);
    const captions = { accepted: "accepted", rejected: "rejected", unread: "", unknown: "" };
    ids.forEach((id, slot) => drawChip(row, slot, id, words[slot] + " " + kind, captions[words[slot]]));
  };

  const drawTarget = (row, accepted) => {
    nameReading(row, "Target", "what the text says", "");
    block.target.forEach((id, slot) => {
      const pool = block.candidates[slot];
      const outside = pool && !pool.includes(id) ? "not in pool" : "";
      const word = slot === accepted ? "bonus" : "";
      const kind = slot < accepted ? "accepted" : slot === accepted ? "bonus" : "unread";
      drawChip(row, slot, id, kind + (outside ? " outside" : ""), [word, outside].filter(Boolean).join(" · "));
    });
  };

  const nameReading = (row, name, detail, kind) => {
    const y = box.readings + row * box.readingPitch;
    pinned.append(
      svg("text", { class: "reading name " + kind, x: 4, y: y + 13 }, name),
      svg("text", { class: "reading detail", x: 4, y: y + 28 }, detail),
    );
  };

  const drawChip = (row, slot, id, kind, caption) => {
    const group = svg("g", { class: "chip " + kind, transform: `translate(${box.x(slot)} ${box.readings + row * box.readingPitch})` });
    group.append(
      svg("title", {}, visible(text(id)) + " · id " + id),
      svg("rect", { class: "frame", width: box.cell, height: 30, rx: 8 }),
      svg("text", { class: "token", x: box.cell / 2, y: 19.5 }, shown(id, letters())),
      svg("text", { class: "caption", x: box.cell / 2, y: 43 }, caption),
    );
    if (kind.startsWith("rejected")) group.append(svg("path", { class: "strike", d: `M10 15 H${box.cell - 10}` }));
    readings.append(group);
  };

  // Scrolls the columns, never the page.
  const reveal = (slot) => {
    if (slot < 0) return scroller.scrollTo({ left: 0 });
    const [start, end] = [box.x(slot) - box.left - box.gap, box.x(slot) + box.cell + 12];
    if (start < scroller.scrollLeft) scroller.scrollTo({ left: Math.max(0, start) });
    else if (end > scroller.scrollLeft + scroller.clientWidth) scroller.scrollTo({ left: end - scroller.clientWidth });
  };

  scroller.addEventListener("scroll", pin, { passive: true });
  return { build, update, reveal, cell: (slot, rank) => cells[slot]?.[rank], root: () => root };
};
