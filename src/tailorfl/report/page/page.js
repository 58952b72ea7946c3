"use strict";
(() => {
  const all = (query, from = document) => [...from.querySelectorAll(query)];

  // Dark or light: the button turns round what the page shows now.
  const toggle = document.getElementById("theme"), root = document.documentElement;
  toggle.hidden = false;
  toggle.addEventListener("click", () => {
    const now = root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  });

  // Tables: a button in every head sorts by it, numbers from the largest on; what is no number goes last.
  const key = (row, column) => {
    const cell = row.cells[column], given = cell.dataset.value;
    const value = parseFloat(given === undefined ? cell.textContent.replace(/,/g, "").replace("−", "-") : given);
    return [value, cell.textContent.trim()];
  };
  for (const table of all("table")) {
    const body = table.tBodies[0];
    if (!body || body.rows.length < 2) continue;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const rows = [...body.rows], keys = new Map(rows.map(row => [row, key(row, column)]));
        const numeric = column > 0 && rows.some(row => !isNaN(keys.get(row)[0]));
        const before = head.getAttribute("aria-sort");
        const up = before ? before === "descending" : !numeric;
        for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const sign = up ? 1 : -1;
        rows.sort((a, b) => {
          const [x, s] = keys.get(a), [y, t] = keys.get(b);
          if (!numeric) return sign * s.localeCompare(t, undefined, {numeric: true});
          if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
          return sign * (x - y);
        });
        body.append(...rows);
      });
    });
  }

  const held = document.getElementById("store");
  if (!held) return;
  const {charts, data} = JSON.parse(held.textContent), views = [];
  const config = {
    background: "transparent", font: "system-ui, sans-serif", view: {stroke: null},
    axis: {labelColor: "var(--ink)", titleColor: "var(--ink)", gridColor: "var(--grid)", domainColor: "var(--soft)",
           tickColor: "var(--soft)", labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal"},
    legend: {labelColor: "var(--ink)", titleColor: "var(--ink)", titleFontWeight: "normal", titleLimit: 300},
  };
  const filled = part => {  // named data of the page, wherever a specification asks for them
    const copy = {...part};
    if (copy.data && copy.data.name) copy.data = {values: data[copy.data.name]};
    if (copy.layer) copy.layer = copy.layer.map(filled);
    return copy;
  };
  const tell = (name, value) => {
    for (const view of views)
      if (name in view.getState({signals: n => n === name, data: () => false}).signals) view.signal(name, value).runAsync();
  };

  // One client, marked everywhere: by pointing at it, by a click that stays, or by the list.
  const choices = all("select.client"), people = new Map((data.clients || []).map(row => [row.id, row]));
  let kept = "";
  const mark = id => {
    tell("shown", id);
    for (const said of all(".said")) {
      const row = people.get(id);
      said.textContent = row ? `${row.name}, seed ${row.seed}, ${row.samples} test samples` : "";
    }
  };
  const keep = id => {
    kept = kept === id ? "" : id;
    for (const select of choices) select.value = people.has(kept) ? kept : "";
    mark(kept);
  };
  for (const select of choices) {
    select.closest(".choose").hidden = false;
    for (const row of people.values()) select.add(new Option(`${row.name}, seed ${row.seed}`, row.id));
    select.addEventListener("change", () => { kept = select.value; mark(kept); });
  }
  addEventListener("keydown", event => { if (event.key === "Escape") keep(kept); });

  // The legend of methods hides, shows and lights up lines in all curves.
  const hidden = new Set();
  for (const button of all("button.key")) {
    const label = button.dataset.label;
    const light = value => () => tell("lit", value);
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, light(label));
    for (const event of ["pointerleave", "blur"]) button.addEventListener(event, light(""));
    button.addEventListener("click", () => {
      hidden.has(label) ? hidden.delete(label) : hidden.add(label);
      for (const same of all("button.key"))
        if (same.dataset.label === label) same.setAttribute("aria-pressed", String(!hidden.has(label)));
      tell("hidden", [...hidden]);
    });
  }

  const drawn = all(".chart").map(async place => {
    const {spec, alt} = charts[place.dataset.chart];
    const whole = {width: "container", autosize: {type: "fit-x", contains: "padding"}, description: alt, ...filled(spec)};
    const {view} = await vegaEmbed(place, whole, {actions: false, renderer: "svg", config, tooltip: {theme: "custom"}, logLevel: vega.Error});
    views.push(view);
    view.addEventListener("pointerover", (_, item) => { if (item && item.datum && item.datum.id) mark(item.datum.id); });
    view.addEventListener("pointerout", () => mark(kept));
    view.addEventListener("click", (_, item) => { if (item && item.datum && item.datum.id) keep(item.datum.id); });
  });
  Promise.all(drawn).then(() => { root.dataset.drawn = String(views.length); });
})();
