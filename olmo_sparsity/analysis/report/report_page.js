"use strict";
// Texts come from documents and models: they reach the page as textContent only.
// A book has 100,000 tokens: no listener on a token, and a change touches a few dozen elements.
(() => {
  const byId = (id) => document.getElementById(id);
  const page = JSON.parse(byId("page-data").textContent);
  const text = byId("text"), panel = byId("panel"), live = byId("live");
  const TOKENS_IN_CHUNK = 300, MOST_IN_CHUNK = 1500;

  let doc = null; // the document on the page
  let tokens = []; // its elements, by place
  let chosen = new Map(); // place → its target, losses, sets, and what was found
  let owners = new Map(); // place within a target of several tokens → its first place
  let shown = []; // places of the targets that pass the filters
  let current = null, held = false, lit = [];

  function element(name, properties = {}, ...children) {
    const node = document.createElement(name);
    Object.assign(node, properties);
    node.append(...children);
    return node;
  }
  const heading = (words) => element("h3", { textContent: words });
  const remark = (words) => element("p", { className: "soft", textContent: words });
  const number = (value) => (value === null || value === undefined ? "–" : value.toFixed(2));

  // Scores of some selectors are small numbers throughout.
  const score = (value) =>
    Math.abs(value) >= 0.1 || value === 0 ? number(value) : Number(value.toPrecision(2)).toString();

  // What stands for a token that would not be seen.
  function spell(piece) {
    if (piece === "") return "(part of a character)";
    const seen = piece.replace(/\n/g, "⏎").replace(/\t/g, "⇥");
    return /^\s+$/.test(seen) ? seen.replace(/\s/g, "␣") : seen.trim();
  }
  const entryOf = (place) =>
    chosen.get(place).found[`${byId("units").value} ${byId("selector").value}`];
  const endOf = (place) => doc.ends[place] ?? place + 1;
  const textOf = (first, end = endOf(first)) => doc.text.slice(first, end).join("");
  const runOf = ({ first, width }, rank) => [first[rank], first[rank] + width[rank]];

  const gapAt = (place) => chosen.get(place).short - chosen.get(place).long;

  // ------------------------------------------------------------------ the text

  function openDocument(index) {
    doc = JSON.parse(byId("document-" + page.documents[index].id).textContent);
    tokens = new Array(doc.text.length);
    chosen = new Map(doc.chosen.map((one) => [one.target, one]));
    owners = new Map();
    for (const place of Object.keys(doc.ends).map(Number)) {
      for (let at = place + 1; at < endOf(place); at++) if (!chosen.has(at)) owners.set(at, place);
    }
    [current, held, lit, shown] = [null, false, [], []];
    const chunks = document.createDocumentFragment();
    let chunk = null, inChunk = 0;
    doc.text.forEach((piece, place) => {
      if (chunk === null) {
        chunk = element("div", { className: "chunk" });
        chunks.append(chunk);
        inChunk = 0;
      }
      tokens[place] = element("span", { textContent: piece });
      tokens[place].dataset.place = place;
      chunk.append(tokens[place]);
      inChunk += 1;
      // A chunk is a block: it may end where a line does, or else before it grows too large.
      if ((inChunk >= TOKENS_IN_CHUNK && piece.endsWith("\n")) || inChunk >= MOST_IN_CHUNK) {
        chunk = null;
      }
    });
    text.replaceChildren(chunks);
    filter();
    // The target of largest gap, low enough on the screen to see what precedes it.
    const start = shown.reduce((a, b) => (gapAt(b) > gapAt(a) ? b : a), shown[0]);
    if (start === undefined) return;
    tokens[shown[0]].tabIndex = -1;
    tokens[start].tabIndex = 0;
    show(start);
    bringIntoView(tokens[start]);
  }

  // Heights of chunks that were never on the screen are guesses, so that an offset is wrong in a
  // long document. scrollIntoView lays them out, but also scrolls the page, which stays here.
  function bringIntoView(node) {
    const [left, top] = [window.scrollX, window.scrollY];
    node.scrollIntoView({ block: "center", behavior: "instant" });
    window.scrollTo({ left, top, behavior: "instant" });
  }

  function filter() {
    const set = byId("set").value;
    shown.forEach(strip);
    shown = [...chosen.keys()].sort((a, b) => a - b).filter((place) =>
      set === "" || chosen.get(place).sets.includes(Number(set)));
    shown.forEach(dress);
    byId("count").textContent = `${shown.length} target${shown.length === 1 ? "" : "s"}`;
    if (shown.length) tokens[shown.includes(current) ? current : shown[0]].tabIndex = 0;
    show(shown.includes(current) ? current : null);
  }
  function dress(place) {
    for (const node of tokens.slice(place, endOf(place))) node.classList.add("target");
    tokens[place].setAttribute("role", "button");
    tokens[place].setAttribute("aria-pressed", "false");
    tokens[place].tabIndex = -1;
    if (endOf(place) > place + 1) tokens[place].setAttribute("aria-label", spell(textOf(place)));
  }
  function strip(place) {
    for (const node of tokens.slice(place, endOf(place))) node.classList.remove("target");
    for (const name of ["role", "aria-pressed", "tabindex"]) tokens[place].removeAttribute(name);
  }

  // ------------------------------------------------------- one target is looked at

  function show(place, aloud = false) {
    for (const node of lit) {
      node.classList.remove("far", "harm", "first", "current", "pointed");
      node.removeAttribute("data-rank");
      node.style.removeProperty("--share");
      if (node.hasAttribute("aria-pressed")) node.setAttribute("aria-pressed", "false");
    }
    lit = [];
    current = place;
    if (place !== null) {
      lit = tokens.slice(place, endOf(place));
      for (const one of lit) one.classList.add("current");
      lit[0].setAttribute("aria-pressed", String(held));
      const own = entryOf(place)?.own;
      if (own) light(own);
    }
    fillPanel(place);
    if (aloud && place !== null) live.textContent = aloudOf(place);
  }

  // Runs may overlap: a token belongs to the most influential one.
  function light(side) {
    const most = Math.max(...side.influence, 1e-9);
    side.first.forEach((_, rank) => {
      const nodes = tokens.slice(...runOf(side, rank)).filter((n) => !n.classList.contains("far"));
      for (const node of nodes) {
        node.style.setProperty("--share", Math.max(0, side.influence[rank] / most).toFixed(3));
        node.classList.add("far");
        node.classList.toggle("harm", side.influence[rank] < 0);
        node.classList.toggle("first", rank === 0);
        lit.push(node);
      }
      if (nodes.length) nodes[0].dataset.rank = String(rank + 1);
    });
  }

  function aloudOf(place) {
    const own = entryOf(place)?.own, { short, long } = chosen.get(place);
    const said = `${spell(textOf(place))}. Gap ${number(gapAt(place))} nats: ${number(short)} with ` +
      `the local window, ${number(long)} with the long one.`;
    if (!own?.first.length) return said;
    const first = own.first.slice(0, 3).map((far, rank) =>
      `${spell(textOf(...runOf(own, rank)))}, ${place - far} back, ` +
      `influence ${score(own.influence[rank])}`);
    return `${said} Most influential: ${first.join("; ")}.`;
  }

  function fillPanel(place) {
    if (place === null) {
      panel.replaceChildren(heading("No target chosen"),
        remark("Point at an underlined token, or move to one with the keyboard."));
      return;
    }
    const { sets, short, long } = chosen.get(place), { own, unrelated } = entryOf(place) ?? {};
    const end = endOf(place), where = end > place + 1 ? `s ${place}:${end}` : ` ${place}`;
    const values = { "local window": short, "long window": long, gap: gapAt(place) };
    const numbers = Object.entries(values).map(([name, value]) => element("div", {},
      element("dt", { textContent: name }), element("dd", { textContent: number(value) })));
    const parts = [
      element("h3", { className: "unseen", textContent: "Target" }),
      element("p", { className: "word quoted", textContent: spell(textOf(place)) }),
      remark([`token${where}`, ...sets.map((set) => page.set_names[set])].join(" · ")),
      element("dl", { className: "numbers" }, ...numbers),
    ];
    if (own) parts.push(heading("Loss with k distant units"), tableOfLosses(own, unrelated));
    if (own?.first.length) parts.push(heading("Influential units"), rankedList(place, own));
    if (!own) parts.push(remark("This selector did not search for this target."));
    panel.replaceChildren(...parts);
  }

  function tableOfLosses(own, unrelated) {
    const cell = (side, step) => element("td", { textContent: number(side?.loss?.[step]) });
    const head = ["k", "own units", "unrelated text"].map((name) =>
      element("th", { textContent: name, scope: "col" }));
    const rows = page.ks.map((k, step) =>
      element("tr", {}, element("th", { textContent: String(k), scope: "row" }),
        cell(own, step), cell(unrelated, step)));
    return element("table", {}, element("thead", {}, element("tr", {}, ...head)), ...rows);
  }

  function rankedList(place, own) {
    const rows = own.first.map((far, rank) => {
      const button = element("button", { type: "button", title: "Show it in the text" },
        element("span", { className: "rank", textContent: String(rank + 1) }),
        element("bdi", { className: "quoted", textContent: spell(textOf(...runOf(own, rank))) }),
        element("span", { className: "back", textContent: `${place - far} back` }),
        element("span", { className: "score", textContent: score(own.influence[rank]) }));
      button.dataset.rank = String(rank);
      return element("li", {}, button);
    });
    return element("ol", { className: "ranked" }, ...rows);
  }

  // ------------------------------------------------------------------ hands and keys

  // The target that a token is part of, if it passes the filter.
  function placeUnder({ target }) {
    const place = Number(target.dataset.place);
    return target.classList.contains("target") ? owners.get(place) ?? place : null;
  }
  text.addEventListener("pointerover", (event) => {
    const place = placeUnder(event);
    if (!held && place !== null && place !== current) show(place);
  });
  text.addEventListener("click", (event) => {
    const place = placeUnder(event);
    if (place === null) return;
    held = !(held && place === current);
    show(place, true);
    focusOn(place);
  });
  text.addEventListener("focusin", (event) => {
    const place = placeUnder(event);
    if (place === null) return;
    held &&= place === current;
    show(place, true);
  });
  function focusOn(place) {
    for (const other of text.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    tokens[place].tabIndex = 0;
    tokens[place].focus();
  }
  function move(place, by) {
    focusOn(shown[Math.min(shown.length - 1, Math.max(0, shown.indexOf(place) + by))]);
  }
  text.addEventListener("keydown", (event) => {
    const place = placeUnder(event);
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape") {
      held = false;
      show(null);
      live.textContent = "";
    } else if (place === null) {
      return;
    } else if (event.key === "Enter" || event.key === " ") {
      held = !(held && place === current);
      show(place, true);
    } else {
      const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -shown.length, End: shown.length };
      if (!(event.key in steps)) return;
      move(place, steps[event.key]);
    }
    event.preventDefault();
  });
  panel.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    held = true; // or the pointer's way back over the text would change the target
    for (const node of lit) node.classList.remove("pointed");
    const run = tokens.slice(...runOf(entryOf(current).own, Number(button.dataset.rank)));
    for (const node of run) node.classList.add("pointed");
    run[0].scrollIntoView({ block: "center" });
  });
  byId("tools").addEventListener("input", (event) => {
    if (event.target.id === "document") return openDocument(Number(byId("document").value));
    filter();
  });
  byId("tools").addEventListener("submit", (event) => event.preventDefault());

  // ------------------------------------------------------------------ the beginning

  const options = (names) =>
    names.map((name, i) => element("option", { value: String(i), textContent: name }));
  const targetsOf = (count) => `${count} target${count === 1 ? "" : "s"}`;
  const said = page.documents.map((one) => `${one.name} · ${targetsOf(one.num_targets)}`);
  byId("document").append(...options(said));
  byId("selector").append(...options(page.selectors.map((name) => name.replace(/_/g, " "))));
  byId("units").append(...options(page.units));
  byId("set").append(
    element("option", { value: "", textContent: "all that were searched" }),
    ...options(page.set_names)
  );
  const hide = (id) => (byId(id).parentElement.hidden = true);
  for (const id of ["document", "selector", "units"]) if (byId(id).length < 2) hide(id);
  // Targets that somebody named are few, and in no set.
  if (!page.sets.length) hide("set");
  byId("document").value = "0";
  if (page.documents.length) openDocument(0);
  else text.textContent = "No documents were measured.";
})();
