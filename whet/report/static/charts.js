"use strict";
// Charts(container, figures): the curves of a run as small multiples; figures are those of whet/report/curves.py.
//   .update(figures)  draws newer data and keeps open figures and zoom
//   .destroy()        removes the charts
// Markup: .charts > .bar (slider "Smoothing") and, for each figure, details.figure[data-name] > .panels > .panel, each
// with .panel-title, .legend (live values), .plot (uPlot) and, while the pointer is over it, the shared .chart-tip.
// Pale points are logged values (a pale band: lowest to highest of a bin), strong lines centred rolling means.
// A panel with constant values has no chart: p.constant below the figure names it.

const FOLDED = ["rl_speed", "rl_off_policy", "rl_critic", "rl_judge", "other"];
const PLOT_HEIGHT = 170;
const SMOOTHING = 1 / 15; // as in the PNG curves of report.md
const NUM_COLOURS = 6;
const DASHES = [[5, 4], [2, 3], [10, 4], [10, 3, 2, 3]];

function Charts(container, figures) {
  const state = { figures, share: SMOOTHING, sections: new Map(), sync: "charts-" + ++Charts.count };
  const tip = el("div", { class: "chart-tip", hidden: true });
  const slider = el("input", { type: "range", min: 0, max: 30, step: 1, value: Math.round(100 * SMOOTHING), "aria-label": "Smoothing" });
  const shown = el("output", {}, "");
  const label = () => { shown.textContent = state.share ? Math.round(100 * state.share) + " % of the run" : "off"; };
  slider.addEventListener("input", () => {
    state.share = slider.value / 100;
    label();
    for (const section of state.sections.values()) for (const panel of section.panels) panel.draw();
  });
  label();
  const note = el("span", { class: "note" }, "Points are logged values, lines rolling means. Drag to zoom, double-click to reset.");
  const body = el("div", {});
  container.classList.add("charts");
  container.replaceChildren(el("div", { class: "bar" }, el("label", {}, "Smoothing ", slider, " ", shown), note), body, tip);
  onTheme(() => { for (const section of state.sections.values()) for (const panel of section.panels) panel.plot.redraw(); });

  function update(newer) {
    state.figures = newer;
    const names = new Set(newer.map((figure) => figure.name));
    for (const [name, section] of state.sections) {
      if (!names.has(name)) { section.destroy(); state.sections.delete(name); }
    }
    for (const figure of newer) {
      if (!state.sections.has(figure.name)) state.sections.set(figure.name, chartSection(figure, state, tip));
      const section = state.sections.get(figure.name);
      body.append(section.node);
      section.update(figure);
    }
  }
  update(figures);
  return { update, destroy: () => { for (const section of state.sections.values()) section.destroy(); container.replaceChildren(); } };
}
Charts.count = 0;

/** One figure: a foldable grid of panels. Panels are built when it is open. */
function chartSection(figure, state, tip) {
  const grid = el("div", { class: "panels" });
  const constant = el("p", { class: "constant note" });
  const summary = el("summary", {}, el("h3", {}, figure.title));
  const node = el("details", { class: "figure", "data-name": figure.name }, summary, grid, constant);
  const section = { node, panels: [], update, destroy };
  let latest = figure;
  node.open = !FOLDED.includes(figure.name);
  node.addEventListener("toggle", () => { if (node.open) update(latest); });

  function update(newer) {
    latest = newer;
    const moving = newer.panels.filter((panel) => !isConstant(panel));
    const still = newer.panels.filter(isConstant);
    const said = still.map((panel) => panel.title + ": " + panel.series.map((series) => {
      const value = withUnit(series.values.find((value) => value !== null), panel.unit);
      return panel.series.length > 1 ? series.label + " " + value : value;
    }).join(", "));
    constant.textContent = visible(said.length ? "Never changed: " + said.join(" · ") : "");
    if (!node.open) return;
    const titles = moving.map(panelKey).join("\n");
    if (section.titles !== titles) {
      destroy();
      section.titles = titles;
      section.panels = moving.map((panel) => chartPanel(grid, panel, state, tip));
    } else {
      section.panels.forEach((panel, index) => panel.update(moving[index]));
    }
    grid.hidden = moving.length === 0;
  }
  function destroy() {
    for (const panel of section.panels) panel.destroy();
    section.panels = [];
    section.titles = null;
  }
  return section;
}

/** Say whether a series has a name of its own besides its panel's title: a reward, a reason, a metric of a wider panel. */
function isNamed(panel, series) { return series.label !== panel.title; }

function panelKey(panel) { return panel.title + "\t" + panel.series.map((series) => series.name + (series.other || "")).join("\t"); }

function isConstant(panel) {
  return panel.series.every((series) => {
    const values = (series.low || []).concat(series.values, series.high || []).filter((value) => value !== null);
    return values.length > 1 && values.every((value) => value === values[0]);
  }) && panel.series.every((series) => !series.other);
}

function withUnit(value, unit) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) < 1e-12) value = 0; // not -0
  if (unit === "share") return (100 * value).toLocaleString("en", { maximumFractionDigits: Math.abs(value) < 0.01 ? 3 : 1 }) + "%";
  if (unit === "s" || unit === "nats" || unit === "nats/token" || unit === "" || unit === "score") return shortNumber(Number(value.toPrecision(4)));
  return shortNumber(Math.abs(value) >= 100 ? Math.round(value) : Number(value.toPrecision(3)));
}

/** Axis labels: percent, 12k, or the plain number. */
function axisText(value, unit) {
  if (unit === "share") return Number((100 * value).toPrecision(6)) + "%";
  const size = Math.abs(value);
  if (size >= 1e6) return Number((value / 1e6).toPrecision(4)) + "M";
  if (size >= 1e4) return Number((value / 1e3).toPrecision(4)) + "k";
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  return String(Number(value.toPrecision(6)));
}

/** The mean over a centred window of points; the window shrinks at the ends, and missing values are skipped. */
function rollingMean(values, share) {
  const half = Math.floor((values.length * share) / 2);
  const means = [];
  let sum = 0, count = 0, low = 0, high = 0; // the window is [low, high)
  for (let i = 0; i < values.length; i++) {
    for (; high < Math.min(values.length, i + half + 1); high++) if (values[high] !== null) { sum += values[high]; count++; }
    for (; low < i - half; low++) if (values[low] !== null) { sum -= values[low]; count--; }
    means.push(values[i] === null || count === 0 ? null : half ? sum / count : values[i]);
  }
  return means;
}

/** Put the series of a panel on one axis of steps: [steps, then for each series: mean, raw, low, high]. */
function aligned(panel, share) {
  const steps = [...new Set(panel.series.flatMap((series) => series.steps))].sort((a, b) => a - b);
  const place = new Map(steps.map((step, index) => [step, index]));
  const spread = (series, values) => {
    const column = new Array(steps.length).fill(undefined); // undefined: not logged here, the line continues
    series.steps.forEach((step, index) => { column[place.get(step)] = values[index]; });
    return column;
  };
  const columns = panel.series.flatMap((series) => [
    spread(series, panel.smooth ? rollingMean(series.values, share) : series.values),
    spread(series, series.values),
    spread(series, series.low || []),
    spread(series, series.high || []),
  ]);
  return [steps, ...columns];
}

/** The runs of a panel: "" for its own, then the labels of the others. */
function runsOf(panel) { return [...new Set(["", ...panel.series.map((series) => series.other || "")])]; }

/** One metric of several runs: a colour for each run. Several metrics: a colour for each, and runs differ by their dashes. */
function colourOf(panel, index) {
  const names = [...new Set(panel.series.map((series) => series.name))];
  const place = names.length > 1 ? names.indexOf(panel.series[index].name) : runsOf(panel).indexOf(panel.series[index].other || "");
  return colour("series-" + ((place % NUM_COLOURS) + 1));
}

/** Draw other runs' series into the panels that both have; others: [{label, figures}]. */
function overlayFigures(own, others) {
  return own.map((figure) => ({ ...figure, panels: figure.panels.map((panel) => ({ ...panel, series: panel.series.concat(...others.map(({ label, figures }) => {
    const theirs = figures.filter((other) => other.name === figure.name).flatMap((other) => other.panels).find((other) => other.title === panel.title);
    return theirs ? theirs.series.map((series) => ({ ...series, other: label })) : [];
  })) })) }));
}

function chartPanel(grid, panel, state, tip) {
  const legend = el("div", { class: "legend" });
  const holder = el("div", { class: "plot" });
  const unit = panel.unit && panel.unit !== "share" && !panel.title.includes(panel.unit) ? el("span", { class: "unit" }, panel.unit) : "";
  const node = el("div", { class: "panel" }, el("div", { class: "panel-title" }, el("strong", {}, panel.title), " ", unit), legend, holder);
  grid.append(node);
  const self = { plot: null, update, draw, destroy };
  let data = aligned(panel, state.share);

  const values = panel.series.map((series, index) => {
    const dot = el("i", { class: series.other ? "key dashed" : "key" });
    const value = el("b", {});
    const named = panel.series.length > 1 || isNamed(panel, series);
    const name = [named ? series.label : "", series.other || ""].filter(Boolean).join(" · ");
    legend.append(el("span", { title: `${series.name}: ${series.meaning}` }, dot, el("span", { class: "name" }, name), " ", value));
    return { dot, value };
  });

  function showValues(index) {
    panel.series.forEach((series, s) => {
      const column = data[1 + 4 * s];
      let at = index === null || index === undefined ? column.length - 1 : index;
      while (at > 0 && (column[at] === undefined || column[at] === null)) at--;
      values[s].value.textContent = withUnit(column[at], panel.unit);
      values[s].dot.style.color = colourOf(panel, s);
    });
  }

  function seriesOptions() {
    const options = [{ label: "step" }];
    panel.series.forEach((series, index) => {
      const few = series.steps.length <= 30;
      const pale = () => colourOf(panel, index) + (few ? "cc" : "48");
      const strong = () => colourOf(panel, index);
      const none = { paths: () => null, points: { show: false } };
      const dash = series.other ? DASHES[(runsOf(panel).indexOf(series.other) - 1) % DASHES.length] : undefined;
      options.push({ stroke: strong, width: 1.8, spanGaps: true, dash, points: { show: false } });
      options.push({ stroke: pale, paths: () => null, points: { show: !series.other && !series.low, size: few ? 6 : 3, width: 0, fill: pale } });
      options.push({ ...none }, { ...none });
    });
    return options;
  }

  function range(_, low, high) {
    if (low === null) return [0, 1];
    if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
      [low, high] = high ? [Math.min(0, 2 * low), Math.max(0, 2 * high)] : [0, 1]; // not magnified to rounding noise
    }
    const margin = 0.06 * (high - low);
    return [low - margin, high + margin];
  }

  /** The pale band between lowest and highest values of thinned series. */
  function drawBands(plot) {
    const context = plot.ctx;
    panel.series.forEach((series, index) => {
      if (!series.low || series.other) return;
      const at = (column) => (i) => plot.valToPos(column[i], "y", true);
      const [low, high] = [data[3 + 4 * index], data[4 + 4 * index]];
      const rows = data[0].map((_, i) => i).filter((i) => low[i] !== undefined && low[i] !== null);
      context.save();
      context.beginPath();
      context.rect(plot.bbox.left, plot.bbox.top, plot.bbox.width, plot.bbox.height);
      context.clip();
      context.beginPath();
      for (const i of rows) context.lineTo(plot.valToPos(data[0][i], "x", true), at(high)(i));
      for (const i of rows.reverse()) context.lineTo(plot.valToPos(data[0][i], "x", true), at(low)(i));
      context.fillStyle = colourOf(panel, index) + "2e";
      context.fill();
      context.restore();
    });
  }

  function options() {
    const muted = () => colour("muted");
    const axis = { stroke: muted, font: "11px system-ui, sans-serif", ticks: { show: false } };
    return {
      width: Math.max(160, holder.clientWidth),
      height: PLOT_HEIGHT,
      series: seriesOptions(),
      legend: { show: false },
      scales: { x: { time: false }, y: { range } },
      axes: [
        { ...axis, grid: { show: false }, size: 24, space: 60, gap: 4, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6], values: (_, ticks) => ticks.map((tick) => axisText(tick, "")) },
        { ...axis, grid: { stroke: () => colour("line"), width: 1 }, size: (_, texts) => Math.max(46, 12 + 6.5 * Math.max(0, ...(texts || []).map((text) => text.length))), space: 34, gap: 4, values: (_, ticks) => ticks.map((tick) => axisText(tick, panel.unit)) },
      ],
      cursor: { sync: { key: state.sync }, points: { show: false }, y: false, drag: { x: true, y: false } },
      hooks: { drawAxes: [drawBands], setCursor: [onCursor] },
    };
  }

  function onCursor(plot) {
    const { idx, left, event } = plot.cursor;
    const inside = left !== null && left >= 0 && idx !== null;
    showValues(inside ? idx : null);
    if (!holder.matches(":hover")) return;
    tip.hidden = !inside;
    if (inside) showTip(plot, idx);
  }

  function showTip(plot, index) {
    const rows = panel.series.map((series, s) => {
      const raw = data[2 + 4 * s][index], mean = data[1 + 4 * s][index];
      const dot = el("i", { class: series.other ? "key dashed" : "key" });
      dot.style.color = colourOf(panel, s);
      const value = raw === undefined ? "–" : withUnit(raw, panel.unit) + (panel.smooth && state.share ? `  (mean ${withUnit(mean, panel.unit)})` : "");
      const name = series.label + (series.other ? " · " + series.other : "");
      return [el("div", { class: "tip-row" }, dot, el("span", {}, name), el("b", {}, value)), series.other ? "" : el("div", { class: "note" }, series.meaning)];
    });
    tip.replaceChildren(el("div", { class: "note" }, "step " + shortNumber(data[0][index])), ...rows.flat());
    const box = plot.over.getBoundingClientRect();
    const x = box.left + plot.cursor.left;
    const width = tip.offsetWidth;
    tip.style.left = Math.max(8, Math.min(window.innerWidth - width - 8, x + (x + width + 24 > window.innerWidth ? -width - 14 : 14))) + "px";
    tip.style.top = Math.max(8, Math.min(window.innerHeight - tip.offsetHeight - 8, box.top + 12)) + "px";
  }

  function update(newer) {
    panel = newer;
    draw();
  }
  function draw() {
    data = aligned(panel, state.share);
    const { min, max } = self.plot.scales.x;
    const before = self.plot.data[0];
    const zoomed = before.length && (min > before[0] || max < before[before.length - 1]);
    self.plot.setData(data, !zoomed);
    if (zoomed) self.plot.setScale("x", { min, max });
    showValues(null);
  }
  function destroy() {
    watcher.disconnect();
    self.plot.destroy();
    node.remove();
  }

  self.plot = new uPlot(options(), data, holder);
  holder.addEventListener("mouseleave", () => { tip.hidden = true; });
  const watcher = new ResizeObserver(() => {
    if (holder.clientWidth > 0) self.plot.setSize({ width: holder.clientWidth, height: PLOT_HEIGHT });
  });
  watcher.observe(holder);
  showValues(null);
  return self;
}
