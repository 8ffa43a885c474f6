"""What a page does when a reader points at a chart or clicks a run's name: the one script there is.

Charts are drawn without it.
"""

SCRIPT = r"""
(() => {
const tip = document.body.appendChild(document.createElement("div"));
tip.className = "tip"; tip.hidden = true;
const say = (v, percent) => v == null ? "\u2013" : percent ? (100 * v).toFixed(2) + " %" :
  Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));
const nearest = (xs, x) => {
  let a = 0, b = xs.length - 1;
  while (b - a > 1) { const m = (a + b) >> 1; if (xs[m] < x) a = m; else b = m; }
  return Math.abs(xs[a] - x) <= Math.abs(xs[b] - x) ? a : b;
};
const row = (name, value, colour, box) => {
  const line = document.createElement("div");
  if (colour) {
    const dot = line.appendChild(document.createElement("i"));
    dot.className = box ? "dot box" : "dot"; dot.style.setProperty("--c", colour);
  }
  line.appendChild(document.createElement("span")).textContent = name;
  line.appendChild(document.createElement("span")).textContent = value;
  return line;
};
const hidden = new Set();
const lines = (data, share) => {
  const x = data.x[0] + share * (data.x[1] - data.x[0]), rows = [];
  let near = null;
  for (const line of data.lines) {
    if (!line.x.length || hidden.has(line.run)) continue;
    // A bar ends at its epoch; a line has a point there.
    let at = nearest(line.x, x);
    if (line.fill) { at = line.x.findIndex(end => end >= x); if (at < 0) at = line.x.length - 1; }
    if (near == null) near = line.x[at];
    rows.push(row(line.name, say(line.y[at], data.percent),
      line.fill ? `var(--${line.fill})` : `var(--c${line.run % 8})`, line.fill));
  }
  const where = near == null ? "" : data.batches ? Math.round(2 ** near).toLocaleString("en")
    : +near.toPrecision(4);
  return [row((data.batches ? "batch " : "epoch ") + where, ""), ...rows];
};
const cell = (data, share, down) => {
  const column = Math.min(data.epochs.length - 1, Math.floor(share * data.epochs.length));
  const at = Math.min(data.names.length - 1, Math.floor(down * data.names.length));
  const value = say(data.cells[at][column]);
  return [row(data.names[at], ""), row("epoch " + data.epochs[column], value)];
};
for (const plot of document.querySelectorAll(".plot")) {
  const data = JSON.parse(plot.querySelector("script").textContent);
  const cross = plot.appendChild(document.createElement("div"));
  cross.className = "cross"; cross.hidden = true;
  const show = event => {
    const box = plot.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const down = Math.min(1, Math.max(0, (event.clientY - box.top) / box.height));
    tip.replaceChildren(...(data.lines ? lines(data, share) : cell(data, share, down)));
    cross.style.left = 100 * share + "%";
    tip.hidden = cross.hidden = false;
    const size = tip.getBoundingClientRect();
    const left = event.clientX + 16 + size.width > innerWidth
      ? event.clientX - 16 - size.width : event.clientX + 16;
    tip.style.left = Math.max(6, left) + "px";
    tip.style.top = Math.max(6, Math.min(event.clientY + 14, innerHeight - size.height - 6)) + "px";
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => { tip.hidden = cross.hidden = true; });
}
for (const button of document.querySelectorAll("button[data-run]")) {
  button.addEventListener("click", () => {
    const run = +button.dataset.run, off = !hidden.has(run);
    hidden[off ? "add" : "delete"](run);
    button.setAttribute("aria-pressed", String(!off));
    const parts = document.querySelectorAll(`svg [data-run="${run}"]`);
    for (const part of parts) part.toggleAttribute("hidden", off);
  });
}
})();
"""
