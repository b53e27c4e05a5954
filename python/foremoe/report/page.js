// Draws the page's figures with Plotly, in the colours of the style sheet, as wide as their places: at first, when the
// scheme turns light or dark, and when the window changes its width.
"use strict";

(() => {
  const NARROW = 560; // px; below it the names of rows stand above their bars
  const ROW = 50; // px of such a row
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = { displayModeBar: false, doubleClick: false, showTips: false };

  // A copy with colours for their names: "--s1" wherever a key speaks of colour.
  const coloured = (value, look, key = "") => {
    if (Array.isArray(value)) return value.map((item) => coloured(item, look, key));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, look, key || (/color/i.test(k) ? k : ""))]));
    }
    return key && typeof value === "string" && value.startsWith("--") ? look.getPropertyValue(value).trim() : value;
  };

  const turnNarrow = (data, layout, rows) => {
    layout.xaxis.nticks = 5;
    if (!rows) return;
    layout.height = rows * ROW + layout.margin.t + layout.margin.b;
    for (const trace of data) if (typeof trace.width === "number") trace.width *= 0.7;
    const beside = [layout.yaxis, layout.yaxis2].filter((axis) => axis);
    layout.annotations = beside.flatMap((axis, side) =>
      axis.ticktext.map((text, row) => ({
        text, font: axis.tickfont, showarrow: false, y: row, yanchor: "bottom", yshift: 9,
        xref: "paper", x: side, xanchor: side ? "right" : "left",
      })),
    );
    for (const axis of beside) Object.assign(axis, { showticklabels: false, automargin: false });
  };

  // Texts beside marks, each shown where it meets neither a mark nor a text that is there already.
  const placeTexts = (place, data) => {
    const { xaxis, yaxis } = place._fullLayout;
    const marks = data.flatMap((trace) => (trace.text ? trace.x.map((x, i) => [xaxis.d2p(x), yaxis.d2p(trace.y[i])]) : []));
    const taken = marks.map(([x, y]) => [x - 5, y - 5, x + 5, y + 5]);
    const meets = (a, b) => a[0] < b[2] && b[0] < a[2] && a[1] < b[3] && b[1] < a[3];
    const places = [["top center", 0, -14], ["bottom center", 0, 14], ["middle right", 13, 0], ["middle left", -13, 0]];
    let mark = 0;
    for (const trace of data.filter((t) => t.text)) {
      trace.textposition = [];
      trace.text = trace.text.map((text, i) => {
        const [x, y] = marks[mark++];
        const half = 4 + 3.5 * text.length;
        for (const [name, dx, dy] of places) {
          const box = [x + dx - half, y + dy - 8, x + dx + half, y + dy + 8];
          if (taken.some((other) => meets(box, other)) || box[0] < 0 || box[1] < 0 || box[2] > xaxis._length || box[3] > yaxis._length) continue;
          taken.push(box);
          trace.textposition[i] = name;
          return text;
        }
        trace.textposition[i] = "top center";
        return "";
      });
    }
  };

  const draw = (id) => {
    const place = document.getElementById(id);
    const look = getComputedStyle(document.documentElement);
    const { data, layout } = coloured(figures[id], look);
    layout.width = place.clientWidth;
    if (layout.width < NARROW) turnNarrow(data, layout, figures[id].rows);
    Plotly.react(place, data, layout, config);
    if (data.some((trace) => trace.mode === "markers+text")) {
      placeTexts(place, data);
      Plotly.react(place, data, { ...layout, datarevision: 1 }, config);
    }
  };

  const drawAll = () => Object.keys(figures).forEach(draw);
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
