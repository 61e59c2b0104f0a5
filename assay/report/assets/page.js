// Draws every chart of the page with uPlot, from the numbers in #charts; again when the width or the colour scheme changes.
(() => {
  "use strict";
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const faint = hex => hex + "2e";
  const drawn = new Map();

  const short = value => {
    if (value == null) return "unknown";
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : String(+value.toPrecision(5));
  };

  function options(curves, width) {
    const series = [{ label: "step", value: (_, x) => (x == null ? "–" : String(x)) }], bands = [];
    curves.forEach((curve, i) => {
      const stroke = colour("--c" + (i % 4));
      const value = (_, y) => (y == null ? "–" : short(y));
      series.push({ label: curve.label, stroke, width: 1.6, value, points: { show: curve.marked, size: 5, fill: stroke } });
      if (curve.low) {
        const edge = { stroke: faint(stroke), width: 1, value, points: { show: false } };
        series.push({ label: "low", ...edge }, { label: "high", ...edge });
        bands.push({ series: [series.length - 1, series.length - 2], fill: faint(stroke) });
      }
    });
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { stroke: colour("--rule"), width: 1, size: 4 },
      font: "11px " + getComputedStyle(document.body).fontFamily };
    return { width, height: 220, series, bands, scales: { x: { time: false } }, cursor: { drag: { x: true, y: false } },
      axes: [{ ...axis, size: 30 }, { ...axis, size: 58, values: (_, ticks) => ticks.map(tick => (tick == null ? "" : short(tick))) }] };
  }

  function draw(place) {
    const curves = charts[place.dataset.chart], width = Math.floor(place.clientWidth);
    if (!curves || width === 0) return;
    if (drawn.has(place)) drawn.get(place).destroy();
    const tables = curves.flatMap(curve => [curve.y, ...(curve.low ? [curve.low, curve.high] : [])].map(values => [curve.x, values]));
    drawn.set(place, new uPlot(options(curves, width), uPlot.join(tables), place));
  }

  const places = [...document.querySelectorAll("[data-chart]")];
  const all = () => places.forEach(draw);
  all();
  document.querySelectorAll("details").forEach(fold => fold.addEventListener("toggle", () => fold.querySelectorAll("[data-chart]").forEach(draw)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(all, 120); });
})();
