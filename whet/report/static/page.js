"use strict";
// Helpers for all pages. Text is inserted as text nodes only, never as markup.

/** Return the page's JSON value of a name. */
function pageData(name) {
  return JSON.parse(document.getElementById("data-" + name).textContent);
}

/** Make control, format and direction characters visible; keep new lines and tabs. */
function visible(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu, (c) => {
    if (c === "\n" || c === "\t") return c;
    const code = c.codePointAt(0);
    return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
  });
}

/** Make an element: el("td", {class: "number", title: "..."}, child, "text", ...). */
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : visible(value));
  }
  for (const child of children) node.append(child instanceof Node ? child : document.createTextNode(visible(child)));
  return node;
}

/** Show images, each {name, src: data URI} or {name, note: why it cannot be shown}; "" for none. */
function pictures(list) {
  if (!list || !list.length) return "";
  const shown = list.map(({ name, src, note }, place) => {
    if (!/^data:image\/(png|jpeg|gif|webp|svg\+xml);base64,/.test(src || "")) return el("span", { class: "note" }, `image ${place + 1}: ${note || name || "not shown"}`);
    const image = el("img", { alt: `image ${place + 1}`, title: name || null });
    image.addEventListener("load", () => image.classList.toggle("tiny", Math.max(image.naturalWidth, image.naturalHeight) < 96));
    image.src = src;
    return image;
  });
  return el("div", { class: "pictures" }, ...shown);
}

/** Return a colour of the style sheet, in the active theme. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

/** Call back when the system's colour scheme changes. */
function onTheme(callback) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", callback);
}

/** Format a number compactly: 1,234 or 0.0123 or 1.2e-7. */
function shortNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

/** On a narrow screen, show the rows of a table that is wider than its place as cards, each value with its column's name. */
function fitTables() {
  for (const table of document.querySelectorAll("table:not(.bars)")) {
    const place = table.closest(".scroll") || table.parentElement;
    table.classList.remove("stacked");
    if (innerWidth > 620 || !place.clientWidth || table.offsetWidth <= place.clientWidth) continue;
    const [head, ...rows] = table.rows;
    if (!head || [...head.cells].some((cell) => cell.tagName !== "TH")) continue;
    head.classList.add("stack-head");
    for (const row of rows) [...row.cells].forEach((cell, index) => { cell.dataset.label = head.cells[index] ? head.cells[index].textContent : ""; });
    table.classList.add("stacked");
  }
}

let fitting = 0;
function fitSoon() {
  cancelAnimationFrame(fitting);
  fitting = requestAnimationFrame(fitTables);
}
fitSoon();
addEventListener("resize", fitSoon);
document.addEventListener("toggle", fitSoon, true); // what was folded has no width before
new MutationObserver((changes) => { if (innerWidth <= 620 && changes.some((change) => change.addedNodes.length)) fitSoon(); }).observe(document.querySelector("main"), { childList: true, subtree: true });
