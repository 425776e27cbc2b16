"use strict";
// Browser(container, source, key = "sample"): a paged list of samples with filters and search, and one sample in full.
//
// source, every method async; ids are opaque (numbers or strings):
//   info()    -> {num_samples, num_indexed, steps: [min, max] or null, rewards: [names], has_logprobs,
//                 tags: {think_open, think_close, answer_open, answer_close} or null (texts are then shown raw)}
//   query(q)  -> {rows: [{id, step, uid, index, reward, rewards: {name: score}, advantage, num_tokens, finish_reason,
//                 snippet, asked (the prompt's beginning), correct (true, false or null)}], total, indexed};
//                 q = {step_min, step_max, reward ("" is the total), reward_min, reward_max, correct, uid, finish, text,
//                 order: "step" | "reward" | "length" | "advantage", descending, offset, limit};
//                 unset fields are null, and "" for uid, finish, text
//   sample(id) -> a row of samples.jsonl {step, uid, index, prompt, images: [as pictures() takes them], answer, completion, num_completion_tokens,
//                 finish_reason, rewards, reward, advantage, sampler_logprobs, facts: {name: value}} with
//                 pieces: [text of each token] or null
//   group(id) -> [ids of the samples of the same step and problem, including this one]
// Returns {refresh(), select(id), destroy()}: refresh reloads the current page (for a growing run).
//
// Markup, for styles and tests (container gets the class "browser"):
//   form.filters: input[name=text], [name=step_min], [name=step_max], select[name=reward], input[name=reward_min],
//     [name=reward_max], select[name=correct] ("", "true", "false"), select[name=finish], input[name=uid],
//     select[name=order], button.direction, button.clear
//   p.found ("1–50 of 15,360 samples"), button.page-back, button.page-on
//   .list-head (the columns' names), ul.samples[role=listbox] > li.sample[data-id][aria-selected] > .s-step .s-verdict
//     .s-reward .s-tokens .s-both (.s-prompt .s-text)
//   div.detail > .detail-head (h3, button.previous, button.next, button.same-problem), .facts, .rewards > .reward-row,
//     pre.prompt, .views > button[data-view=parts|raw|tokens], pre.thinking, pre.answer, pre.gold, pre.raw,
//     pre.tokens > span.token[title], table.group tr[data-id]
// Keys: up and down in the list, j and k anywhere except in a field. The address keeps the selection: #sample=ID.

const PAGE_ROWS = 50;
const MAX_GROUP = 64;
const MAX_CHARACTERS = 60000;
const MAX_TOKENS = 6000;
const FAINT_NATS = 6; // a token of this many nats has the strongest colour

/** Read or, with a second argument, write one value of the address's hash. */
function hashValue(key, value) {
  const values = new URLSearchParams(location.hash.slice(1));
  if (value === undefined) return values.get(key);
  if (value === null) values.delete(key);
  else values.set(key, value);
  history.replaceState(null, "", "#" + values);
  return value;
}

function Browser(container, source, key = "sample") {
  const state = { offset: 0, total: 0, rows: [], chosen: null, descending: false, view: "parts", asked: 0, opened: 0, info: null };
  const form = el("form", { class: "filters" });
  const found = el("p", { class: "found note", "aria-live": "polite" });
  const back = el("button", { type: "button", class: "page-back", onclick: () => turn(-1) }, "‹");
  const on = el("button", { type: "button", class: "page-on", onclick: () => turn(1) }, "›");
  const list = el("ul", { class: "samples", role: "listbox", tabindex: 0, "aria-label": "Samples" });
  const detail = el("div", { class: "detail" });
  const head = el("div", { class: "sample list-head", "aria-hidden": "true" });
  const left = el("div", { class: "list" }, el("div", { class: "bar pager" }, found, back, on), head, list);
  container.classList.add("browser");
  container.replaceChildren(form, el("div", { class: "two" }, left, detail));

  function fields() {
    const number = (name) => (form[name].value === "" ? null : Number(form[name].value));
    return {
      text: form.text.value.trim(), step_min: number("step_min"), step_max: number("step_max"), reward: form.reward.value,
      reward_min: number("reward_min"), reward_max: number("reward_max"), finish: form.finish.value, uid: form.uid.value.trim(),
      correct: form.correct.value === "" ? null : form.correct.value === "true", order: form.order.value, descending: state.descending,
    };
  }

  async function load(offset, keep) {
    const asked = ++state.asked;
    found.textContent = form.text.value ? "Searching …" : found.textContent;
    const answer = await source.query({ ...fields(), offset, limit: PAGE_ROWS });
    if (asked !== state.asked) return; // a newer query is pending
    if (offset > 0 && answer.rows.length === 0) { await load(0, keep); return; }
    Object.assign(state, { offset, rows: answer.rows, total: answer.total });
    const last = offset + answer.rows.length;
    const indexing = answer.indexed < state.info.num_samples ? `, ${shortNumber(answer.indexed)} read so far` : "";
    found.textContent = answer.rows.length ? `${shortNumber(offset + 1)}–${shortNumber(last)} of ${shortNumber(answer.total)} samples${indexing}` : "No matching samples.";
    back.disabled = offset === 0;
    on.disabled = last >= answer.total;
    list.replaceChildren(...answer.rows.map((row) => listRow(row, select)));
    if (!keep) list.scrollTop = 0;
    mark();
  }

  function mark() {
    for (const item of list.children) item.setAttribute("aria-selected", item.dataset.id === String(state.chosen));
  }

  async function turn(direction) {
    await load(Math.max(0, state.offset + direction * PAGE_ROWS));
  }

  async function move(direction) {
    const place = state.rows.findIndex((row) => String(row.id) === String(state.chosen));
    let next = place < 0 ? 0 : place + direction;
    if (next < 0 || next >= state.rows.length) {
      const offset = state.offset + direction * PAGE_ROWS;
      if (offset < 0 || offset >= state.total) return;
      await load(offset);
      next = direction > 0 ? 0 : state.rows.length - 1;
    }
    if (state.rows[next]) await select(state.rows[next].id, true);
  }

  async function select(id, stay) {
    const opened = ++state.opened;
    state.chosen = id;
    hashValue(key, id);
    mark();
    const item = [...list.children].find((child) => child.dataset.id === String(id));
    if (item) keepInView(list, item);
    const [row, ids] = await Promise.all([source.sample(id), source.group(id)]);
    const members = await Promise.all(ids.slice(0, MAX_GROUP).map(async (other) => ({ id: other, row: String(other) === String(id) ? row : await source.sample(other) })));
    if (opened !== state.opened) return;
    const actions = { select, move, same: (uid) => { form.uid.value = uid; load(0); }, setView: (view) => { state.view = view; } };
    detail.replaceChildren(...sampleDetail(row, { id, ids, members, info: state.info, view: state.view, actions }));
    detail.scrollTop = 0;
    if (!stay && detail.getBoundingClientRect().top > innerHeight * 0.7) detail.scrollIntoView({ block: "start", behavior: "smooth" });
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || container.offsetParent === null) return;
    const inField = event.target.matches && event.target.matches("input, select, textarea");
    const inList = list.contains(event.target);
    const step = inField ? 0 : { j: 1, k: -1 }[event.key] || (inList ? { ArrowDown: 1, ArrowUp: -1 }[event.key] || 0 : 0);
    if (step) { event.preventDefault(); move(step); }
  }

  function onHash() {
    const id = hashValue(key);
    if (id !== null && id !== String(state.chosen)) select(id);
  }

  async function refresh() {
    state.info = await source.info();
    await load(state.offset, true);
  }

  async function start() {
    state.info = await source.info();
    const place = state.info.steps ? "step" : "sample";
    head.replaceChildren(...[["s-step", place], ["s-verdict", ""], ["s-reward", "reward"], ["s-tokens", "tokens"], ["s-head", "prompt, and how the completion ends"]].map(([name, text]) => el("span", { class: name }, text)));
    if (state.info.num_samples === 0) found.textContent = "No completions yet.";
    buildFilters(form, state, () => load(0));
    await load(0);
    const id = hashValue(key);
    if (id !== null) await select(id);
    else if (state.rows.length && innerWidth > 860) await select(state.rows[0].id, true).then(() => hashValue(key, null));
  }
  document.addEventListener("keydown", onKey);
  window.addEventListener("hashchange", onHash);
  const fail = (error) => { detail.replaceChildren(el("p", { class: "bad" }, "Cannot be shown: " + error.message)); };
  const safely = (action) => (...values) => action(...values).catch(fail);
  [load, select, move, turn] = [load, select, move, turn].map(safely);
  safely(start)();
  const destroy = () => {
    document.removeEventListener("keydown", onKey);
    window.removeEventListener("hashchange", onHash);
    container.replaceChildren();
  };
  return { refresh: safely(refresh), select, destroy };
}

/** Fill the form of filters; every change starts a new query, typing after a pause. */
function buildFilters(form, state, ask) {
  const { info } = state;
  const [low, high] = info.steps || [null, null];
  const choice = (name, label, options) => el("label", {}, label, el("select", { name }, ...options.map(([value, text]) => el("option", { value }, text))));
  const number = (name, label, placeholder) => el("input", { name, type: "number", step: "any", placeholder, "aria-label": label });
  const direction = el("button", { type: "button", class: "direction", title: "Reverse the order", onclick: () => {
    state.descending = !state.descending;
    direction.textContent = state.descending ? "↓" : "↑";
    ask();
  } }, "↑");
  const clear = el("button", { type: "button", class: "clear", onclick: () => { form.reset(); ask(); } }, "Clear");
  const orders = [["reward", "reward"], ["length", "length"], ["advantage", "advantage"]];
  form.replaceChildren(
    el("input", { name: "text", type: "search", placeholder: "Search prompts, completions, answers", "aria-label": "Search", class: "wide" }),
    choice("correct", "Verdict", [["", "any"], ["true", "right"], ["false", "wrong"]]),
    el("span", { class: "pair" }, "Steps", number("step_min", "First step", low === null ? "" : low), "to", number("step_max", "Last step", high === null ? "" : high)),
    el("span", { class: "pair" }, choice("reward", "Score", [["", "total"], ...info.rewards.map((name) => [name, name])]), number("reward_min", "Least score", "min"), "to", number("reward_max", "Largest score", "max")),
    choice("finish", "End", [["", "any"], ["stop", "stop"], ["length", "length"]]),
    el("label", {}, "Problem", el("input", { name: "uid", placeholder: "any", size: 10 })),
    el("span", { class: "pair" }, choice("order", "Order", [["step", low === null ? "as written" : "step"], ...orders]), direction),
    clear,
  );
  let timer = 0;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    clearTimeout(timer);
    timer = setTimeout(ask, event.target.matches("select") ? 0 : 250);
  });
  form.step_min.closest(".pair").hidden = low === null;
}

function listRow(row, select) {
  const verdict = verdictOf(row.correct);
  const score = row.reward !== null && row.reward !== undefined ? String(Number(row.reward.toPrecision(3))) : "";
  return el("li", { class: "sample", role: "option", "data-id": row.id, onclick: () => select(row.id) },
    el("span", { class: "s-step" }, row.step === null || row.step === undefined ? row.index : row.step),
    el("span", { class: "s-verdict " + verdict.tone, title: verdict.text }, verdict.mark),
    el("span", { class: "s-reward", title: "total reward" }, score),
    el("span", { class: "s-tokens", title: "tokens of the completion" }, row.num_tokens === null ? "" : shortNumber(row.num_tokens)),
    el("span", { class: "s-both" },
      el("span", { class: "s-prompt" }, row.asked || "(no prompt)"),
      el("span", { class: "s-text" }, el("bdi", { dir: "ltr" }, row.snippet || "(empty)"))));
}

function verdictOf(correct) {
  if (correct === true) return { mark: "✓", text: "right", tone: "good" };
  if (correct === false) return { mark: "✗", text: "wrong", tone: "bad" };
  return { mark: "·", text: "no verdict", tone: "muted" };
}

function scoreText(score) { return score === null || score === undefined ? "–" : String(Number(score.toPrecision(4))); }

/** Scroll a list, but not the page, until an item is in view. */
function keepInView(list, item) {
  if (item.offsetTop < list.scrollTop) list.scrollTop = item.offsetTop;
  const bottom = item.offsetTop + item.offsetHeight - list.clientHeight;
  if (bottom > list.scrollTop) list.scrollTop = bottom;
}

/** Everything about one sample: head, facts, rewards, prompt, completion, group. */
function sampleDetail(row, { id, ids, members, info, view, actions }) {
  const right = row.correct !== undefined ? row.correct : rightness(row.rewards);
  const verdict = verdictOf(right);
  const step = row.step === null || row.step === undefined ? "" : `Step ${shortNumber(row.step)} · `;
  const head = el("div", { class: "detail-head" },
    el("h3", {}, `${step}problem ${String(row.uid).slice(0, 8)} · sample ${row.index} `, el("span", { class: "badge " + verdict.tone }, verdict.text)),
    el("span", { class: "bar" },
      el("button", { type: "button", class: "previous", title: "Previous (k)", onclick: () => actions.move(-1) }, "‹"),
      el("button", { type: "button", class: "next", title: "Next (j)", onclick: () => actions.move(1) }, "›"),
      el("button", { type: "button", class: "same-problem", title: "Show this problem's samples at every step", onclick: () => actions.same(row.uid) }, "This problem")));
  const facts = { reward: row.reward, advantage: row.advantage, tokens: row.num_completion_tokens, end: row.finish_reason, ...row.facts };
  const said = Object.entries(facts).filter(([, value]) => value !== null && value !== undefined).map(([name, value]) =>
    el("span", {}, name.replace(/^num_/, "").replaceAll("_", " ") + " ", el("b", {}, typeof value === "number" ? scoreText(value) : String(value).slice(0, 80))));
  return [
    head,
    el("div", { class: "facts" }, ...said),
    rewardBars(row.rewards),
    el("h4", {}, "Prompt"), pictures(row.images), longText(row.prompt, "prompt"),
    completionViews(row, info, view, actions),
    groupTable(id, ids, members, actions),
  ];
}

function rightness(rewards) {
  const score = (rewards || {}).correct;
  return score === null || score === undefined ? null : score >= 1;
}

/** One small bar for each reward; they share a scale, and negative scores go left of the middle. */
function rewardBars(rewards) {
  const entries = Object.entries(rewards || {});
  const largest = Math.max(1, ...entries.map(([, score]) => Math.abs(score || 0)));
  const signed = entries.some(([, score]) => score < 0);
  const rows = entries.map(([name, score]) => {
    const fill = el("i", { class: score < 0 ? "fill negative" : "fill" });
    const share = Math.abs(score || 0) / largest;
    fill.style.width = (signed ? 50 : 100) * share + "%";
    fill.style.left = (signed ? (score < 0 ? 50 - 50 * share : 50) : 0) + "%";
    return el("div", { class: "reward-row" }, el("span", { title: name }, name), el("span", { class: "track" }, fill), el("b", {}, scoreText(score)));
  });
  return el("div", { class: "rewards" }, ...rows);
}

/** A possibly huge text: the beginning, and a button for the rest. */
function longText(text, name) {
  const whole = String(text === null || text === undefined ? "" : text);
  const node = el("pre", { class: name }, whole.slice(0, MAX_CHARACTERS) || "(empty)");
  if (!whole) node.classList.add("muted");
  if (whole.length > MAX_CHARACTERS) {
    const more = el("button", { type: "button", onclick: () => { node.textContent = visible(whole); } }, `Show all ${shortNumber(whole.length)} characters`);
    node.append("\n", more);
  }
  return node;
}

/** Cut a completion at the tags: {thinking, answer, rest}; null if they are unknown or missing. */
function splitCompletion(text, tags) {
  if (!tags) return null;
  const close = text.indexOf(tags.think_close);
  const from = close < 0 ? 0 : close + tags.think_close.length;
  const open = text.indexOf(tags.answer_open, from);
  if (close < 0 && open < 0) return null;
  const before = text.slice(0, close < 0 ? open : close);
  const end = open < 0 ? -1 : text.indexOf(tags.answer_close, open);
  const stop = end < 0 ? text.length : end;
  return {
    thinking: before.startsWith(tags.think_open) ? before.slice(tags.think_open.length) : before,
    answer: open < 0 ? null : text.slice(open + tags.answer_open.length, stop),
    rest: (close < 0 || open < 0 ? text.slice(open < 0 ? from : open, open) : text.slice(from, open)).trim() + (end < 0 ? "" : text.slice(end + tags.answer_close.length)).trim(),
  };
}

function completionViews(row, info, view, actions) {
  const parts = splitCompletion(row.completion, info.tags);
  const tokens = row.pieces && row.sampler_logprobs ? row.pieces : null;
  const holder = el("div", { class: "view" });
  const gold = () => [el("h4", {}, "Gold answer"), longText(row.answer, "gold")];
  const draw = {
    parts: () => {
      const rest = parts.rest ? [el("h4", {}, "Outside the tags"), longText(parts.rest, "rest")] : [];
      const answer = parts.answer === null ? el("pre", { class: "answer muted" }, "(no answer block)") : longText(parts.answer.trim(), "answer");
      return [el("h4", {}, "Thinking"), longText(parts.thinking, "thinking"), ...rest, el("div", { class: "answers" }, el("div", {}, el("h4", {}, "Answer"), answer), el("div", {}, ...gold()))];
    },
    raw: () => [el("h4", {}, "Raw completion"), longText(row.completion, "raw"), ...gold()],
    tokens: () => [el("h4", {}, "Tokens: the stronger the colour, the less likely when sampled"), tokenText(tokens, row.sampler_logprobs), ...gold()],
  };
  const possible = { parts: parts !== null, raw: true, tokens: tokens !== null };
  const names = { parts: "Thinking and answer", raw: "Raw", tokens: "Token probabilities" };
  const buttons = Object.keys(draw).filter((name) => possible[name]).map((name) => el("button", { type: "button", "data-view": name, onclick: () => show(name, true) }, names[name]));
  function show(name, chosen) {
    if (chosen) actions.setView(name);
    for (const button of buttons) button.setAttribute("aria-pressed", button.dataset.view === name);
    holder.replaceChildren(...draw[name]());
  }
  show(possible[view] ? view : parts ? "parts" : "raw", false);
  return el("div", {}, buttons.length > 1 ? el("div", { class: "views bar" }, ...buttons) : "", holder);
}

function tokenText(pieces, logprobs) {
  const spans = pieces.slice(0, MAX_TOKENS).map((piece, index) => {
    const nats = logprobs[index];
    const text = nats === null || nats === undefined ? "" : `${nats.toFixed(3)} nats, probability ${(100 * Math.exp(nats)).toPrecision(3)} %`;
    const span = el("span", { class: "token", title: text }, piece);
    const share = Math.min(1, -(nats || 0) / FAINT_NATS);
    if (share > 0.01) span.style.backgroundColor = `color-mix(in srgb, var(--series-2) ${Math.round(12 + 68 * share)}%, transparent)`;
    return span;
  });
  const left = pieces.length - spans.length;
  return el("pre", { class: "tokens" }, ...spans, left > 0 ? `\n… ${shortNumber(left)} more tokens` : "");
}

/** The samples of the same problem at the same step, side by side in numbers; a click shows one. */
function groupTable(id, ids, members, actions) {
  if (members.length < 2) return "";
  const names = [...new Set(members.flatMap((member) => Object.keys(member.row.rewards || {})))];
  const paid = members.some((member) => member.row.reward !== null && member.row.reward !== undefined);
  const head = ["sample", ...(paid ? ["reward"] : []), ...names, "tokens", "ends with"].map((text, index, all) => el("th", { class: index < all.length - 1 ? "number" : null, title: text }, text));
  const rows = members.map(({ id: other, row }) => el("tr", { "data-id": other, "aria-selected": String(String(other) === String(id)), onclick: () => actions.select(other) },
    el("td", { class: "number" }, el("button", { type: "button", class: "link" }, row.index)),
    ...[...(paid ? [row.reward] : []), ...names.map((name) => (row.rewards || {})[name])].map((score) => el("td", { class: "number" }, scoreText(score))),
    el("td", { class: "number" }, row.num_completion_tokens === null ? "–" : shortNumber(row.num_completion_tokens)),
    el("td", { class: "s-text" }, el("bdi", { dir: "ltr" }, row.completion.slice(-120).replace(/\s+/g, " ")))));
  const more = ids.length > members.length ? `, the first ${members.length}` : "";
  return el("div", {}, el("h4", {}, `Its group: ${ids.length} samples of this problem${more}`), el("div", { class: "scroll" }, el("table", { class: "group" }, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows))));
}
