"use strict";
// Transcripts side by side, filtered and paged, and the pass@k curves.
(() => {
  const names = pageData("names");
  const problems = pageData("transcripts");
  const images = pageData("pictures");
  const curves = pageData("curves");
  const scored = pageData("scored");
  const pairs = pageData("pairs"); // [index of the earlier model, index of the later one]
  const PAGE = 10;
  const VERDICTS = ["fixed", "broken", "both right", "both wrong"];
  const find = (id) => document.getElementById(id);
  let first = 0;
  let kept = [];

  /** Change of a problem's greedy verdict from one model of a pair to the other. */
  function verdict(problem, pair) {
    const [before, after] = pairs[pair].map((place) => problem.columns[place].rows[0].correct);
    if (before) return after ? "both right" : "broken";
    return after ? "fixed" : "both wrong";
  }

  function options(select, rows) {
    for (const [value, text] of rows) select.append(el("option", { value }, text));
  }

  const haystacks = new Map();
  function haystack(problem) {
    if (!haystacks.has(problem)) {
      const texts = problem.columns.flatMap((column) => column.rows.map((row) => `${row.thinking || row.text || ""}\n${row.answer || ""}`));
      haystacks.set(problem, [problem.uid, problem.prompt, problem.gold || "", ...texts].join("\n").toLowerCase());
    }
    return haystacks.get(problem);
  }

  function filter() {
    const words = find("search").value.toLowerCase().trim();
    const other = Number(find("other").value);
    const wanted = find("verdict").value;
    const format = find("format").value;
    kept = problems.filter(
      (problem) =>
        (!wanted || verdict(problem, other) === wanted) &&
        (!format || problem.columns.some((column) => column.rows.some((row) => row.format === format))) &&
        (!words || haystack(problem).includes(words)),
    );
    first = 0;
    show();
  }

  function badge(text, kind) {
    return el("span", { class: `badge ${kind || ""}` }, text);
  }

  const FORMAT_KINDS = { perfect: "good", partial: "warn", none: "bad" };
  const known = (value, write) => (value === null || value === undefined ? "not recorded" : write(value));

  function completion(row) {
    const parts = el("div", {});
    const badges = el("div", { class: "bar" });
    if (row.correct !== null) badges.append(badge((row.sample === "greedy" ? "greedy: " : `sample ${row.sample}: `) + (row.correct ? "right" : "wrong"), row.correct ? "good" : "bad"));
    badges.append(badge(`format ${row.format}`, FORMAT_KINDS[row.format]), badge(`${row.tokens} tokens, ${row.thinking_tokens} thinking`, "muted"));
    // Measured, not judged: the third of the seed's verdicts.
    if (row.logprob !== null && row.logprob !== undefined) badges.append(badge(`sure of its answer ${Math.exp(row.logprob).toFixed(2)}`, "muted"));
    if (row.hedges) badges.append(badge(`${row.hedges} hedge${row.hedges === 1 ? "" : "s"}`, "muted"));
    if (row.cut) badges.append(badge("cut off", "warn"));
    parts.append(badges);
    if (row.thinking !== undefined) {
      parts.append(el("p", { class: "part" }, "thinking"), el("pre", {}, row.thinking || "(empty)"));
    } else {
      parts.append(el("p", { class: "part" }, "raw response"), el("pre", {}, row.text || "(empty)"));
    }
    const kind = row.correct === null ? "" : row.correct ? "right" : "wrong";
    parts.append(el("p", { class: "part" }, "answer"), el("pre", { class: `answer ${kind}` }, row.answer === null ? "(none found)" : row.answer));
    if (row.left_out) parts.append(el("p", { class: "note" }, `${row.left_out} more characters are not shown`));
    const probability = known(row.mean_logprob, (value) => Math.exp(value).toFixed(3));
    const sure = known(row.logprob, (value) => `${value.toFixed(3)} nats per token (probability ${Math.exp(value).toFixed(3)})`);
    parts.append(
      el("p", { class: "note" }, `mean token probability ${probability}; answer log-probability ${sure}; hedges ${known(row.hedges, String)}; revisions ${known(row.revisions, String)}`),
    );
    return parts;
  }

  function side(column, place, judged) {
    const node = el("div", { class: `side side-${place + 1}` }, el("h3", {}, names[place]), pictures(column.boards.map((number) => images[number])));
    node.append(completion(column.rows[0]));
    const share = column.votes === null ? "" : `; largest vote ${(100 * column.votes).toFixed(0)} %`;
    const right = judged ? `${column.right} of ${column.count} samples right${share}` : `${column.count} samples${share}`;
    node.append(el("p", { class: "note" }, right));
    if (column.rows.length > 1) {
      const more = el("details", {}, el("summary", {}, `${column.rows.length - 1} sampled`));
      more.addEventListener("toggle", () => {
        if (more.open && more.children.length === 1) for (const row of column.rows.slice(1)) more.append(completion(row));
      });
      node.append(more);
    }
    return node;
  }

  function card(problem) {
    const node = el("article", { class: "problem" }, pictures(problem.images.map((number) => images[number])), el("p", { class: "prompt" }, problem.prompt));
    const facts = el("div", { class: "bar" });
    pairs.forEach(([a, b], pair) => {
      const text = verdict(problem, pair);
      const which = pairs.length > 1 ? `${names[a]} → ${names[b]}, greedy: ` : "greedy: ";
      facts.append(badge(which + text, { fixed: "good", broken: "bad" }[text] || "muted"));
    });
    if (problem.gold !== null) facts.append(el("span", {}, "gold: "), el("code", {}, problem.gold));
    for (const [name, value] of Object.entries(problem.labels)) facts.append(el("span", { class: "note" }, `${name}: ${value}`));
    facts.append(el("span", { class: "note" }, problem.uid));
    node.append(facts, el("div", { class: "columns" }, ...problem.columns.map((column, place) => side(column, place, problem.gold !== null))));
    return node;
  }

  function show() {
    find("transcripts").replaceChildren(...kept.slice(first, first + PAGE).map(card));
    if (!kept.length) find("transcripts").append(el("p", { class: "muted" }, "nothing matches"));
    find("place").textContent = kept.length ? `${first + 1}–${Math.min(first + PAGE, kept.length)} of ${kept.length}` : "0";
    find("previous").disabled = first === 0;
    find("next").disabled = first + PAGE >= kept.length;
  }

  function turn(by) {
    first += by;
    show();
    find("search").scrollIntoView({ block: "start" });
  }

  /** Right answers over the steps of a run's checkpoints, each line in its band. */
  let overSteps = null;
  function drawSteps() {
    const box = find("steps");
    const told = pageData("steps");
    if (!box || !told) return;
    if (overSteps) overSteps.destroy();
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") } };
    const share = (_, value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`);
    const series = [{ label: "step" }];
    const columns = [told.steps];
    const bands = [];
    Object.entries(told.lines).forEach(([label, line], place) => {
      const stroke = colour(`series-${place + 1}`);
      bands.push({ series: [series.length + 2, series.length + 1], fill: `${stroke}2e` });
      series.push({ label, stroke, width: 2, points: { show: true }, value: share });
      for (const end of ["low", "high"]) series.push({ label: `${label}, ${end}`, stroke: "transparent", points: { show: false }, value: share });
      columns.push(line.mean, line.low, line.high);
    });
    overSteps = new uPlot(
      {
        width: Math.max(260, box.clientWidth - 30),
        height: 280,
        scales: { x: { time: false }, y: { range: [0, 1.02] } },
        axes: [
          { ...axis, label: "step", labelSize: 20, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 1e5] },
          { ...axis, values: (_, ticks) => ticks.map((tick) => `${Math.round(100 * tick)} %`), size: 56 },
        ],
        bands,
        series,
      },
      columns,
      box,
    );
  }

  let chart = null;
  function draw() {
    drawSteps();
    const box = find("curves");
    const lines = Object.values(curves);
    if (!box || !lines.length) return;
    if (chart) chart.destroy();
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line") } };
    const series = names.map((label, place) => ({
      label,
      stroke: colour(`series-${(place % 6) + 1}`),
      width: 2,
      points: { show: lines[0].length <= 32 },
      value: (_, value) => (value === null ? "–" : `${(100 * value).toFixed(1)} %`),
    }));
    chart = new uPlot(
      {
        width: Math.max(260, box.clientWidth - 30),
        height: 260,
        scales: { x: { time: false }, y: { range: [0, 1.02] } },
        axes: [
          { ...axis, label: "k", labelSize: 20, incrs: [1, 2, 4, 5, 8, 10, 16, 32, 64, 128] },
          { ...axis, values: (_, ticks) => ticks.map((tick) => `${Math.round(100 * tick)} %`), size: 56 },
        ],
        series: [{ label: "k" }, ...series],
      },
      [lines[0].map((_, place) => place + 1), ...names.map((name) => curves[name])],
      box,
    );
  }

  options(find("other"), pairs.map(([a, b], pair) => [pair, `${names[b]} against ${names[a]}`]));
  options(find("verdict"), [["", "all verdicts"], ...VERDICTS.map((text) => [text, text])]);
  options(find("format"), [["", "all formats"], ...["perfect", "partial", "none"].map((text) => [text, `format ${text}`])]);
  find("verdict").hidden = !scored;
  find("other").hidden = !scored || names.length < 3;
  for (const id of ["other", "verdict", "format"]) find(id).addEventListener("change", filter);
  find("search").addEventListener("input", filter);
  find("previous").addEventListener("click", () => turn(-PAGE));
  find("next").addEventListener("click", () => turn(PAGE));
  onTheme(draw);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) draw();
    width = innerWidth;
  });
  filter();
  draw();
})();
