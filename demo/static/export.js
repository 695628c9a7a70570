// Files out of the page: the trace as it came, and the lattice as a picture that needs no style sheet.

const INLINED = [
  "display", "fill", "fill-opacity", "font-family", "font-size", "font-style", "font-weight", "opacity", "paint-order", "stroke",
  "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "stroke-opacity", "stroke-width", "text-anchor",
];

const standalone = (root, title) => {
  const copy = root.cloneNode(true);
  const originals = [root, ...root.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, i) => {
    const style = getComputedStyle(originals[i]);
    node.setAttribute("style", INLINED.map((name) => `${name}:${style.getPropertyValue(name)}`).join(";"));
    for (const name of ["class", "role", "tabindex", "aria-label", "aria-selected", "aria-hidden"]) node.removeAttribute(name);
  });
  copy.lastElementChild.removeAttribute("transform");
  const paper = getComputedStyle(root).getPropertyValue("--paper");
  copy.prepend(svg("title", {}, title), svg("rect", { width: "100%", height: "100%", fill: paper }));
  copy.setAttribute("xmlns", SVG);
  return new XMLSerializer().serializeToString(copy);
};

const download = (name, type, content) => {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const anchor = html("a", { href: url, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
};

const fileName = (title, ending) =>
  (title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 40) || "trace") + "." + ending;
