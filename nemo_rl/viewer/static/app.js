// Keys, theme and live pages. Every page works without this script.
"use strict";
(() => {
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const stored = (name) => { try { return localStorage.getItem(name); } catch { return null; } };
  const store = (name, value) => { try { localStorage.setItem(name, value); } catch { /* private mode */ } };
  if (stored("theme")) root.dataset.theme = stored("theme");

  const toggleTheme = () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    store("theme", root.dataset.theme);
  };
  const showHelp = () => { if (!byId("help").open) byId("help").showModal(); };
  for (const [id, act] of [["theme", toggleTheme], ["help-button", showHelp]]) {
    byId(id).hidden = false;
    byId(id).addEventListener("click", act);
  }

  const rows = () => [...document.querySelectorAll("table.rows tbody tr, .card")].filter((row) => row.querySelector("a.open"));
  const move = (by) => {
    const all = rows();
    if (!all.length) return;
    const at = all.findIndex((row) => row.classList.contains("selected"));
    const next = all[Math.min(all.length - 1, Math.max(0, at < 0 ? (by > 0 ? 0 : all.length - 1) : at + by))];
    all.forEach((row) => row.classList.remove("selected"));
    next.classList.add("selected");
    next.querySelector("a.open").focus();
    next.scrollIntoView({ block: "nearest" });
  };
  const follow = (selector) => { const links = document.querySelectorAll(selector); if (links.length) links[links.length - 1].click(); };
  const fold = () => {
    const all = [...document.querySelectorAll("main details")];
    const open = all.some((each) => !each.open);
    all.forEach((each) => { each.open = open; });
  };
  const keys = {
    j: () => move(1), k: () => move(-1), o: fold, d: toggleTheme, "?": showHelp,
    "/": () => { const field = document.querySelector('input[type="search"]'); if (field) { field.focus(); field.select(); } else follow('.links a[href*="/rollouts"]'); },
    "[": () => follow("a.prev"), "]": () => follow("a.next"), u: () => follow("a.up, a.brand"),
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    if (Object.hasOwn(keys, event.key)) { event.preventDefault(); keys[event.key](); }
  });

  // Charts: the values under the pointer; dragging chooses the steps that are shown.
  const chartOf = (event) => event.target.closest?.("svg[data-points]");
  const across = (chart, event) => {
    const box = chart.getBoundingClientRect();
    return (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
  };
  const mark = (chart, name) => {
    let found = chart.querySelector("." + name);
    if (!found) {
      found = document.createElementNS("http://www.w3.org/2000/svg", name === "drag" ? "rect" : "line");
      found.setAttribute("class", name);
      chart.append(found);
    }
    return found;
  };
  const set = (element, values) => { for (const [name, value] of Object.entries(values)) element.setAttribute(name, value); };
  const edges = (chart) => [52, chart.viewBox.baseVal.width - 10];  // LEFT and RIGHT of charts.py
  let dragged = null;
  const leave = (chart) => {
    chart.querySelector(".pointer")?.remove();
    chart.closest("figure").querySelector("output").textContent = "";
  };
  document.addEventListener("pointermove", (event) => {
    const chart = chartOf(event);
    document.querySelectorAll("svg .pointer").forEach((line) => { if (line.ownerSVGElement !== chart) leave(line.ownerSVGElement); });
    if (!chart) return;
    const x = across(chart, event), height = chart.viewBox.baseVal.height;
    const points = JSON.parse(chart.dataset.points);
    const [at, text] = points.reduce((best, each) => Math.abs(each[0] - x) < Math.abs(best[0] - x) ? each : best);
    set(mark(chart, "pointer"), { x1: at, x2: at, y1: 10, y2: height - 26 });
    chart.closest("figure").querySelector("output").textContent = text;
    if (dragged?.chart === chart) set(mark(chart, "drag"), { x: Math.min(x, dragged.x), width: Math.abs(x - dragged.x), y: 10, height: height - 36 });
  });
  document.addEventListener("pointerdown", (event) => {
    const chart = chartOf(event);
    if (chart && event.button === 0 && event.pointerType === "mouse") { dragged = { chart, x: across(chart, event) }; event.preventDefault(); }
  });
  const zoom = (chart, from, to) => {
    const full = chart.closest("figure").querySelector("a.full");
    const target = new URL(document.querySelector("form.zoomed") || !full ? location.href : full.href);
    const step = document.querySelector('form.zoomed input[name="step"]');  // of a timeline, also if it is the last one
    if (step) target.searchParams.set("step", step.defaultValue);
    for (const [name, value] of [["from", from], ["to", to]]) { if (value === null) target.searchParams.delete(name); else target.searchParams.set(name, value); }
    location.href = target;
  };
  const zooms = (chart) => location.protocol !== "file:" && (document.querySelector("form.zoomed") || chart.closest("figure").querySelector("a.full"));
  document.addEventListener("pointerup", (event) => {
    if (!dragged) return;
    const { chart, x } = dragged, end = across(chart, event), [left, right] = edges(chart);
    dragged = null;
    chart.querySelector(".drag")?.remove();
    if (Math.abs(end - x) < 12 || !zooms(chart)) return;
    const [first, last] = chart.dataset.steps.split(" ").map(Number);
    const step = (at) => Math.round(first + Math.min(1, Math.max(0, (at - left) / (right - left))) * (last - first));
    zoom(chart, step(Math.min(x, end)), step(Math.max(x, end)));
  });
  document.addEventListener("dblclick", (event) => { const chart = chartOf(event); if (chart && document.querySelector("form.zoomed")) zoom(chart, null, null); });

  const source = document.body.dataset.live;
  if (!source || !window.EventSource) return;
  let running = false, again = false, pressed = false;
  const refresh = async () => {
    if (running || pressed) { again = true; return; }
    running = true;
    try {
      const answer = await fetch(location.href, { credentials: "same-origin" });
      const text = await answer.text();
      if (pressed) again = true;
      else if (answer.ok) replace(new DOMParser().parseFromString(text, "text/html"));
    } finally { running = false; if (again && !pressed) { again = false; refresh(); } }
  };
  // A page that is replaced between pressing and releasing a button would lose the click.
  document.addEventListener("pointerdown", () => { pressed = true; });
  for (const end of ["pointerup", "pointercancel"]) {
    document.addEventListener(end, () => { pressed = false; setTimeout(() => { if (again && !running) { again = false; refresh(); } }); });
  }
  const replace = (page) => {
    const main = byId("main"), next = page.getElementById("main");
    if (!next || main.contains(document.activeElement) && document.activeElement.matches("input, select")) return;
    const typed = [...main.querySelectorAll("form.filters input")].some((each) => each.value !== each.defaultValue);
    // Where no option is marked as selected, the first one is.
    const rendered = (select) => Math.max(0, [...select.options].findIndex((each) => each.defaultSelected));
    const chosen = [...main.querySelectorAll("form.filters select")].some((each) => each.selectedIndex !== rendered(each));
    if (typed || chosen) return;  // filters that were not sent yet
    const unfolded = [...main.querySelectorAll("details[id]")].filter((each) => each.open).map((each) => each.id);
    const focused = main.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    main.replaceChildren(...next.childNodes);
    unfolded.forEach((id) => { if (byId(id)) byId(id).open = true; });
    if (focused) [...main.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused)?.focus();
  };
  let events;
  const connect = () => {
    events = new EventSource("/events?source=" + encodeURIComponent(source) + "&seen=" + document.body.dataset.version);
    events.onmessage = refresh;
    events.onopen = () => { byId("live").textContent = "live"; };
    events.onerror = () => { byId("live").textContent = "not connected"; };
  };
  connect();
  // Firefox reports a connection that is open when the page is left as an error. A page that is still there a second
  // later, after a download or back from the history, connects again.
  addEventListener("beforeunload", () => { events.close(); setTimeout(connect, 1000); });
})();
