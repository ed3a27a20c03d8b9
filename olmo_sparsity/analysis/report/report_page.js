"use strict";
// Texts come from documents and models: they reach the page as textContent only.
// A book has 100,000 tokens: no listener on a token, and a change touches a few dozen elements.
(() => {
  const byId = (id) => document.getElementById(id);
  const page = JSON.parse(byId("page-data").textContent);
  const text = byId("text"), panel = byId("panel"), live = byId("live");
  const SVG = "http://www.w3.org/2000/svg";
  const TOKENS_IN_CHUNK = 300, MOST_IN_CHUNK = 1500;

  let doc = null; // the document on the page
  let tokens = []; // its elements, by place
  let placeOf = new WeakMap();
  let chosen = new Map(); // place → its target, sets, and what was found
  let owners = new Map(); // place within a target of several tokens → its first place
  let losses = new Map(); // place → index into doc.long and doc.short
  let shown = []; // places of the targets that pass the filters
  let current = null, held = false, lit = [];

  function element(name, properties = {}, ...children) {
    const node = document.createElement(name);
    Object.assign(node, properties);
    node.append(...children);
    return node;
  }
  function shape(parent, name, attributes, words) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (words !== undefined) node.textContent = words;
    parent.append(node);
    return node;
  }
  const picture = (width, height, label) => shape(document.createDocumentFragment(), "svg",
    { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
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
  const entryOf = (place) => {
    const target = chosen.get(place);
    return target?.found[`${byId("units").value} ${byId("selector").value}`];
  };
  const endOf = (place) => doc.ends[place] ?? place + 1;
  const textOf = (first, end = endOf(first)) => doc.text.slice(first, end).join("");
  const runOf = ({ first, width }, rank) => [first[rank], first[rank] + width[rank]];

  // The most that its own units regain beyond foreign ones, at any k; without a control, at all.
  const gainAt = (place) => {
    const entry = entryOf(place), short = doc.short[losses.get(place)];
    const others = entry?.foreign?.loss ?? page.ks.map(() => short);
    const curve = entry?.own?.loss ?? [];
    return Math.max(...curve.map((loss, step) => others[step] - (loss ?? Infinity)));
  };
  function kindAt(place) {
    const own = entryOf(place)?.own;
    if (!own?.first.length) return "not searched";
    const target = textOf(place).trim(), [first, end] = runOf(own, 0);
    const run = doc.text.slice(first, end).map((piece) => piece.trim());
    if (run.includes(target)) return "the target again";
    const small = (word) => word.toLowerCase();
    if (run.map(small).includes(small(target))) return "the target, in other case";
    const words = textOf(first, end).trim();
    if (/^\p{N}/u.test(words)) return "a number";
    return /^\p{Lu}/u.test(words) ? "capitalised" : "anything else";
  }
  function gapAt(place) {
    const i = losses.get(place);
    return i === undefined ? null : doc.short[i] - doc.long[i];
  }

  // ------------------------------------------------------------------ the text

  function openDocument(index) {
    doc = JSON.parse(byId("document-" + page.documents[index].id).textContent);
    tokens = new Array(doc.text.length);
    placeOf = new WeakMap();
    losses = new Map(doc.targets.map((place, i) => [place, i]));
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
      // The space before a word belongs to its token, but is no place to draw a box around.
      const word = piece.trimStart();
      const space = word === "" ? "" : piece.slice(0, piece.length - word.length);
      if (space !== "") chunk.append(space);
      const node = document.createElement("span");
      node.textContent = word === "" ? piece : word;
      if (place < firstTarget) node.className = "early";
      tokens[place] = node;
      placeOf.set(node, place);
      chunk.append(node);
      inChunk += 1;
      // A chunk is a block: it may end where a line does, or else before it grows too large.
      if ((inChunk >= TOKENS_IN_CHUNK && piece.endsWith("\n")) || inChunk >= MOST_IN_CHUNK) {
        chunk = null;
      }
    });
    text.replaceChildren(chunks);
    const lines = doc.text.join("").split("\n").filter((line) => line.trim());
    const indented = lines.filter((line) => /^(\t| {2,})\S/.test(line)).length;
    text.classList.toggle("code", lines.length > 4 && indented > lines.length / 5);
    const largest = doc.chosen.reduce((most, { target }) => Math.max(most, gapAt(target) ?? 0), 0);
    byId("gap").max = Math.floor(largest * 100) / 100;
    fillKinds();
    filter();
    // The most striking target, low enough on the screen to see what stands before it.
    const start = shown.reduce((a, b) => (gainAt(b) > gainAt(a) ? b : a), shown[0]);
    if (start === undefined) return;
    for (const place of shown) tokens[place].tabIndex = place === start ? 0 : -1;
    show(start);
    const top = (node) => node.getBoundingClientRect().top;
    const below = top(tokens[start]) - top(text.firstElementChild);
    text.scrollTo({ top: below - text.clientHeight * 0.45, behavior: "instant" });
  }

  function fillKinds() {
    const counts = new Map();
    const kinds = [...chosen.keys()].map(kindAt);
    for (const kind of kinds) counts.set(kind, (counts.get(kind) || 0) + 1);
    const before = byId("kind").value;
    const names = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a));
    byId("kind").replaceChildren(
      element("option", { value: "", textContent: "of any kind" }),
      ...names.map((name) =>
        element("option", { value: name, textContent: `${name} (${counts.get(name)})` })
      )
    );
    byId("kind").value = names.includes(before) ? before : "";
  }

  function filter() {
    const least = Number(byId("gap").value);
    const set = byId("set").value, kind = byId("kind").value;
    const words = byId("find").value.trim().toLowerCase();
    byId("gap-value").textContent = least.toFixed(2);
    byId("gap").setAttribute("aria-valuetext", `${least.toFixed(2)} nats`);
    const passing = [...chosen.keys()].filter((place) => {
      return (
        (set === "" || chosen.get(place).sets.includes(Number(set))) &&
        (least <= 0 || (gapAt(place) ?? -Infinity) >= least) &&
        (kind === "" || kindAt(place) === kind) &&
        textOf(place).toLowerCase().includes(words)
      );
    });
    const kept = new Set(passing);
    for (const place of shown) if (!kept.has(place)) strip(place);
    const already = new Set(shown);
    for (const place of passing) if (!already.has(place)) dress(place);
    shown = passing.sort((a, b) => a - b);
    const all = shown.length === chosen.size ? "" : ` of ${chosen.size}`;
    byId("count").textContent = `${shown.length}${all} target${chosen.size === 1 ? "" : "s"}`;
    const tabbable = kept.has(current) ? current : shown[0];
    for (const place of shown) tokens[place].tabIndex = place === tabbable ? 0 : -1;
    show(current !== null && (kept.has(current) || !chosen.has(current)) ? current : null);
  }
  function dress(place) {
    for (const node of nodesOf(place, endOf(place))) node.classList.add("target");
    tokens[place].setAttribute("role", "button");
    tokens[place].setAttribute("aria-pressed", "false");
    if (endOf(place) > place + 1) tokens[place].setAttribute("aria-label", spell(textOf(place)));
  }
  function strip(place) {
    for (const node of nodesOf(place, endOf(place))) node.classList.remove("target");
    for (const name of ["role", "aria-pressed", "tabindex"]) tokens[place].removeAttribute(name);
  }

  // The elements of a run: its tokens, and the spaces between them, which are text until needed.
  function nodesOf(first, end) {
    return tokens.slice(first, end).flatMap((node, i) => {
      const before = i > 0 && node.previousSibling;
      if (!before || placeOf.has(before)) return [node];
      if (before.nodeType !== Node.TEXT_NODE) return [before, node];
      const space = element("span", { className: "space" });
      before.replaceWith(space);
      space.append(before);
      return [space, node];
    });
  }

  // ------------------------------------------------------- one target is looked at

  function show(place, aloud = false) {
    for (const node of lit) {
      node.classList.remove("far", "first", "current", "pointed");
      node.removeAttribute("data-rank");
      node.style.removeProperty("--share");
      if (node.hasAttribute("aria-pressed")) node.setAttribute("aria-pressed", "false");
    }
    lit = [];
    current = place;
    markWindows(place);
    if (place !== null) {
      const node = tokens[place];
      lit = nodesOf(place, endOf(place));
      for (const one of lit) one.classList.add("current");
      if (node.hasAttribute("aria-pressed")) node.setAttribute("aria-pressed", String(held));
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
      const nodes = nodesOf(...runOf(side, rank)).filter((n) => !n.classList.contains("far"));
      for (const node of nodes) {
        node.style.setProperty("--share", Math.max(0, side.influence[rank] / most).toFixed(3));
        node.classList.add("far");
        node.classList.toggle("first", rank === 0);
        lit.push(node);
      }
      const begin = nodes.find((node) => placeOf.has(node));
      if (begin) begin.dataset.rank = String(rank + 1);
    });
  }

  const { long, short, stride, most, least = 1 } = page.windows;
  const firstTarget = long === "all" ? short + least : long;
  // Targets of one block share their windows.
  const blockOf = (place) => place - ((place - firstTarget) % stride);
  const startOf = (block) => (long !== "all" ? block - long : Math.max(0, most ? block - most : 0));

  function markWindows(place) {
    if (!globalThis.CSS || !CSS.highlights) return;
    CSS.highlights.clear();
    if (place === null || place < firstTarget) return;
    const block = blockOf(place);
    const between = (a, b) => {
      const range = new Range();
      range.setStartBefore(tokens[a]);
      range.setEndBefore(tokens[b]);
      return new Highlight(range);
    };
    CSS.highlights.set("far-window", between(startOf(block), block - short));
    CSS.highlights.set("short-window", between(block - short, place));
  }

  function aloudOf(place) {
    const own = entryOf(place)?.own, i = losses.get(place);
    let said = `${spell(textOf(place))}.`;
    if (i !== undefined) {
      said += ` Gap ${number(gapAt(place))} nats: ${number(doc.short[i])} with the short window, ` +
        `${number(doc.long[i])} with the long one.`;
    }
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
    const i = losses.get(place), entry = entryOf(place), target = chosen.get(place);
    const parts = [
      element("h3", { className: "unseen", textContent: "Target" }),
      element("p", { className: "word quoted", textContent: spell(textOf(place)) }),
    ];
    const sets = target ? target.sets.map((set) => page.set_names[set]) : [];
    const end = endOf(place), where = end > place + 1 ? `s ${place}:${end}` : ` ${place}`;
    parts.push(remark([`token${where}`, ...sets].join(" · ")));
    if (i === undefined) {
      const why = place < firstTarget ? "no full long window before it" : "not evaluated";
      panel.replaceChildren(...parts, remark(`Not a target: ${why}.`));
      return;
    }
    const values = { "local window": doc.short[i], "long window": doc.long[i], gap: gapAt(place) };
    const numbers = Object.entries(values).map(([name, value]) => element("div", {},
      element("dt", { textContent: name }), element("dd", { textContent: number(value) })));
    parts.push(element("dl", { className: "numbers" }, ...numbers));
    if (!entry) {
      const why = target ? "this selector did not search for this target." : "not a chosen target.";
      panel.replaceChildren(...parts, remark(`No influential units: ${why}`));
      return;
    }
    const { own, foreign } = entry;
    parts.push(
      heading("Loss with k distant units"), drawCurve(i, own, foreign),
      element("p", { className: "sides" }, element("b", { textContent: "● own units" }),
        element("i", { textContent: foreign ? "○ unrelated text" : "" }))
    );
    if (own?.first.length) {
      parts.push(
        heading("Positions"), drawStrip(place, own),
        heading("Influential units"), rankedList(place, own, false)
      );
    }
    if (foreign?.first.length) {
      parts.push(
        heading("Unrelated text"), remark("Selected the same way from another document."),
        rankedList(place, foreign, true)
      );
    }
    const summary = element("summary", { textContent: "The curve as numbers" });
    panel.replaceChildren(...parts, element("details", {}, summary, tableOfLosses(own, foreign)));
  }

  function drawCurve(i, own, foreign) {
    const width = 330, height = 136, left = 34, right = 44, top = 10, bottom = 22;
    const svg = picture(width, height, "Loss against k; a table of its numbers is at the end of the panel");
    const curves = [[foreign, "foreign"], [own, "own"]].filter(([side]) => side?.loss);
    const values = [doc.short[i], doc.long[i]];
    for (const [side] of curves) values.push(...side.loss.filter((value) => value !== null));
    const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
    const y = (value) => top + ((high - value) / span) * (height - top - bottom);
    const x = (step) => left + ((step + 0.5) / page.ks.length) * (width - left - right);
    shape(svg, "line", {
      class: "axis", x1: left, x2: width - right, y1: height - bottom + 6, y2: height - bottom + 6,
    });
    for (const [value, name] of [[doc.short[i], "local"], [doc.long[i], "long"]]) {
      shape(svg, "line", {
        class: "level", x1: left, x2: width - right, y1: y(value), y2: y(value),
      });
      shape(svg, "text", { class: "strong", x: width - right + 4, y: y(value) + 4 }, name);
      shape(svg, "text", { x: left - 4, y: y(value) + 4, "text-anchor": "end" }, number(value));
    }
    const every = Math.ceil(page.ks.length / 12);
    page.ks.forEach((k, step) => {
      const at = { x: x(step), y: height - 3, "text-anchor": "middle" };
      if (step % every === 0) shape(svg, "text", at, String(k));
    });
    shape(svg, "text", { x: left - 4, y: height - 3, "text-anchor": "end" }, "k");
    for (const [side, name] of curves) {
      const points = side.loss.map((value, step) => [x(step), value]).filter((p) => p[1] !== null);
      const path = points.map(([px, value]) => `${px},${y(value)}`).join(" ");
      shape(svg, "polyline", { class: `curve ${name}`, points: path });
      for (const [px, value] of points) {
        const kind = name === "own" ? name : `${name} hollow`;
        shape(svg, "circle", { class: kind, cx: px, cy: y(value), r: 3.2 });
      }
    }
    return svg;
  }

  function tableOfLosses(own, foreign) {
    const cell = (side, step) => number(side?.loss?.[step]);
    const head = ["k", "own units", "unrelated text"].map((name) =>
      element("th", { textContent: name, scope: "col" })
    );
    const rows = page.ks.map((k, step) =>
      element("tr", {}, element("th", { textContent: String(k), scope: "row" }),
        element("td", { textContent: cell(own, step) }),
        element("td", { textContent: cell(foreign, step) }))
    );
    return element("table", {}, element("thead", {}, element("tr", {}, ...head)),
      element("tbody", {}, ...rows));
  }

  // The long window as a line: what is off the screen is seen here.
  function drawStrip(place, { first, width: widths, influence }) {
    const width = 330, base = 44;
    const svg = picture(width, 60, "Places of the influential units in the long window");
    const block = blockOf(place), start = startOf(block);
    const x = (at) => ((at - start) / (place - start)) * (width - 8) + 4;
    shape(svg, "rect", { class: "reach", x: x(start), y: 8, height: base - 8,
      width: x(block - short) - x(start) });
    shape(svg, "rect", { class: "block", x: x(block - short), y: 8, height: base - 8,
      width: x(place) - x(block - short) });
    shape(svg, "line", { class: "axis", x1: 4, x2: width - 4, y1: base, y2: base });
    const most = Math.max(...influence, 1e-9);
    first.forEach((far, rank) => {
      const reach = Math.max(2, (Math.max(0, influence[rank]) / most) * (base - 12));
      shape(svg, "rect", { class: "own", x: x(far) - 1.2, y: base - reach,
        width: Math.max(2.4, x(far + widths[rank]) - x(far)), height: reach });
    });
    shape(svg, "text", { x: 4, y: 57 }, `${place - start} back`);
    const near = { x: x(block - short), y: 57, "text-anchor": "middle" };
    if (x(block - short) < width - 90) shape(svg, "text", near, `${place - block + short} back`);
    shape(svg, "text", { x: width - 4, y: 57, "text-anchor": "end" }, "target");
    return svg;
  }

  function rankedList(place, side, isForeign) {
    const { first, influence, text: texts } = side, most = Math.max(...influence, 1e-9);
    const rows = first.map((far, rank) => {
      const word = isForeign ? texts[rank] : textOf(...runOf(side, rank));
      const bar = element("span", { className: "bar" });
      bar.style.width = `${Math.max(0, (influence[rank] / most) * 100).toFixed(1)}%`;
      const cells = [
        element("span", { className: "rank", textContent: String(rank + 1) }),
        element("bdi", { className: "quoted", textContent: spell(word) }),
        element("span", { className: "back", textContent: `${place - far} back` }),
        element("span", { className: "score", textContent: score(influence[rank]) }),
        element("span"), bar,
      ];
      if (isForeign) return element("li", {}, element("div", { className: "row" }, ...cells));
      const button = element("button", { type: "button", title: "Show it in the text" }, ...cells);
      button.dataset.rank = String(rank);
      return element("li", {}, button);
    });
    return element("ol", { className: isForeign ? "ranked foreign" : "ranked" }, ...rows);
  }

  // ------------------------------------------------------------------ hands and keys

  const placeUnder = ({ target }) => owners.get(placeOf.get(target)) ?? placeOf.get(target) ?? null;
  text.addEventListener("pointerover", (event) => {
    const place = placeUnder(event);
    // Only what was searched answers to pointing; losses of other tokens are shown on a click.
    if (held || place === null || place === current) return;
    if (event.target.classList.contains("target")) show(place);
  });
  text.addEventListener("click", (event) => {
    const place = placeUnder(event);
    if (place === null) return;
    held = !(held && place === current);
    show(place, true);
    if (event.target.classList.contains("target")) focusOn(place);
  });
  text.addEventListener("focusin", (event) => {
    const place = placeUnder(event);
    if (place === null) return;
    if (place === current) live.textContent = aloudOf(place);
    else {
      held = false;
      show(place, true);
    }
  });
  function focusOn(place) {
    for (const other of text.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    tokens[place].tabIndex = 0;
    tokens[place].focus();
  }
  function move(place, by) {
    const at = shown.findLastIndex((one) => place !== null && one <= place);
    if (shown.length) focusOn(shown[Math.min(shown.length - 1, Math.max(0, at + by))]);
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
      const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, PageDown: 10,
        PageUp: -10, Home: -shown.length, End: shown.length };
      if (!(event.key in steps)) return;
      move(place, steps[event.key]);
    }
    event.preventDefault();
  });
  panel.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    held = true; // or the pointer's way back over the text would change the target
    for (const node of text.querySelectorAll(".pointed")) node.classList.remove("pointed");
    const run = nodesOf(...runOf(entryOf(current).own, Number(button.dataset.rank)));
    for (const node of run) node.classList.add("pointed");
    run[0].scrollIntoView({ block: "center" });
  });
  byId("tools").addEventListener("input", (event) => {
    if (event.target.id === "document") return openDocument(Number(byId("document").value));
    if (event.target.id === "selector" || event.target.id === "units") fillKinds();
    filter();
  });
  byId("tools").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    move(current, Number(button.dataset.by));
    held = true; // as above
    show(current);
  });
  document.addEventListener("click", ({ target }) => {
    if (!target.classList.contains("goto")) return;
    for (const [name, all] of [["set", "sets"], ["selector", "selectors"], ["units", "units"]]) {
      const index = page[all].indexOf(target.dataset[name]);
      if (index >= 0) byId(name).value = String(index);
    }
    byId("find").value = "";
    byId("gap").value = "0";
    fillKinds();
    byId("kind").value = "";
    filter();
    byId("explorer-title").scrollIntoView();
    move(null, 1);
  });
  byId("tools").addEventListener("submit", (event) => event.preventDefault());

  // ------------------------------------------------------------------ the beginning

  const options = (names) =>
    names.map((name, i) => element("option", { value: String(i), textContent: name }));
  const said = page.documents.map((one) => `${one.name} · ${one.num_targets} targets`);
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
  if (!page.sets.length) ["set", "kind", "gap", "find"].forEach(hide);
  byId("document").value = String(page.start);
  if (page.documents.length) openDocument(page.start);
  else text.textContent = "No documents were measured.";
})();
