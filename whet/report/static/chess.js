"use strict";
// The board of `whet chess RUN --page` and `whet serve MODEL --board`: two clicks are a move; the server answers with the game after the model's reply.
(function () {
  const find = (id) => document.getElementById(id);
  const { side: first, path } = pageData("chess");
  let side = first === "black" ? "black" : "white";
  let moves = [];
  let from = "";
  let busy = false;

  /** Send the game, and show what comes back. */
  async function play(move) {
    if (busy) return;
    busy = true;
    find("state").textContent = "it thinks …";
    try {
      const key = find("key").value;
      const response = await fetch(path, {
        method: "POST",
        headers: { "content-type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) },
        body: JSON.stringify({ moves, side, move }),
      });
      find("key-form").hidden = response.status !== 401;
      const game = await response.json();
      if (game.error) {
        find("state").textContent = response.status === 401 ? "This server asks for its key." : game.error.message;
        return;
      }
      moves = game.moves;
      find("board").src = game.board;
      find("said").textContent = game.said;
      find("note").textContent = [game.value && "it says " + game.value + " for itself", game.note].filter(Boolean).join("; ");
      find("names").textContent = game.names;
      find("fen").textContent = game.fen;
      find("state").textContent = game.end ? game.end.replaceAll("_", " ") : "your move";
    } catch (error) {
      find("state").textContent = "the server does not answer";
    } finally {
      busy = false;
    }
  }

  /** Return the square under a click. */
  function squareAt(event) {
    const box = find("board").getBoundingClientRect();
    let file = Math.min(7, Math.max(0, Math.floor((8 * (event.clientX - box.left)) / box.width)));
    let rank = Math.min(7, Math.max(0, Math.floor((8 * (event.clientY - box.top)) / box.height)));
    const mark = find("mark");
    mark.style.left = 12.5 * file + "%";
    mark.style.top = 12.5 * rank + "%";
    if (side === "white") rank = 7 - rank;
    else file = 7 - file;
    return "abcdefgh"[file] + (rank + 1);
  }

  find("board").addEventListener("click", (event) => {
    const square = squareAt(event);
    find("mark").hidden = Boolean(from);
    if (!from) from = square;
    else {
      const move = from + square;
      from = "";
      if (move.slice(0, 2) !== move.slice(2)) play(move);
    }
  });
  find("move-form").addEventListener("submit", (event) => {
    event.preventDefault();
    play(find("move").value.trim().toLowerCase());
    find("move").value = "";
  });
  find("key-form").addEventListener("submit", (event) => { event.preventDefault(); play(null); });
  find("undo").addEventListener("click", () => {
    if (busy) return;
    moves = moves.slice(0, -2);
    play(null);
  });
  for (const name of ["white", "black"]) {
    find(name).addEventListener("click", () => {
      if (busy) return;
      side = name;
      moves = [];
      play(null);
    });
  }
  play(null);
})();
