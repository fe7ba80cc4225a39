// Charts of a page: see curves.py. One function is for others: anytrain.update(told).
"use strict";

(() => {
  const COLOURS = ["one", "two", "three", "four", "five", "six", "seven", "eight"];
  const SCALES = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  const POWERS = Array.from({ length: 50 }, (_, n) => 2 ** n);
  // By the charts' names, which may be anything: "constructor", for one.
  const plots = Object.create(null);
  const figures = Object.create(null);
  const colour = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const font = "12px system-ui, sans-serif";

  function make(name, attributes, ...content) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...content);
    return made;
  }

  function number(value, unit) {
    if (value == null) return "–";
    if (unit === "bytes") {
      const [name, scale] = SCALES.find((each) => Math.abs(value) >= each[1]) ?? ["B", 1];
      return `${+(value / scale).toPrecision(3)} ${name}`;
    }
    const size = Math.abs(value);
    let text;
    if (Number.isInteger(value) && size < 1e9) text = value.toLocaleString("en-US");
    else if (size !== 0 && (size < 1e-3 || size >= 1e9)) text = value.toExponential(2);
    else text = String(+value.toPrecision(5));
    return unit === "seconds" ? `${text} s` : text;
  }

  // Marks of an axis: of sizes all in one unit, with digits enough to tell them apart.
  function marks(ticks, unit) {
    if (unit !== "bytes" || ticks.length < 2) return ticks.map((tick) => number(tick, unit));
    const largest = Math.abs(ticks[ticks.length - 1]);
    const [name, scale] = SCALES.find((each) => largest >= each[1]) ?? ["B", 1];
    const digits = Math.ceil(Math.log10(scale / (ticks[1] - ticks[0])));
    return ticks.map((tick) => `${+(tick / scale).toFixed(digits < 0 ? 0 : digits + 1)} ${name}`);
  }

  // Series have x values of their own: one x for all, and undefined where a series has nothing.
  function columns(chart) {
    const own = chart.series.map((series) => [series.x, series.y]);
    return own.length === 1 ? own[0] : uPlot.join(own);
  }

  // What a series shows at the cursor: its own point that lies nearest.
  function nearest(plot, series, index) {
    const values = plot.data[series];
    if (series === 0 || values[index] != null) return index;
    const xs = plot.data[0];
    let left = index, right = index;
    while (left >= 0 && values[left] == null) left--;
    while (right < xs.length && values[right] == null) right++;
    if (left < 0) return right < xs.length ? right : index;
    if (right >= xs.length) return left;
    return xs[index] - xs[left] <= xs[right] - xs[index] ? left : right;
  }

  // Where the keys have led, until the mouse moves: by x alone, points of one x are all the same.
  function standing(name, pointed) {
    const { at } = figures[name];
    return at != null && at < plots[name].data[0].length ? at : pointed;
  }

  function drawMarks(plot, marks) {
    const { ctx, bbox } = plot;
    const ratio = devicePixelRatio;
    const above = bbox.top - 14 * ratio;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour("dim");
    ctx.lineWidth = ratio;
    ctx.setLineDash([3 * ratio, 3 * ratio]);
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textBaseline = "top";
    for (const mark of marks) {
      const x = plot.valToPos(mark.x, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, above);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      const room = bbox.left + bbox.width - x > ctx.measureText(mark.text).width + 8 * ratio;
      ctx.textAlign = room ? "left" : "right";
      ctx.fillText(mark.text, x + (room ? 4 : -4) * ratio, above);
    }
    ctx.restore();
  }

  function axis(extra) {
    return {
      stroke: colour("dim"), font,
      grid: { stroke: colour("line"), width: 1 },
      ticks: { stroke: colour("line"), width: 1, size: 5 },
      ...extra,
    };
  }

  // A range with room around it; one value, or none, has no width of its own.
  function range(low, high, share) {
    if (low == null) return [0, 1];
    const room = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * share;
    return [low - room, high + room];
  }

  // Bars and dots have a width of their own, which must not be cut off.
  function across(chart, low, high) {
    if (low != null && low !== high && chart.kind === "line") return [low, high];
    const bins = chart.kind === "bars" ? chart.series[0].x.length : 0;
    return range(low, high, bins > 1 ? 0.5 / (bins - 1) : 0.03);
  }

  function line(chart, series, n) {
    const stroke = colour(COLOURS[n % COLOURS.length]);
    const fill = colour("back");
    const drawn = {
      label: series.name,
      stroke,
      value: (plot, value, of, index) =>
        number(index == null ? null : plot.data[of][nearest(plot, of, index)], chart.unit),
    };
    if (chart.kind === "dots") return { ...drawn, paths: () => null, points: { show: true, size: 5, fill } };
    if (chart.kind === "bars") {
      const paths = uPlot.paths.bars({ size: [0.9, 100], align: 0 });
      return { ...drawn, paths, fill: stroke, width: 0, points: { show: false } };
    }
    // Few points are events, such as evaluations: each is shown, whatever else is in the chart.
    const points = { size: 5, fill, ...(series.x.length <= 100 && { show: true }) };
    return { ...drawn, width: 1.75, dash: n >= COLOURS.length ? [6, 4] : undefined, points };
  }

  // Where nobody points, the legend tells the last values.
  function showLast(plot) {
    const last = plot.data[0].length - 1;
    if (last >= 0) plot.setLegend({ idx: last }, false);
  }

  // Of paper a page knows nothing: what is drawn for it is fitted by the style.
  function width(chart, place) {
    if (matchMedia("print").matches) return chart.broad ? 860 : 430;
    return Math.max(place.clientWidth, 200);
  }

  function options(chart, place) {
    const bars = chart.kind === "bars";
    const values = (plot, ticks) => marks(ticks, chart.unit);
    // As wide as the widest label that is likely.
    const size = chart.unit === "bytes" ? 82 : 62;
    return {
      width: width(chart, place),
      height: chart.broad ? 300 : 210,
      padding: [chart.marks.length ? 22 : 10, 26, 0, 0],
      scales: {
        x: { time: false, range: (plot, low, high) => across(chart, low, high) },
        y: { range: (plot, low, high) => (bars ? [0, high || 1] : range(low, high, 0.06)) },
      },
      axes: [
        axis({ values: (plot, ticks) => ticks.map((tick) => number(tick)), size: 34 }),
        axis({ values, size, ...(chart.unit === "bytes" && { incrs: POWERS }) }),
      ],
      series: [
        { label: chart.across, value: (plot, value) => number(value) },
        ...chart.series.map((series, n) => line(chart, series, n)),
      ],
      cursor: {
        dataIdx: (plot, series, index) =>
          nearest(plot, series, plots[chart.name] ? standing(chart.name, index) : index),
        drag: { x: true, y: false, setScale: true },
        points: { size: 8 },
        y: false,
      },
      legend: { live: true },
      hooks: {
        draw: [(plot) => drawMarks(plot, figures[chart.name].chart.marks)],
        ready: [showLast],
        setCursor: [(plot) => plot.cursor.idx == null && showLast(plot)],
        setData: [(plot) => plot.cursor.idx == null && showLast(plot)],
      },
    };
  }

  // What the x axis shows: null where it shows everything.
  function view(plot) {
    const xs = plot.data[0];
    const { min, max } = plot.scales.x;
    const whole = xs.length === 0 || min == null || (min <= xs[0] && max >= xs[xs.length - 1]);
    return whole ? null : { min, max };
  }

  function reset(name) {
    const plot = plots[name];
    plot.setData(plot.data, true);
  }

  function zoom(name, factor) {
    const plot = plots[name];
    const xs = plot.data[0];
    if (xs.length < 2) return;
    const { min, max } = plot.scales.x;
    const at = standing(name, plot.cursor.idx);
    const centre = at == null || xs[at] < min || xs[at] > max ? (min + max) / 2 : xs[at];
    const low = Math.max(centre - (centre - min) * factor, xs[0]);
    const high = Math.min(centre + (max - centre) * factor, xs[xs.length - 1]);
    if (high > low) plot.setScale("x", { min: low, max: high });
  }

  function point(name, index) {
    const plot = plots[name];
    const { chart, said } = figures[name];
    const xs = plot.data[0];
    figures[name].at = index;
    plot.setCursor({ left: plot.valToPos(xs[index], "x"), top: 1 });
    const values = chart.series.map((series, n) => {
      const shown = plot.data[n + 1][nearest(plot, n + 1, index)];
      return `${series.name} ${number(shown, chart.unit)}`;
    });
    said.textContent = `${chart.across} ${number(xs[index])}: ${values.join(", ")}`;
  }

  function move(name, key) {
    const plot = plots[name];
    const xs = plot.data[0];
    const { min, max } = plot.scales.x;
    const shown = xs.map((x, n) => n).filter((n) => xs[n] >= min && xs[n] <= max);
    if (shown.length === 0) return;
    const first = shown[0], last = shown[shown.length - 1];
    const at = standing(name, plot.cursor.idx);
    const next = {
      Home: first,
      End: last,
      ArrowRight: at == null ? first : at + 1,
      ArrowLeft: at == null ? last : at - 1,
    }[key];
    point(name, Math.min(Math.max(next, first), last));
  }

  function pressed(name, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) move(name, event.key);
    else if (event.key === "+" || event.key === "=") zoom(name, 0.5);
    else if (event.key === "-") zoom(name, 2);
    else if (event.key === "0" || event.key === "Escape") reset(name);
    else return;
    event.preventDefault();
  }

  function fillTable(name) {
    const { chart, details } = figures[name];
    const data = columns(chart);
    const head = [chart.across, ...chart.series.map((series) => series.name)];
    const cell = (kind, text, scope) =>
      make(kind, { class: "number", ...(scope && { scope }) }, text);
    const top = make("tr", {}, ...head.map((text) => cell("th", text, "col")));
    const rows = data[0].map((x, n) =>
      make("tr", {}, cell("th", number(x), "row"),
        ...data.slice(1).map((ys) => cell("td", ys[n] == null ? "" : String(ys[n])))));
    const thinned = chart.series.some((series) => series.of > series.x.length);
    const caption = chart.title + (thinned ? " (thinned out; lowest and highest are kept)" : "");
    const table = make("table", {}, make("caption", {}, caption),
      make("thead", {}, top), make("tbody", {}, ...rows));
    details.lastChild.replaceChildren(table);
  }

  function button(text, label, action) {
    const made = make("button", { type: "button", "aria-label": label, title: label }, text);
    made.addEventListener("click", action);
    return made;
  }

  function furnish(figure, chart) {
    const name = chart.name;
    const words = figure.querySelector("p");
    words.id = `words-${Object.keys(figures).length}`;
    const plot = make("div", {
      class: "plot", tabindex: "0", role: "application", "aria-roledescription": "chart",
      "aria-label": `${chart.title}. Arrow keys move along it, plus and minus zoom, 0 shows all.`,
      "aria-describedby": words.id,
    });
    const said = make("div", { class: "unseen", "aria-live": "polite" });
    const buttons = make("div", { class: "buttons" },
      button("+", `Zoom in: ${chart.title}`, () => zoom(name, 0.5)),
      button("−", `Zoom out: ${chart.title}`, () => zoom(name, 2)),
      button("All", `Show all: ${chart.title}`, () => reset(name)));
    const details = make("details", {}, make("summary", {}, "Data as a table"),
      make("div", { class: "wide", tabindex: "0", role: "region",
        "aria-label": `Data as a table: ${chart.title}` }));
    details.addEventListener("toggle", () => details.open && fillTable(name));
    plot.addEventListener("keydown", (event) => pressed(name, event));
    // Before uPlot hears of it, which then asks where it points.
    plot.addEventListener("mousemove", () => { figures[name].at = null; }, { capture: true });
    figure.append(buttons, plot, said, details);
    figures[name] = { figure, chart, plot, said, details, at: null };
  }

  // A new chart stands after the one that is told before it.
  function place(chart, before) {
    const found = [...document.querySelectorAll("figure[data-chart]")]
      .find((each) => each.dataset.chart === chart.name);
    if (found) return found;
    const made = make("figure",
      { class: chart.broad ? "chart broad" : "chart", "data-chart": chart.name },
      make("figcaption", {}, chart.title), make("p", { class: "dim" }));
    if (before) before.after(made);
    else document.querySelector(".charts").prepend(made);
    return made;
  }

  function draw(name) {
    const { chart, plot } = figures[name];
    const old = plots[name];
    const kept = old && view(old);
    if (old) old.destroy();
    plots[name] = new uPlot(options(chart, plot), columns(chart), plot);
    for (const row of plot.querySelectorAll(".u-legend th")) row.setAttribute("scope", "row");
    if (kept) plots[name].setScale("x", kept);
  }

  const names = (chart) => JSON.stringify([chart.unit, chart.series.map((each) => each.name)]);

  function update(told) {
    let before = null;
    for (const chart of told.charts) {
      const known = figures[chart.name];
      if (!known) furnish(place(chart, before), chart);
      const { figure, details } = figures[chart.name];
      before = figure;
      const same = known && names(known.chart) === names(chart);
      figures[chart.name].chart = chart;
      figure.querySelector("figcaption").textContent = chart.title;
      figure.querySelector("p").textContent = chart.summary;
      if (same) {
        const plot = plots[chart.name];
        const kept = view(plot);
        plot.setData(columns(chart), kept === null);
        if (kept) plot.setScale("x", kept);
      } else {
        draw(chart.name);
      }
      if (details.open) fillTable(chart.name);
    }
  }

  const drawAll = () => Object.keys(figures).forEach(draw);

  // What a region is called: what stands over the table, or over all of it.
  const called = (each) =>
    (each.querySelector("caption") ?? each.closest("section")?.querySelector("h2"))
      ?.textContent ?? "Scrolls sideways";

  // Wide tables scroll by themselves; a keyboard must reach those that do.
  function reachTables() {
    for (const each of document.querySelectorAll(".wide, pre")) {
      if (each.closest("details details, figure")) continue;
      const scrolls = each.scrollWidth > each.clientWidth;
      for (const [key, value] of Object.entries({ tabindex: "0", role: "region", "aria-label": called(each) })) {
        if (scrolls) each.setAttribute(key, value);
        else each.removeAttribute(key);
      }
    }
  }

  // What was folded away had no width.
  document.addEventListener("toggle", reachTables, { capture: true });

  let seen = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === seen) return;
    seen = innerWidth;
    for (const [name, { chart, plot }] of Object.entries(figures)) {
      plots[name].setSize({ width: width(chart, plot), height: plots[name].height });
    }
    reachTables();
  });
  for (const query of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(query).addEventListener("change", drawAll);
  }

  window.anytrain = { update, plots };
  update(JSON.parse(document.getElementById("anytrain-charts").textContent));
  reachTables();
})();
