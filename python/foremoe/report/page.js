// Draws the page's figures with Plotly, as wide as their places: at first, when the scheme turns light or dark, and when
// the window changes its width.
"use strict";

(() => {
  const NARROW = 560; // px; below it the names of rows stand above their bars
  const ROW = 50; // px of such a row
  const figures = document.getElementById("figures").textContent;
  const config = { displayModeBar: false, doubleClick: false, showTips: false };

  // Replaces "var(--s1)" with the colour of that name in the current scheme: Plotly does not read CSS variables.
  const coloured = () => {
    const look = getComputedStyle(document.documentElement);
    const isVariable = (value) => typeof value === "string" && /^var\(--\w+\)$/.test(value);
    return JSON.parse(figures, (_, value) => (isVariable(value) ? look.getPropertyValue(value.slice(4, -1)).trim() : value));
  };

  const turnNarrow = ({ data, layout }) => {
    layout.xaxis.nticks = 5;
    if (layout.meta !== "rows") return;
    layout.height = layout.yaxis.ticktext.length * ROW + 52;
    for (const trace of data) if (trace.width) trace.width *= 0.7;
    const beside = [layout.yaxis, layout.yaxis2].filter((axis) => axis);
    const above = { showarrow: false, yanchor: "bottom", yshift: 9, xref: "paper" };
    layout.annotations = beside.flatMap((axis, side) =>
      axis.ticktext.map((text, row) => ({ ...above, text, y: row, x: side, xanchor: side ? "right" : "left" })),
    );
    for (const axis of beside) Object.assign(axis, { showticklabels: false, automargin: false });
  };

  // Texts beside marks, each shown where it meets neither a mark nor a text that is there already.
  const placeTexts = (place, data) => {
    const { xaxis, yaxis } = place._fullLayout;
    const traces = data.filter((trace) => trace.text);
    const position = (trace, i) => [xaxis.d2p(trace.x[i]), yaxis.d2p(trace.y[i])];
    const taken = traces.flatMap((trace) => trace.x.map((_, i) => position(trace, i)).map(([x, y]) => [x - 5, y - 5, x + 5, y + 5]));
    const meets = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
    const isFree = (box) =>
      box[0] >= 0 && box[1] >= 0 && box[2] <= xaxis._length && box[3] <= yaxis._length && !taken.some((other) => meets(box, other));
    const sides = [["top center", 0, -14], ["bottom center", 0, 14], ["middle right", 13, 0], ["middle left", -13, 0]];
    for (const trace of traces) {
      trace.textposition = trace.text.map((text, i) => {
        const [x, y] = position(trace, i);
        const half = 4 + 3.5 * text.length;
        for (const [side, dx, dy] of sides) {
          const box = [x + dx - half, y + dy - 8, x + dx + half, y + dy + 8];
          if (isFree(box)) return taken.push(box) && side;
        }
        trace.text[i] = "";
        return "top center";
      });
    }
  };

  const drawAll = () => {
    for (const [id, { data, layout }] of Object.entries(coloured())) {
      const place = document.getElementById(id);
      layout.width = place.clientWidth;
      if (layout.width < NARROW) turnNarrow({ data, layout });
      Plotly.react(place, data, layout, config);
      if (data.some((trace) => trace.text)) {
        placeTexts(place, data);
        Plotly.react(place, data, { ...layout, datarevision: 1 }, config);
      }
    }
  };

  document.documentElement.classList.add("drawn");
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    requestAnimationFrame(drawAll);
  });
})();
