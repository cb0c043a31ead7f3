/* The explorer: a table of all results and curves by context. Its state is the fragment of the
   address, "#?table=...&sort=...", so that an address restores a view. */
(() => {
"use strict";

const { fields, tables, columns } = window.RESULTS;
const lines = window.RESULTS.lines.map(
  (values) => Object.fromEntries(fields.map((field, place) => [field, values[place]]))
);
const FILTERS = ["table", "dataset", "scale", "attention", "measure"];
const FIRST = { table: "extrapolation", attention: "linear", measure: "perplexity at 2048", sort: "mean:asc" };
const FIRST_CURVES = "extrapolation/wikitext-2-bpe/small";
const FIRST_LINES = ["linear:rope", "linear:lrpe-type2", "linear:alibi", "linear:fox, fox-bias 3.0",
  "softmax:rope", "softmax:lrpe-type2", "softmax:alibi", "softmax:stick-breaking"];
const MOST_LINES = 8; // of a group whose lines nobody picked
const ABOVE_BEST = 2.5; // values beyond this multiple of the best are outside the linear axis
const LEGEND_LINE = 19; // height of a line of the legend
const COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b"];
const VIEW = /^#(\?|%3F)(.*)$/i; // other fragments are anchors of the page
const narrow = window.matchMedia("(max-width: 46rem)");

const element = (id) => document.getElementById(id);
const filterOf = (name) => element("filters").elements[name];
const unique = (values) => [...new Set(values)];

// --- numbers as text -------------------------------------------------------------------------

const columnOf = (line) => columns[`${line.table}/${line.column}`];
const fixed = (value, line) => value === null ? "" : value.toFixed(columnOf(line).decimals);
const ours = (line) => fixed(line.mean, line) + (line.deviation === null ? "" : ` ± ${fixed(line.deviation, line)}`);
const measureOf = (line) => `${line.measure}\u00a0${columnOf(line).better === "lower" ? "↓" : "↑"}`;

function escaped(text) {
  const span = document.createElement("span");
  span.textContent = text;
  return span.innerHTML;
}

function linked(name) {
  const { page, title } = tables[name];
  return page ? `<a href="${page}.html" title="${escaped(title)}">${name}</a>` : name;
}

// --- the state and the address ---------------------------------------------------------------

function read() {
  const found = VIEW.exec(window.location.hash);
  return found ? Object.fromEntries(new URLSearchParams(found[2])) : { ...FIRST };
}

let state = read();
let restoring = false;

function remember(changes) {
  Object.assign(state, changes);
  for (const [key, value] of Object.entries(state)) {
    if (value === "" || value === null || value === undefined) delete state[key];
  }
  if (!restoring) window.history.replaceState(null, "", `#?${new URLSearchParams(state)}`);
}

// --- the table ---------------------------------------------------------------------------------

const number = (field, title, shown) => ({
  name: field, title, className: "number", type: "num",
  data: (line, kind) => kind === "display" ? shown(line) : (line[field] ?? null),
});
const text = (field, title, shown) => ({
  name: field, title,
  data: (line, kind) => kind === "display" ? shown(line) : line[field],
});
const COLUMNS = [
  text("method", "method", (line) => `<code>${escaped(line.method)}</code>`),
  text("attention", "attention", (line) => escaped(line.attention)),
  text("measure", "measure", (line) => escaped(measureOf(line))),
  number("mean", "ours", ours),
  number("paper", "paper", (line) => fixed(line.paper, line)),
  number("seeds", "seeds", (line) => line.seeds),
  text("table", "table", (line) => linked(line.table)),
  text("dataset", "data set", (line) => escaped(line.dataset)),
  text("scale", "scale", (line) => escaped(line.scale)),
];
const NARROW = ["method", "measure", "mean", "paper"]; // all that a narrow window shows
const ALWAYS = ["method", "mean", "seeds"];
const placeOf = (name) => COLUMNS.findIndex((column) => column.name === name);

function passes(line, except) {
  const needle = (state.method ?? "").trim().toLowerCase();
  return FILTERS.every((name) => name === except || !state[name] || line[name] === state[name])
    && (!needle || line.method.toLowerCase().includes(needle));
}

function fillFilters() {
  for (const name of FILTERS) {
    const found = unique(lines.filter((line) => passes(line, name)).map((line) => line[name]));
    if (state[name] && !found.includes(state[name])) found.push(state[name]);
    const label = (value) => name === "table" ? `${value}: ${tables[value]?.title ?? "unknown"}` : value;
    const options = [new Option("all", ""), ...found.map((value) => new Option(label(value), value))];
    filterOf(name).replaceChildren(...options);
    filterOf(name).value = state[name] ?? "";
  }
  if (filterOf("method").value !== (state.method ?? "")) filterOf("method").value = state.method ?? "";
}

function order() {
  const [name, direction] = (state.sort ?? "").split(":");
  return placeOf(name) < 0 ? [] : [[placeOf(name), direction === "desc" ? "desc" : "asc"]];
}

const grid = new window.DataTable("#lines", {
  data: [], columns: COLUMNS, order: [], pageLength: 25, autoWidth: false, deferRender: true,
  lengthMenu: [25, 100, { label: "all", value: -1 }],
  layout: { topStart: null, topEnd: null, bottomStart: ["info", "pageLength"], bottomEnd: "paging" },
  language: { emptyTable: "No line has all of this. Choose “all” in one of the lists." },
});

/* A column that is the same in all lines is not shown; the list above the table has its value. */
function showColumns(found) {
  for (const [place, { name }] of COLUMNS.entries()) {
    const fits = !narrow.matches || NARROW.includes(name);
    const varies = unique(found.map((line) => line[name])).length > 1;
    const told = name === "paper" ? found.some((line) => line.paper !== null) : varies || !found.length;
    grid.column(place).visible(fits && (ALWAYS.includes(name) || told), false);
  }
  grid.columns.adjust();
}

/* What all lines have in common. */
function common(found) {
  const same = ["table", "dataset", "scale", "attention", "measure"].filter(
    (name) => unique(found.map((line) => line[name])).length === 1 && found[0][name]
  );
  return same.map((name) => name === "table" ? linked(found[0].table) : escaped(
    { attention: `${found[0].attention} attention`, measure: measureOf(found[0]), scale: `scale ${found[0].scale}` }[name]
    ?? found[0][name])).join(", ");
}

function showTable() {
  fillFilters();
  const found = lines.filter((line) => passes(line)), same = common(found);
  element("about").innerHTML = `${found.length} of ${lines.length} lines${same ? `: ${same}` : ""}.`;
  showColumns(found);
  grid.clear().rows.add(found).order(order()).draw();
}

grid.on("order.dt", () => {
  if (restoring) return;
  const first = grid.order()[0];
  const sort = first && first[1] ? `${COLUMNS[first[0]].name}:${first[1]}` : "";
  if (sort !== (state.sort ?? "")) remember({ sort });
});

element("filters").addEventListener("input", (event) => {
  remember({ [event.target.name]: event.target.value });
  if (event.target.name === "table") followTable();
  restore();
});
element("filters").addEventListener("submit", (event) => event.preventDefault());
element("reset").addEventListener("click", () => {
  remember({ ...Object.fromEntries([...FILTERS, "method", "sort"].map((name) => [name, ""])) });
  restore();
});

// --- the curves --------------------------------------------------------------------------------

const groupOf = (line) => `${line.table}/${line.dataset}/${line.scale}`;
const nameOf = (line) => `${line.attention}:${line.method}`;
const groups = {}; // group -> name of a curve -> its lines
for (const line of lines.filter((line) => line.context !== null)) {
  ((groups[groupOf(line)] ??= {})[nameOf(line)] ??= []).push(line);
}
for (const [group, curves] of Object.entries(groups)) {
  for (const [name, points] of Object.entries(curves)) {
    points.sort((a, b) => a.context - b.context);
    if (points.length < 2) delete curves[name];
  }
  if (!Object.keys(curves).length) delete groups[group];
}

const group = () => groups[state.curves] ? state.curves : FIRST_CURVES in groups ? FIRST_CURVES : Object.keys(groups)[0];

function picked() {
  const curves = groups[group()];
  if (state.lines !== undefined) return state.lines.split("|").filter((name) => name in curves);
  const usual = FIRST_LINES.filter((name) => name in curves);
  return usual.length > 1 ? usual : Object.keys(curves).slice(0, MOST_LINES);
}

/* The curves of the table that was chosen above, if it has any. */
function followTable() {
  const own = Object.keys(groups).find((name) => name.startsWith(`${state.table}/`));
  if (own && own !== group()) remember({ curves: own, lines: "" });
}

function fillPicks() {
  const form = element("curve-form").elements, curves = groups[group()], chosen = picked();
  form.curves.replaceChildren(...Object.keys(groups).map((name) => new Option(name.replaceAll("/", ", "), name)));
  form.curves.value = group();
  form.log.checked = state.axis === "log";
  const kinds = unique(Object.values(curves).map((points) => points[0].attention));
  element("picks").replaceChildren(...kinds.map((kind) => fieldset(kind, curves, chosen)));
}

function fieldset(kind, curves, chosen) {
  const box = document.createElement("fieldset"), legend = document.createElement("legend");
  const choices = document.createElement("div");
  legend.textContent = kind.includes(",") ? kind : `${kind} attention`;
  choices.className = "group";
  for (const [name, points] of Object.entries(curves)) {
    if (points[0].attention !== kind) continue;
    const label = document.createElement("label"), input = document.createElement("input");
    Object.assign(input, { type: "checkbox", name: "line", value: name, checked: chosen.includes(name) });
    label.append(input, ` ${points[0].method}`);
    choices.append(label);
  }
  for (const [title, checked] of [["all", true], ["none", false]]) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: title });
    button.addEventListener("click", () => {
      for (const input of choices.querySelectorAll("input")) input.checked = checked;
      rememberPicks();
    });
    legend.append(button);
  }
  box.append(legend, choices);
  return box;
}

function rememberPicks() {
  const checked = [...element("picks").querySelectorAll("input:checked")].map((input) => input.value);
  remember({ lines: checked.join("|") || "none" });
  showCurves();
}

function trace(name, place) {
  const points = groups[group()][name], colour = COLOURS[place % COLOURS.length];
  const { attention, method } = points[0], end = top();
  const bars = points.map((line) => line.mean > end ? 0 : line.deviation ?? 0);
  return {
    x: points.map((line) => line.context), y: points.map((line) => line.mean),
    error_y: { type: "data", array: bars, thickness: 1, width: 3 },
    text: points.map((line) => `${ours(line)} (${line.seeds} seed${line.seeds === 1 ? "" : "s"})`),
    name: `${method}, ${attention}`, mode: "lines+markers", type: "scatter",
    hovertemplate: "%{fullData.name}<br>%{x} tokens: %{text}<extra></extra>",
    line: { color: colour, dash: attention === "softmax" ? "dash" : "solid" }, marker: { color: colour },
  };
}

/* One colour per method, so that its linear and softmax curves are recognized. */
function coloured(names) {
  const methods = unique(names.map((name) => groups[group()][name][0].method));
  return names.map((name) => trace(name, methods.indexOf(groups[group()][name][0].method)));
}

/* The end of the axis: the largest value of the picked curves, or a multiple of the best one. */
function top() {
  const values = picked().flatMap((name) => groups[group()][name].map((line) => line.mean));
  if (!values.length || state.axis === "log") return Infinity;
  return Math.min(Math.max(...values), Math.min(...values) * ABOVE_BEST);
}

function range(traces) {
  const end = top(), best = Math.min(...traces.flatMap((each) => each.y));
  return end === Infinity ? undefined : [best - 0.08 * (end - best), end + 0.08 * (end - best)];
}

function showCurves() {
  const style = getComputedStyle(document.body), traces = coloured(picked());
  const colour = style.getPropertyValue("--color-foreground-primary").trim() || "#000";
  const lengths = unique(traces.flatMap((each) => each.x)).sort((a, b) => a - b);
  const layout = {
    margin: { l: 55, r: 10, t: 10, b: narrow.matches ? 60 + LEGEND_LINE * traces.length : 45 }, hovermode: "closest", showlegend: true,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour, family: style.fontFamily },
    xaxis: { type: "log", title: { text: "context in tokens" }, tickvals: lengths, ticktext: lengths.map(String), gridcolor: "rgba(128,128,128,.25)" },
    yaxis: { type: state.axis === "log" ? "log" : "linear", title: { text: "perplexity" }, range: range(traces), gridcolor: "rgba(128,128,128,.25)" },
    legend: narrow.matches ? { x: 0, y: 0, yref: "container", yanchor: "bottom", font: { size: 11 } } : { x: 1.02, y: 1 },
    height: narrow.matches ? 340 + LEGEND_LINE * traces.length : 480,
  };
  const options = { responsive: true, displayModeBar: false };
  return window.Plotly.react("plot", traces, layout, options);
}

element("picks").addEventListener("change", rememberPicks);
element("curve-form").addEventListener("change", (event) => {
  const { name, value, checked } = event.target;
  remember(name === "log" ? { axis: checked ? "log" : "" } : { curves: value, lines: "" });
  fillPicks();
  showCurves();
});

// --- all of it ---------------------------------------------------------------------------------

function restore() {
  restoring = true;
  showTable();
  fillPicks();
  restoring = false;
  showCurves();
}

window.addEventListener("hashchange", () => {
  if (window.location.hash && !VIEW.test(window.location.hash)) return;
  state = read();
  restore();
});
/* The theme of the page is also that of DataTables and of the picture. */
const dark = window.matchMedia("(prefers-color-scheme: dark)");
function followTheme() {
  const theme = document.body.dataset.theme;
  document.documentElement.classList.toggle("dark", theme === "dark" || (theme !== "light" && dark.matches));
  showCurves();
}
new MutationObserver(followTheme).observe(document.body, { attributeFilter: ["data-theme"] });
dark.addEventListener("change", followTheme);

narrow.addEventListener("change", () => {
  showTable();
  showCurves();
});
restore();
followTheme();
document.documentElement.dataset.explorer = "ready";
})();
