// Draws the page's charts: a legend that hides series, log scales, values under the pointer.

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 58, RIGHT = 22, TOP = 10, BOTTOM = 46, ROW = 34, NEAR = 28;
const SHAPES = {
  square: "M-4-4h8v8h-8z", triangle: "M0-5L5 4H-5z", diamond: "M0-6L5 0 0 6-5 0z",
  cross: "M-4-4L4 4M4-4L-4 4", circle: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0",
};
SHAPES.ring = SHAPES.circle;

function make(parent, name, attributes = {}, text = "") {
  const made = name.startsWith("svg:")
    ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  parent.append(made);
  return made;
}

function mark(parent, series, x, y) {
  const hollow = series.hollow || series.marker === "ring" || series.marker === "cross";
  make(parent, "svg:path", {
    d: SHAPES[series.marker], transform: `translate(${x} ${y})`, stroke: series.colour,
    "stroke-width": 2, fill: hollow ? "none" : series.colour,
  });
}

function stroke(parent, places, series) {
  make(parent, "svg:polyline", {
    points: places.map((p) => p.join(",")).join(" "), fill: "none",
    "stroke-width": !series.guide && OURS.has(series.name) ? 3.5 : 2,
    stroke: series.guide ? "var(--quiet)" : series.colour, "stroke-dasharray": series.dash,
  });
}

function span(axis, values) {
  let low = Math.min(...values), high = Math.max(...values);
  if (axis.log) {
    const factor = axis.base === 2 ? 2 ** 0.25 : 1.25;
    return [low / factor, high * factor];
  }
  if (axis.zero) low = Math.min(low, 0);
  const air = 0.06 * (high - low || 1);
  return [axis.zero && low >= 0 ? low : low - air, high + air];
}

function placer(axis, [low, high], start, end) {
  const of = axis.log ? Math.log : (value) => value;
  const room = of(high) - of(low) || 1;
  return (value) => start + (of(value) - of(low)) / room * (end - start);
}

function every(list, most) {
  const step = Math.max(1, Math.ceil(list.length / most));
  return list.filter((_, index) => index % step === 0);
}

function ticks(axis, [low, high], most) {
  if (!axis.log) return linearTicks(low, high, most);
  const made = [];
  if (axis.base === 2) {
    for (let p = Math.ceil(Math.log2(low)); p <= Math.log2(high); p++) made.push(2 ** p);
    return every(made, most);
  }
  let found = [];
  for (const steps of [[1, 2, 5], [1, 3], [1]]) {
    found = [];
    for (let d = Math.floor(Math.log10(low)); d <= Math.log10(high); d++)
      found.push(...steps.map((s) => Number(`${s}e${d}`)));
    found = found.filter((value) => value >= low && value <= high);
    if (found.length <= most) break;
  }
  return found.length < 3 ? linearTicks(low, high, most) : every(found, most);
}

function linearTicks(low, high, most) {
  const raw = (high - low) / Math.max(1, most - 1) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((s) => s * power).find((s) => s >= raw * 0.999);
  const made = [];
  for (let n = Math.ceil(low / step - 1e-9); n <= high / step + 1e-9; n++)
    made.push(Number((n * step).toPrecision(12)));
  return made;
}

function short(value, base) {
  if (base === 2 && value >= 1024 && value % 1024 === 0)
    return value < 1 << 20 ? `${value / 1024}k` : `${value / (1 << 20)}M`;
  if (value && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3))
    return value.toExponential(0).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

function clipped(series, [low, high]) {
  if (!series.guide) return series.points;
  const made = [];
  for (let i = 0; i + 1 < series.points.length; i++) {
    const [a, b] = [series.points[i], series.points[i + 1]];
    const first = Math.max(a[0], low), last = Math.min(b[0], high);
    for (const at of first < last ? [first, last] : []) {
      const part = (Math.log(at) - Math.log(a[0])) / (Math.log(b[0]) - Math.log(a[0]));
      made.push([at, a[1] === b[1] ? a[1] : Math.exp(Math.log(a[1]) + part * Math.log(b[1] / a[1]))]);
    }
  }
  return made;
}

class Picture {
  constructor(host, charts, notes) {
    this.charts = charts;
    this.notes = notes;
    this.scales = {};
    this.controls = make(host, "div", { class: "controls" });
    this.legend = make(host, "div", { class: "legend" });
    this.frame = make(host, "div", { class: "frame" });
    const details = make(host, "details");
    make(details, "summary", {}, "Numbers");
    this.numbers = make(details, "div", { class: "scroll" });
    this.chart = charts[0];
    this.choices(optionsOf(host.closest(".part")));
    this.show(charts[0]);
    new ResizeObserver(() => this.draw()).observe(this.frame);
  }

  // What the bar on top does not choose is chosen here.
  choices(common) {
    for (const key of Object.keys(this.charts[0].choice)) {
      const values = [...new Set(this.charts.map((chart) => chart.choice[key]))];
      if (values.length < 2 || values.every((value) => common[key]?.includes(value))) continue;
      const label = make(this.controls, "label", {}, `${key} `);
      const select = make(label, "select", { "data-key": key });
      for (const value of values) make(select, "option", { value }, value);
      select.onchange = () => this.choose({ [key]: select.value });
    }
    this.title = make(this.controls, "b");
    this.controls.prepend(this.title);
    for (const axis of ["x", "y"]) {
      const label = make(this.controls, "label", { "data-axis": axis });
      const box = make(label, "input", { type: "checkbox" });
      make(label, "span");
      box.onchange = () => { this.scales[axis] = box.checked; this.draw(); };
    }
  }

  // The chart that has most of these choices, and of the others most of what is shown.
  choose(asked) {
    const wanted = { ...this.chart.choice, ...asked };
    const fits = (chart) => Object.keys(wanted).reduce((sum, key) =>
      sum + (chart.choice[key] === wanted[key] ? (key in asked ? 8 : 1) : 0), 0);
    this.show(this.charts.reduce((best, chart) => (fits(chart) > fits(best) ? chart : best)));
  }

  show(chart) {
    this.chart = chart;
    this.scales = { x: chart.x.log, y: chart.y.log };
    for (const select of this.controls.querySelectorAll("select"))
      select.value = chart.choice[select.dataset.key];
    for (const label of this.controls.querySelectorAll("[data-axis]")) {
      const axis = label.dataset.axis;
      label.hidden = axis === "x" && chart.kind === "dots";
      label.firstChild.checked = this.scales[axis];
      label.lastChild.textContent = chart.kind === "dots" ? " log scale" : ` log ${axis}`;
    }
    this.title.textContent = chart.title;
    this.legend.replaceChildren();
    for (const series of chart.series) this.entry(series);
    this.list();
    this.draw();
  }

  // The numbers of the chart: a row for each place, a column for each candidate.
  list() {
    const { series, categories, kind, x, y } = this.chart;
    const shown = series.filter((one) => !one.guide);
    this.numbers.replaceChildren();
    const table = make(this.numbers, "table");
    const cells = (parent, tag, texts) => texts.forEach((text, column) =>
      make(parent, tag, column ? { class: "number" } : {}, text));
    const scatter = kind === "scatter";
    const head = scatter ? ["", x.label, y.label] : [kind === "dots" ? y.label : `${x.label} \\ ${y.label}`];
    cells(make(make(table, "thead"), "tr"), "th", [...head, ...(scatter ? [] : shown.map(titled))]);
    const body = make(table, "tbody");
    if (scatter) {
      for (const one of shown)
        for (const [at, value] of one.points)
          cells(make(body, "tr"), "td", [titled(one), short(at), short(value)]);
    } else {
      const places = [...new Set(shown.flatMap((one) => one.points.map((p) => p[0])))];
      for (const place of places.sort((a, b) => a - b)) {
        const found = shown.map((one) => one.points.find((p) => p[0] === place));
        const name = kind === "dots" ? categories[place][0] : short(place, x.base);
        cells(make(body, "tr"), "td", [name, ...found.map((p) => (p ? short(p[1]) : "–"))]);
      }
    }
    sortable(table);
  }

  entry(series) {
    const button = make(this.legend, "button", { type: "button", title: "hide or show" });
    const swatch = make(button, "svg:svg", { width: 22, height: 12, "aria-hidden": "true" });
    if (this.chart.kind === "line" || series.guide) stroke(swatch, [[0, 6], [22, 6]], series);
    if (!series.guide) mark(swatch, series, 11, 6);
    make(button, OURS.has(series.name) ? "b" : "span", {}, titled(series));
    button.setAttribute("aria-pressed", String(!hidden().has(series.name)));
    button.onclick = () => {
      const names = hidden();
      if (!names.delete(series.name)) names.add(series.name);
      change({ hide: [...names].join(",") });
    };
  }

  draw() {
    const width = this.frame.clientWidth, chart = this.chart;
    this.frame.replaceChildren();
    if (!width) return;
    const rows = chart.kind === "dots" ? chart.categories.length : 0;
    const height = rows ? TOP + ROW * rows + BOTTOM : Math.max(280, Math.min(440, width * 0.5));
    const svg = make(this.frame, "svg:svg", {
      width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title,
    });
    this.tip = make(this.frame, "div", { class: "tip", hidden: "" });
    const shown = chart.series.filter((series) => !hidden().has(series.name));
    if (!shown.some((series) => !series.guide && series.points.length)) {
      make(svg, "svg:text", { x: width / 2, y: 60, "text-anchor": "middle" }, "everything is hidden");
      return;
    }
    this.places = [];
    const axis = (name) => ({ ...chart[name], log: this.scales[name] });
    (rows ? dots : lines)(this, svg, shown, axis, width, height);
    svg.onpointermove = svg.onpointerdown = (event) => this.point(event, svg);
    svg.onpointerleave = () => { this.tip.hidden = true; };
  }

  point(event, svg) {
    const box = svg.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    let best = null, least = NEAR;
    for (const place of this.places) {
      const distance = Math.hypot(place.x - x, place.y - y);
      if (distance < least) [best, least] = [place, distance];
    }
    this.tip.hidden = !best;
    if (!best) return;
    this.tip.textContent = best.note;
    this.tip.style.borderColor = best.colour;
    const wide = this.tip.offsetWidth, high = this.tip.offsetHeight;
    const left = Math.max(0, Math.min(best.x + 12, box.width - wide));
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${best.y > high + 16 ? best.y - high - 10 : best.y + 14}px`;
  }
}

function lines(picture, svg, shown, axis, width, height) {
  const ax = axis("x"), ay = axis("y"), chart = picture.chart;
  const own = shown.filter((series) => !series.guide);
  const ends = span(ax, own.flatMap((series) => series.points.map((p) => p[0])));
  const found = shown.map((series) => clipped(series, ends));
  const yEnds = span(ay, found.flat().map((p) => p[1]));
  const bottom = height - BOTTOM;
  const x = placer(ax, ends, LEFT, width - RIGHT), y = placer(ay, yEnds, bottom, TOP);
  for (const value of ticks(ay, yEnds, 8)) {
    make(svg, "svg:path", { d: `M${LEFT} ${y(value)}H${width - RIGHT}`, class: "grid" });
    make(svg, "svg:text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, short(value, ay.base));
  }
  for (const value of ticks(ax, ends, Math.max(3, Math.floor(width / 70)))) {
    make(svg, "svg:path", { d: `M${x(value)} ${bottom}v5`, class: "grid" });
    make(svg, "svg:text", { x: x(value), y: bottom + 18, "text-anchor": "middle" }, short(value, ax.base));
  }
  make(svg, "svg:text", { x: (LEFT + width) / 2, y: height - 8, "text-anchor": "middle" }, ax.label);
  make(svg, "svg:text", {
    transform: `translate(12 ${(TOP + bottom) / 2}) rotate(-90)`, "text-anchor": "middle",
  }, ay.label);
  shown.forEach((series, index) => {
    const places = found[index].map((p) => [x(p[0]), y(p[1])]);
    if (chart.kind === "line" || series.guide) stroke(svg, places, series);
    if (!series.guide) places.forEach((place, n) => put(picture, svg, series, place, series.points[n][2]));
  });
}

function dots(picture, svg, shown, axis, width, height) {
  const ay = axis("y"), chart = picture.chart, bottom = height - BOTTOM;
  const ends = span(ay, shown.flatMap((series) => series.points.map((p) => p[1])));
  const x = placer(ay, ends, 10, width - RIGHT);
  for (const value of ticks(ay, ends, Math.max(3, Math.floor(width / 80)))) {
    make(svg, "svg:path", { d: `M${x(value)} ${TOP}V${bottom}`, class: "grid" });
    make(svg, "svg:text", { x: x(value), y: bottom + 18, "text-anchor": "middle" }, short(value, ay.base));
  }
  make(svg, "svg:text", { x: width / 2, y: height - 8, "text-anchor": "middle" }, ay.label);
  chart.categories.forEach(([name], row) => {
    make(svg, "svg:path", { d: `M10 ${TOP + ROW * row + 24}H${width - RIGHT}`, class: "grid" });
    make(svg, "svg:text", { x: 10, y: TOP + ROW * row + 12, class: "row" }, name);
  });
  for (const series of shown) {
    if (series.guide) {
      const at = x(series.points[0][1]);
      stroke(svg, [[at, TOP], [at, bottom]], series);
      continue;
    }
    for (const p of series.points)
      put(picture, svg, series, [x(p[1]), TOP + ROW * p[0] + 24], p[2]);
  }
}

function put(picture, svg, series, [x, y], note) {
  mark(svg, series, x, y);
  picture.places.push({ x, y, note: picture.notes[note], colour: series.colour });
}

function sortable(table) {
  table.querySelectorAll("th").forEach((head, column) => {
    head.onclick = () => {
      const body = table.tBodies[0], up = head.dataset.up !== "yes";
      head.dataset.up = up ? "yes" : "no";
      const key = (row) => row.cells[column].textContent;
      const order = (a, b) => key(a).localeCompare(key(b), "en", { numeric: true });
      const rows = [...body.rows].sort((a, b) => (up ? order(a, b) : order(b, a)));
      body.append(...rows);
    };
  });
}

function titled(series) {
  return OURS.has(series.name) ? `${series.name} (ours)` : series.name;
}

start();
