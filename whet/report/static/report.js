"use strict";
// The run report: tabs, charts, the sample browser over embedded chunks, and the table of steps.

const TABLE_ROWS = 20;
const TABLE_COLUMNS = [
  "rl/reward_mean", "rl/reward_std", "rl/completion_tokens", "rl/kl", "rl/reward/",
  "sft/loss", "sft/validation_loss", "sft/lr", "sft/grad_norm", "sft/tokens_per_second",
  "dpo/loss", "dpo/accuracy", "dpo/margin", "dpo/validation_accuracy", "dpo/lr", "dpo/grad_norm",
  "rft/loss", "rft/right", "rft/covered", "rft/lr", "rft/grad_norm",
  "eval/pass@1", "eval/greedy",
];
const KEPT_CHUNKS = 24;

/** Open gzip in base64 and read it as JSON. */
async function unpack(name) {
  if (typeof DecompressionStream === "undefined") throw new Error("this browser cannot open compressed data; use a newer one");
  const text = atob(pageData(name));
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

/** The samples of a part of this page, as a source for browser.js. */
function EmbeddedSource(part, info) {
  const cache = new Map(); // chunk -> its rows, most recently used last
  let columns = null, places = null, vocabulary = null, shown = null, search = 0;

  async function load() {
    if (columns) return;
    const opened = await unpack("columns-" + part);
    places = new Map(opened.id.map((id, place) => [String(id), place]));
    shown = await unpack("pictures-" + part);
    vocabulary = info.has_logprobs ? await unpack("vocabulary-" + part) : {};
    columns = opened;
  }
  async function chunk(number) {
    const rows = cache.get(number) || unpack(`chunk-${part}-${number}`);
    cache.delete(number);
    cache.set(number, rows);
    if (cache.size > KEPT_CHUNKS) cache.delete(cache.keys().next().value);
    return rows;
  }
  function chunkOf(place) {
    let number = info.starts.length - 1;
    while (info.starts[number] > place) number--;
    return number;
  }
  async function rowAt(place) {
    const number = chunkOf(place);
    return (await chunk(number))[place - info.starts[number]];
  }
  function placeOf(id) {
    if (!places.has(String(id))) throw new Error(`sample ${id} is not on this page`);
    return places.get(String(id));
  }
  function within(value, low, high) {
    return (low === null && high === null) || (value !== null && value !== undefined && (low === null || value >= low) && (high === null || value <= high));
  }
  function matching(q) {
    const score = q.reward ? columns.scores[q.reward] || [] : columns.reward;
    const found = [];
    for (let i = 0; i < columns.id.length; i++) {
      if (within(columns.step[i], q.step_min, q.step_max) && within(score[i], q.reward_min, q.reward_max) && (q.correct === null || columns.correct[i] === q.correct)
        && (!q.uid || columns.uid[i].startsWith(q.uid)) && (!q.finish || columns.finish_reason[i] === q.finish)) found.push(i);
    }
    const key = { reward: score, length: columns.num_completion_tokens, advantage: columns.advantage }[q.order];
    const sign = q.descending ? -1 : 1;
    const missing = (value) => value === null || value === undefined;
    if (key) found.sort((a, b) => (missing(key[a]) || missing(key[b]) ? missing(key[a]) - missing(key[b]) : sign * (key[a] - key[b])) || a - b);
    else if (q.descending) found.reverse();
    return found;
  }
  /** Keep the samples whose texts contain the words; every chunk is opened once, in order. */
  async function searched(found, text) {
    const mine = ++search;
    const wanted = text.toLowerCase();
    const hits = new Set();
    const byChunk = new Map();
    for (const place of found) {
      const number = chunkOf(place);
      if (!byChunk.has(number)) byChunk.set(number, []);
      byChunk.get(number).push(place);
    }
    for (const [number, members] of byChunk) {
      const rows = cache.has(number) ? await chunk(number) : await unpack(`chunk-${part}-${number}`);
      if (mine !== search) return [];
      for (const place of members) {
        const row = rows[place - info.starts[number]];
        if ([row.completion, row.prompt, row.answer].some((field) => field.toLowerCase().includes(wanted))) hits.add(place);
      }
    }
    return found.filter((place) => hits.has(place));
  }
  async function query(q) {
    await load();
    let found = matching(q);
    if (q.text) found = await searched(found, q.text);
    const rows = found.slice(q.offset, q.offset + q.limit).map((i) => ({
      id: columns.id[i], step: columns.step[i], uid: columns.uid[i], index: columns.index[i], reward: columns.reward[i],
      rewards: Object.fromEntries(info.rewards.map((name) => [name, columns.scores[name][i]])), advantage: columns.advantage[i],
      num_tokens: columns.num_completion_tokens[i], finish_reason: columns.finish_reason[i], snippet: columns.snippet[i], asked: columns.asked[i], correct: columns.correct[i],
    }));
    return { rows, total: found.length, indexed: info.num_samples };
  }
  async function sample(id) {
    await load();
    const row = await rowAt(placeOf(id));
    return { ...row, images: row.images.map((number) => shown[number]), pieces: row.completion_ids ? row.completion_ids.map((token) => vocabulary[token]) : null };
  }
  async function group(id) {
    await load();
    const place = placeOf(id);
    const same = (i) => columns.uid[i] === columns.uid[place] && columns.step[i] === columns.step[place];
    return columns.id.filter((_, i) => same(i));
  }
  return { info: async () => info, query, sample, group };
}

/** The table of steps, newest page last: one row for each step, or for each bin if the run is long. */
function stepTable(container, figures) {
  const series = figures.flatMap((figure) => figure.panels).flatMap((panel) => panel.series.map((item) => ({ ...item, unit: panel.unit }))).filter((item) => !item.other);
  const columns = TABLE_COLUMNS.flatMap((name) => series.filter((item) => item.name === name || (name.endsWith("/") && item.name.startsWith(name))));
  const chosen = columns.length ? columns : series.slice(0, 8);
  const values = chosen.map((item) => new Map(item.steps.map((step, index) => [step, item.values[index]])));
  const steps = [...new Set(chosen.flatMap((item) => item.steps))].sort((a, b) => a - b);
  const thinned = chosen.some((item) => item.low);
  let page = 0;
  const said = el("p", { class: "found note" });
  const turn = (by, text) => el("button", { type: "button", onclick: () => { page += by; draw(); } }, text);
  const [back, on] = [turn(-1, "‹"), turn(1, "›")];
  const body = el("tbody", {});
  const label = (item) => (item.name.startsWith("rl/reward/") ? "reward: " + item.label : item.label);
  const head = el("tr", {}, el("th", { class: "number" }, "step"), ...chosen.map((item) => el("th", { class: "number", title: item.meaning }, label(item))));
  function draw() {
    const shown = steps.slice(page * TABLE_ROWS, (page + 1) * TABLE_ROWS);
    body.replaceChildren(...shown.map((step) => el("tr", {}, el("td", { class: "number" }, shortNumber(step)),
      ...values.map((column, index) => el("td", { class: "number" }, column.has(step) ? withUnit(column.get(step), chosen[index].unit) : "")))));
    const last = page * TABLE_ROWS + shown.length;
    said.textContent = `${shortNumber(page * TABLE_ROWS + 1)}–${shortNumber(last)} of ${shortNumber(steps.length)} ${thinned ? "bins of steps (means)" : "steps"}`;
    back.disabled = page === 0;
    on.disabled = last >= steps.length;
  }
  container.replaceChildren(el("div", { class: "bar pager" }, said, back, on), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), body)));
  draw();
}

function showPart(sections, index) {
  for (const section of sections) section.hidden = section !== sections[index];
  for (const tab of document.querySelectorAll("#tabs button")) tab.setAttribute("aria-selected", Number(tab.dataset.part) === index);
  const section = sections[index];
  if (section.dataset.built) return;
  section.dataset.built = "yes";
  const { figures, samples } = pageData("part-" + index);
  const [curves, browser, table] = [".curve-area", ".browser-area", ".table-area"].map((name) => section.querySelector(name));
  if (curves) Charts(curves, figures);
  if (table) stepTable(table, figures);
  if (browser) Browser(browser, EmbeddedSource(index, samples), sections.length > 1 ? "sample" + index : "sample");
  const headings = [...section.querySelectorAll("h2[data-jump]")];
  section.querySelector(".jump").append(...headings.map((heading) => el("button", { type: "button", onclick: () => heading.scrollIntoView({ behavior: "smooth" }) }, heading.dataset.jump)));
}

function startReport() {
  const sections = [...document.querySelectorAll(".part")];
  for (const tab of document.querySelectorAll("#tabs button")) {
    tab.addEventListener("click", () => { hashValue("part", tab.dataset.part); showPart(sections, Number(tab.dataset.part)); });
  }
  const asked = hashValue("part");
  const first = asked ? Number(asked) || 0 : pageData("start");
  showPart(sections, Math.min(sections.length - 1, Math.max(0, first)));
}
startReport();
