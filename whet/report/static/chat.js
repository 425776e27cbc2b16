"use strict";
// The chat page of `whet serve`: streams replies of /v1/chat/completions; thinking folds when the answer begins.
//
// Markup, for styles and tests: #log > .turn > .question, details.thinking > (summary, pre), .answer-text, .warn, .bar >
// button.probabilities, pre.tokens > span.token[title] (drawn on demand).

(() => {
  const { remembers, splits, sees } = pageData("chat");
  const find = (id) => document.getElementById(id);
  const history = []; // {role, content} of the finished turns
  let model = "", busy = null;
  let reading = null; // while chosen files are read: a promise of whether they could be
  let images = []; // of the next question, as page.js shows them: {name, src: data URI}

  function headers() {
    const key = find("key").value;
    return { "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) };
  }

  async function connect() {
    const answer = await fetch("/v1/models", { headers: headers() });
    find("key-form").hidden = answer.status !== 401;
    if (!answer.ok) {
      find("about").textContent = answer.status === 401 ? "This server asks for its key." : `The server answers ${answer.status}.`;
      return;
    }
    const cards = (await answer.json()).data;
    // Several adapters beside one base are models of their own; what was said to one is not told to the next.
    find("model").replaceChildren(...cards.map((card) => el("option", { value: card.id }, visible(card.id))));
    find("model-form").hidden = cards.length === 1;
    choose(cards[0]);
    find("model").onchange = () => {
      find("new").click();
      choose(cards[find("model").selectedIndex]);
    };
  }

  function choose(card) {
    model = card.id;
    const alone = remembers ? "" : " · each question stands alone: this model's prompt has one turn";
    find("about").textContent = visible(`${model} · context of ${shortNumber(card.max_model_len)} tokens${alone}`);
  }

  /** Yield the objects of a stream of server-sent events. */
  async function* events(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const text = part.replace(/^data: /, "");
        if (text !== "[DONE]") yield JSON.parse(text);
      }
    }
  }

  /** Read the files that the user chose; their bytes stay as they are, the server judges them. */
  function readImages() {
    const read = (file) => new Promise((done, failed) => {
      const reader = new FileReader();
      reader.onload = () => done({ name: visible(file.name), src: reader.result });
      reader.onerror = () => failed(reader.error);
      reader.readAsDataURL(file);
    });
    const mine = Promise.all([...find("images").files].map(read)).then((files) => {
      if (reading !== mine) return true; // others were chosen meanwhile
      images = files;
      find("pending").replaceChildren(pictures(images));
      return true;
    }).catch((error) => {
      if (reading !== mine) return true;
      images = [];
      find("pending").replaceChildren(el("p", { class: "note bad" }, "The file cannot be read: " + error.message));
      return false;
    }).finally(() => { if (reading === mine) reading = null; });
    reading = mine;
  }

  function content(question, shown) {
    const parts = shown.map(({ src }) => ({ type: "image_url", image_url: { url: src } }));
    return parts.length ? [...parts, { type: "text", text: question }] : question;
  }

  function request(question, shown) {
    const system = find("system").value.trim();
    const number = (id) => (find(id).value === "" ? undefined : Number(find(id).value));
    return {
      model, stream: true, stream_options: { include_usage: true }, logprobs: true, top_logprobs: 3,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...(remembers ? history : []), { role: "user", content: content(question, shown) }],
      temperature: number("temperature"), max_tokens: number("max-tokens"), seed: number("seed"),
    };
  }

  function showTurn(question, shown) {
    const thinking = el("pre", {});
    const summary = el("summary", {}, "thinking …");
    const fold = el("details", { class: "thinking", hidden: true, open: true }, summary, thinking);
    const answer = el("p", { class: "answer-text" });
    const notes = el("div", {});
    const turn = el("div", { class: "turn" }, pictures(shown), el("p", { class: "question" }, question), fold, answer, notes);
    find("log").append(turn);
    turn.scrollIntoView({ block: "end" });
    return { turn, fold, summary, thinking, answer, notes };
  }

  /** Offer the probabilities of a reply's tokens; they are drawn when they are asked for. */
  function offerTokens(parts, entries) {
    if (!entries.length) return;
    const button = el("button", { type: "button", class: "probabilities", "aria-pressed": "false" }, "Token probabilities");
    let drawn = null;
    button.addEventListener("click", () => {
      if (drawn) { drawn.remove(); drawn = null; } else { drawn = tokens(entries); parts.turn.append(drawn); }
      button.setAttribute("aria-pressed", drawn !== null);
    });
    parts.notes.append(el("div", { class: "bar" }, button));
  }

  function tokens(entries) {
    const node = tokenText(entries.map((entry) => entry.token), entries.map((entry) => entry.logprob));
    const percent = (logprob) => (100 * Math.exp(logprob)).toPrecision(3) + " %";
    [...node.querySelectorAll(".token")].forEach((span, place) => {
      const others = entries[place].top_logprobs.map((top) => `${visible(JSON.stringify(top.token))} ${percent(top.logprob)}`);
      span.title += others.length ? "\nlikeliest: " + others.join(", ") : "";
    });
    return node;
  }

  async function ask(question, shown) {
    busy = new AbortController();
    find("send").disabled = true;
    find("stop").hidden = false;
    const parts = showTurn(question, shown);
    const note = (text, tone) => parts.notes.append(el("p", { class: `note ${tone}` }, text));
    const entries = [];
    let thinking = "", answer = "", end = "", warned = false, usage = null;
    try {
      const reply = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(request(question, shown)), signal: busy.signal });
      if (!reply.ok) throw new Error((await reply.json()).error.message);
      for await (const event of events(reply.body)) {
        if (event.error) throw new Error(event.error.message);
        if (event.warning && !warned) { note(event.warning, "warn"); warned = true; }
        usage = event.usage || usage;
        for (const choice of event.choices) {
          thinking += choice.delta.reasoning_content || "";
          answer += choice.delta.content || "";
          if (choice.logprobs) entries.push(...choice.logprobs.content);
          end = choice.finish_reason || end;
        }
        parts.thinking.textContent = visible(thinking);
        parts.fold.hidden = !thinking;
        if (answer && !parts.answer.textContent) parts.fold.open = false; // folded where the answer begins
        parts.answer.textContent = visible(answer);
      }
      const spent = usage && usage.completion_tokens_details ? usage.completion_tokens_details.reasoning_tokens : null;
      parts.summary.textContent = spent === null ? "thinking" : `thought for ${shortNumber(spent)} tokens`;
      if (end === "length") note("cut off: the limit of tokens or the context was reached", "muted");
      if (!answer && splits) note("no answer: the thinking did not end", "muted");
      history.push({ role: "user", content: content(question, shown) }, { role: "assistant", content: answer });
    } catch (error) {
      parts.summary.textContent = "thinking";
      note(error.name === "AbortError" ? "stopped; this exchange is forgotten" : error.message, error.name === "AbortError" ? "muted" : "bad");
    }
    offerTokens(parts, entries);
    busy = null;
    find("send").disabled = false;
    find("stop").hidden = true;
    find("question").focus();
  }

  async function send() {
    while (reading) if (!(await reading)) return; // what was chosen is not there: nothing is asked without it
    const question = find("question").value;
    if (busy || !question.trim()) return;
    const shown = images;
    find("question").value = "";
    forgetImages();
    ask(question, shown);
  }
  function forgetImages() {
    images = [];
    reading = null;
    find("images").value = "";
    find("pending").replaceChildren();
  }
  find("ask").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  find("key-form").addEventListener("submit", (event) => { event.preventDefault(); connect(); });
  find("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  find("stop").addEventListener("click", () => busy && busy.abort());
  find("new").addEventListener("click", () => {
    if (busy) busy.abort();
    history.length = 0;
    find("log").replaceChildren();
    forgetImages();
  });
  find("images-form").hidden = !sees;
  find("images").addEventListener("change", readImages);
  connect().catch((error) => { find("about").textContent = "The server cannot be reached: " + error.message; });
})();
