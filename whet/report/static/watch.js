"use strict";
// The live page of one run: polls the server every two seconds, and passes new data to charts.js and browser.js.

const POLL_MS = 2000;
const HIDDEN_POLL_MS = 15000;
const THINNED_MS = 30000; // long curves arrive thinned and must be requested whole, but not at every poll
const RUN = pageData("watch").run;

const OTHERS_MS = 30000;

const live = { cursor: "", figures: null, others: new Map(), charts: null, wholeAt: 0, browser: null, info: null, empty: 0, yet: "", timer: 0 };

/** Query the server; an unsuccessful response becomes an error with its reason. */
async function ask(path, options) {
  const query = new URLSearchParams({ run: RUN });
  for (const [name, value] of Object.entries(options || {})) {
    if (value !== null && value !== "") query.set(name, typeof value === "string" ? value : JSON.stringify(value));
  }
  const response = await fetch(`/api/${path}?${query}`, { credentials: "same-origin" });
  if (!(response.headers.get("content-type") || "").includes("json")) throw new Error((await response.text()).trim());
  const content = await response.json();
  if (!response.ok) throw new Error(content.error);
  return content;
}

/** The samples of the run for browser.js. A search continues until a page is full; a newer query cancels it. */
function HttpSource(note) {
  let latest = 0;
  let search = { key: "", rows: [], next: null, done: false };
  async function query(question) {
    const { offset, limit, ...filters } = question;
    const asked = ++latest;
    if (!filters.text) {
      note("");
      return ask("samples", question);
    }
    const key = JSON.stringify(filters);
    if (search.key !== key || offset === 0) search = { key, rows: [], next: null, done: false };
    const own = search;
    let indexed = 0;
    while (!own.done && own.rows.length <= offset + limit && asked === latest) {
      const answer = await ask("samples", { ...filters, limit, after: own.next });
      own.rows.push(...answer.rows);
      own.next = answer.next;
      own.done = answer.next === null;
      indexed = answer.indexed;
      if (asked !== latest) break;
      const read = `${shortNumber(answer.searched)} of ${shortNumber(answer.total)} samples read`;
      note(own.done ? `Searched all ${shortNumber(answer.total)}: ${shortNumber(own.rows.length)} found.` : `${shortNumber(own.rows.length)} found so far, ${read}; further pages continue.`);
    }
    return { rows: own.rows.slice(offset, offset + limit), total: own.rows.length, indexed: indexed || live.info.num_samples };
  }
  return {
    info: () => ask("info"),
    query,
    sample: (id) => ask("sample", { id }),
    group: (id) => ask("group", { id }),
  };
}

function node(id) { return document.getElementById(id); }

function showStatus(status) {
  live.yet = status.kind === "finished" ? "" : " yet";
  node("status").className = "status " + status.kind;
  node("status-text").textContent = visible(status.text);
  document.title = `${status.num_steps ? Math.floor((100 * status.step) / status.num_steps) + " % · " : ""}${document.querySelector("h1").textContent}`;
}

function showWarnings(warnings) {
  node("warnings").hidden = warnings.length === 0;
  node("warning-list").replaceChildren(...warnings.map(({ step, text }) => el("li", {}, el("strong", {}, `step ${shortNumber(step)}: `), text)));
}

function showHeadline(cards) {
  node("headline").replaceChildren(...cards.map((card) => el("div", { class: "card", title: card.meaning }, el("div", { class: "value" }, card.value), el("div", { class: "label" }, card.label))));
}

/** Add new points to the curves; false if they do not directly follow: then all points are needed. */
function appendPoints(figures, newer) {
  const known = new Map(figures.flatMap((figure) => figure.panels.flatMap((panel) => panel.series.map((series) => [figure.name + "\t" + series.name, series]))));
  const pairs = newer.flatMap((figure) => figure.panels.flatMap((panel) => panel.series.map((series) => [known.get(figure.name + "\t" + series.name), series])));
  if (pairs.some(([own, series]) => !own || own.low || series.low || own.steps[own.steps.length - 1] >= series.steps[0])) return false;
  for (const [own, series] of pairs) {
    own.steps.push(...series.steps);
    own.values.push(...series.values);
  }
  return true;
}

async function showCurves(state) {
  if (state.whole) {
    live.figures = state.figures;
    live.wholeAt = Date.now();
  } else if (state.cursor === live.cursor) {
    return;
  } else if (!appendPoints(live.figures, state.figures)) {
    const thinned = live.figures.some((figure) => figure.panels.some((panel) => panel.series.some((series) => series.low)));
    if (thinned && Date.now() - live.wholeAt < THINNED_MS) return; // the cursor stays, so these rows are sent again
    const whole = await ask("state");
    live.cursor = "";
    return showCurves(whole);
  }
  live.cursor = state.cursor;
  node("no-curves").hidden = live.figures.length > 0;
  node("no-curves").textContent = `No metrics logged${live.yet}.`;
  drawCurves();
}

function drawCurves() {
  const shown = overlayFigures(live.figures || [], [...live.others].map(([label, figures]) => ({ label, figures })));
  if (live.charts) live.charts.update(shown);
  else if (shown.length) live.charts = Charts(node("charts"), shown);
}

/** Load the curves of the runs that are ticked, and draw them beside this run's. */
async function showOthers() {
  const ticked = [...document.querySelectorAll("input.overlay:checked")].map((box) => box.value);
  if (!ticked.length && !live.others.size) return;
  live.others = new Map(await Promise.all(ticked.map(async (name) => [name, (await ask("state", { run: name })).figures])));
  drawCurves();
}

function showSamples(info) {
  const before = live.info;
  live.info = info;
  const damaged = info.num_damaged ? ` ${shortNumber(info.num_damaged)} damaged lines are skipped.` : "";
  const early = info.tags ? "" : " Thinking, answer and single tokens are shown separately once the run has a checkpoint.";
  if (info.num_samples === 0) {
    live.empty += 1; // the first responses come before the file was read
    node("samples-note").textContent = (live.empty < 3 ? "Reading the completions …" : `No completions logged${live.yet}.`) + damaged;
    if (live.browser) live.browser.destroy();
    live.browser = null;
    return;
  }
  if (!live.browser || info.rewards.join("\n") !== before.rewards.join("\n") || !info.tags !== !before.tags) {
    if (live.browser) live.browser.destroy();
    openBrowser((early + damaged).trim());
    return;
  }
  if (info.num_indexed === before.num_indexed && info.generation === before.generation) return;
  const isAtStart = node("samples").querySelector(".page-back").disabled && node("samples").querySelector(".samples").scrollTop === 0;
  const isSearching = node("samples").querySelector("[name=text]").value !== "";
  if (info.generation !== before.generation || (isAtStart && !isSearching)) refresh();
  else node("fresh").hidden = false;
  node("fresh").textContent = "Show new samples";
}

function refresh() {
  node("fresh").hidden = true;
  live.browser.refresh();
}

/** Open the sample browser with the newest samples first: it starts with the oldest, so its order is reversed once. */
function openBrowser(remark) {
  const source = HttpSource((text) => { node("samples-note").textContent = text + (text ? "" : remark); });
  const query = source.query;
  source.query = (question) => {
    source.query = query;
    node("samples").querySelector(".direction").click();
    return query({ ...question, descending: true });
  };
  live.browser = Browser(node("samples"), source);
}

async function look() {
  clearTimeout(live.timer);
  try {
    const [state, info] = await Promise.all([ask("state", { cursor: live.cursor }), ask("info")]);
    node("connection").hidden = true;
    showStatus(state.status);
    showWarnings(state.warnings);
    showHeadline(state.headline);
    await showCurves(state);
    showSamples(info);
  } catch (error) {
    const reason = error instanceof TypeError ? "no answer: whet watch has ended, or the connection is lost" : error.message;
    node("connection").textContent = visible(reason) + " — the page may be out of date; retrying.";
    node("connection").hidden = false;
  }
  live.timer = setTimeout(look, document.hidden ? HIDDEN_POLL_MS : POLL_MS);
}

node("fresh").addEventListener("click", refresh);
for (const button of document.querySelectorAll("[data-to]")) {
  button.addEventListener("click", () => node(button.dataset.to).scrollIntoView({ behavior: "smooth", block: "start" }));
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
look();
for (const box of document.querySelectorAll("input.overlay")) box.addEventListener("change", () => showOthers().catch((error) => { box.checked = false; box.title = visible(error.message); }));
showOthers().catch(() => {}); // those that were named together are ticked
setInterval(() => { if (live.others.size && !document.hidden) showOthers().catch(() => {}); }, OTHERS_MS);
