// The live board: rows come by server-sent events; every text of a run is put there by textContent, so that it stays text.
(() => {
  "use strict";
  const at = id => document.getElementById(id);
  const rows = new Map(), places = new Map(), selected = new Set(), plots = new Map();
  const colours = ["#1f77b4", "#d95f02", "#7b52ab", "#1b9e55", "#c9302c", "#8c6d1f", "#d1488f", "#5a6b7b", "#17a2b8", "#9acd32", "#ff7f50", "#4b0082"];
  let shown = null, sure = 0;

  const element = (tag, text, kind) => {
    const made = document.createElement(tag);
    if (text != null) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  };
  const standing = row => row.running ? "live" : row.reached === "REFUTED" || ["done, refuted", "stopped", "ledger damaged", "unreadable"].includes(row.state) ? "bad"
    : row.state === "done and proven" && (row.reached === null || row.reached === "PROVEN") ? "good" : "open-end";
  const colour = id => colours[[...selected].indexOf(id) % colours.length];
  const ask = (path, options) => fetch(path, options).then(reply => reply.json().then(value => { if (!reply.ok) throw new Error(value.error); return value; }));

  // ---------------------------------------------------------------- the list
  function place(row) {
    let tr = places.get(row.id);
    if (!tr) {
      tr = element("tr");
      const box = element("input"), name = element("button", null, "open-run");
      box.type = "checkbox";
      name.type = "button";
      box.addEventListener("change", () => { box.checked ? selected.add(row.id) : selected.delete(row.id); drawSoon(); });
      name.addEventListener("click", () => show(row.id));
      for (let i = 0; i < 6; i++) tr.append(element("td"));
      tr.cells[0].append(box);
      tr.cells[1].append(name, element("span", null, "recipe"));
      places.set(row.id, tr);
    }
    const [, name, outcome, steps, held, left] = tr.cells;
    name.firstChild.textContent = row.run;
    name.lastChild.textContent = row.recipe;
    tr.cells[0].firstChild.setAttribute("aria-label", "select " + row.run);
    outcome.textContent = row.headline + (row.stopping ? " (saving, then stopping)" : "");
    outcome.className = standing(row);
    steps.textContent = row.steps == null ? "" : row.steps.toLocaleString("en");
    held.textContent = row.held_out ?? "";
    left.textContent = row.left.join(", ");
    return tr;
  }

  function filter() {
    const wanted = at("filter").value.toLowerCase();
    for (const [id, tr] of places) {
      const row = rows.get(id);
      tr.hidden = wanted !== "" && !`${row.run} ${row.recipe} ${row.headline}`.toLowerCase().includes(wanted);
    }
  }

  function took(told) {
    if (told.all) for (const id of [...rows.keys()].filter(id => !told.changed.some(row => row.id === id))) told.gone.push(id);
    for (const id of told.gone) { rows.delete(id); selected.delete(id); places.get(id)?.remove(); places.delete(id); }
    let added = false;
    for (const row of told.changed) { added ||= !rows.has(row.id); rows.set(row.id, row); place(row); }
    if (added) at("runs").append(...[...rows.values()].sort((a, b) => a.run < b.run ? -1 : 1).map(row => places.get(row.id)));
    const running = [...rows.values()].filter(row => row.running).length;
    at("count").textContent = rows.size === 0 ? "No runs yet" : `${rows.size} run${rows.size === 1 ? "" : "s"}, ${running} running`;
    filter();
    if (told.changed.some(row => selected.has(row.id)) || told.gone.length) drawSoon();
    if (shown !== null && told.changed.some(row => row.id === shown)) show(shown);
  }

  function machine(told) {
    const lines = told.gpus === null ? ["no NVIDIA GPU is visible here"] : told.gpus.map(gpu =>
      `GPU ${gpu.index} ${gpu.name}: ${gpu.busy} % busy, ${gpu.used} of ${gpu.total} MiB, ${gpu.celsius} °C, ${gpu.watts} W`);
    at("gpus").replaceChildren(...lines.map(line => element("span", line)));
  }

  // ---------------------------------------------------------------- curves
  let due = 0, drawing = false;
  const drawSoon = () => { clearTimeout(due); due = setTimeout(draw, 150); };

  async function draw() {
    at("curves").hidden = selected.size === 0;
    if (drawing) return drawSoon();
    drawing = true;
    try {
      const found = selected.size === 0 ? {} : (await ask("/api/curves?" + [...selected].map(id => "run=" + id).join("&"))).curves;
      legend();
      for (const key of [...plots.keys()].filter(key => !(key in found))) { plots.get(key).figure.remove(); plots.delete(key); }
      for (const key of Object.keys(found).sort(byRank)) chart(key, found[key]);
    } finally { drawing = false; }
  }

  const FIRST = ["loss", "eval_loss", "reward", "eval_reward", "kl", "entropy", "grad_norm", "learning_rate"];
  const rank = key => FIRST.includes(key) ? FIRST.indexOf(key) : key.startsWith("eval_") ? 1.5 : 99;
  const byRank = (a, b) => rank(a) - rank(b) || (a < b ? -1 : 1);

  function legend() {
    at("legend").replaceChildren(...[...selected].map(id => {
      const entry = element("span"), mark = document.createElementNS("http://www.w3.org/2000/svg", "svg"), dot = document.createElementNS(mark.namespaceURI, "circle");
      mark.setAttribute("viewBox", "0 0 12 12");
      for (const [name, value] of [["cx", 6], ["cy", 6], ["r", 6], ["fill", colour(id)]]) dot.setAttribute(name, value);
      mark.append(dot);
      entry.append(mark, element("b", rows.get(id)?.run ?? ""));
      return entry;
    }));
  }

  function chart(key, curves) {
    let drawn = plots.get(key);
    if (!drawn) {
      const figure = element("figure"), place = element("div", null, "chart");
      figure.append(element("figcaption", key), place);
      at("charts").append(figure);
      drawn = { figure, place, plot: null, shape: "" };
      plots.set(key, drawn);
    }
    const width = Math.floor(drawn.place.clientWidth), shape = width + curves.map(c => c.run + !!c.low + colour(c.run)).join();
    const data = uPlot.join(curves.flatMap(c => [c.y, ...(c.low ? [c.low, c.high] : [])].map(values => [c.x, values])));
    if (drawn.plot && drawn.shape === shape) return drawn.plot.setData(data);
    drawn.plot?.destroy();
    drawn.shape = shape;
    drawn.plot = new uPlot(settings(curves, width), data, drawn.place);
  }

  function settings(curves, width) {
    const series = [{ label: "step" }], bands = [], style = getComputedStyle(document.documentElement);
    for (const curve of curves) {
      const stroke = colour(curve.run), few = curve.x.length <= 60;
      series.push({ label: rows.get(curve.run)?.run ?? "", stroke, width: 1.6, spanGaps: true, points: { show: few, size: 5, fill: stroke } });
      if (curve.low) {
        const edge = { stroke: stroke + "40", width: 1, spanGaps: true, points: { show: false } };
        series.push({ label: "low", ...edge }, { label: "high", ...edge });
        bands.push({ series: [series.length - 1, series.length - 2], fill: stroke + "2e" });
      }
    }
    const axis = { stroke: style.getPropertyValue("--quiet").trim(), grid: { stroke: style.getPropertyValue("--rule").trim(), width: 1 } };
    return { width, height: 220, series, bands, legend: { show: false }, scales: { x: { time: false } }, axes: [{ ...axis, size: 30 }, { ...axis, size: 62 }] };
  }

  // ---------------------------------------------------------------- one run
  async function show(id) {
    const other = shown !== id;
    shown = id;
    if (other) { sure = 0; at("answer").textContent = ""; if (selected.size === 0) { selected.add(id); places.get(id).cells[0].firstChild.checked = true; drawSoon(); } }
    const run = await ask("/api/runs/" + id);
    if (shown !== id) return;
    for (const [other, tr] of places) tr.classList.toggle("open", other === id);
    at("details").hidden = false;
    at("name").textContent = run.run;
    at("headline").textContent = run.headline + (run.reason ? " (" + run.reason + ")" : "");
    at("headline").className = "standing " + standing(run);
    at("about").textContent = [run.recipe, run.last_proven ? "last proven " + run.last_proven : "nothing proven yet", run.parent ? "from " + run.parent : null, ...run.left, ...run.remarks].filter(Boolean).join(" · ");
    stopButton(run);
    keepOpen(at("verdicts"), run.verdicts.map(finding), "no verdict has fallen yet");
    keepOpen(at("samples"), run.samples.flatMap(samples), "none are recorded");
    if (other) at("details").scrollIntoView({ block: "nearest" });
  }

  function keepOpen(place, made, none) {
    const open = new Set([...place.querySelectorAll("details[open]")].map(fold => fold.dataset.key));
    place.replaceChildren(...(made.length ? made : [element("p", none, "missing")]));
    place.querySelectorAll("details").forEach(fold => { fold.open = open.has(fold.dataset.key); });
  }

  function finding(one) {
    const made = element("div", null, "finding"), fold = element("details");
    fold.dataset.key = one.stage + "/" + one.check;
    fold.append(element("summary", `evidence (${one.ran}, line ${one.line} of the ledger)`), element("pre", one.evidence));
    made.append(element("span", one.outcome, "badge " + one.outcome.toLowerCase()), element("b", ` ${one.check} `), element("span", `(${one.stage}) ${one.reason}`), fold);
    return made;
  }

  function samples(group) {
    return [element("p", group.words, "lead"), ...group.examples.map(example => {
      const made = element("div", null, "sides");
      for (const side of [{ who: "prompt", text: example.prompt, facts: "" }, ...example.sides]) {
        const part = element("div"), head = element("h4", side.who);
        head.append(element("small", side.facts));
        part.append(head, element("pre", side.text));
        made.append(part);
      }
      return made;
    })];
  }

  function stopButton(run) {
    const button = at("stop");
    button.hidden = !run.running;
    button.disabled = run.stopping;
    button.className = sure ? "sure" : "";
    button.textContent = run.stopping ? "saving, then stopping" : sure ? "really? it saves first" : "save and stop";
  }

  at("stop").addEventListener("click", async () => {
    if (!sure) { sure = setTimeout(() => { sure = 0; if (rows.has(shown)) stopButton(rows.get(shown)); }, 5000); return stopButton(rows.get(shown)); }
    clearTimeout(sure);
    sure = 0;
    try {
      await ask(`/api/runs/${shown}/stop`, { method: "POST", headers: { "Content-Type": "application/json" }, body: "{}" });
      at("answer").textContent = "asked: it saves, then it stops";
    } catch (error) { at("answer").textContent = error.message; }
  });

  at("filter").addEventListener("input", filter);
  at("clear").addEventListener("click", () => { selected.clear(); document.querySelectorAll("#runs input").forEach(box => { box.checked = false; }); drawSoon(); });
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 150); });

  const source = new EventSource("/api/events");
  source.addEventListener("open", () => { at("link").textContent = "live"; });
  source.addEventListener("error", () => { at("link").textContent = "the board's server does not answer; trying again"; });
  source.addEventListener("runs", event => took(JSON.parse(event.data)));
  source.addEventListener("machine", event => machine(JSON.parse(event.data)));
})();
