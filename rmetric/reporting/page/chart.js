// Draws the panels of one run with uPlot. All share one step axis: what is zoomed or
// pointed at in one is so in all. The data come from render.py, as JSON in the page.
"use strict";
(() => {
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const root = document.getElementById("charts");
  const where = root.querySelector(".where");
  const FEWEST = 1e-5; // of the whole axis: no closer than that
  const HINT = where.textContent;
  let view = page.range.slice();
  let gutter = 0; // CSS pixels left of every panel for the numbers of its axis
  let cursor = null; // the place pointed at, in the axis' own unit
  let wanted = false; // a redraw of the readouts is under way

  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function shown(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e5 || size < 1e-3) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  }
  const whole = value => Math.round(value).toLocaleString("en");

  // The index of the element of rising `xs` that is nearest to x.
  function nearest(xs, x) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  // Where a logarithmic axis is labelled: 1, 2, 5, 10 or decades; evenly within less than one.
  function logTicks(chart, axis, low, high) {
    const decades = Math.log10(high / low);
    const ticks = [];
    if (decades < 0.8) {
      const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].find(one => one * power >= rough) * power;
      for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(i * step);
      return ticks;
    }
    const stride = Math.ceil(decades / 6);
    const first = Math.floor(Math.log10(low) / stride) * stride;
    for (let power = first; 10 ** power <= high; power += stride) {
      for (const one of decades < 2.5 ? [1, 2, 5] : [1]) ticks.push(Number((one * 10 ** power).toPrecision(6)));
    }
    return ticks.filter(tick => tick >= low && tick <= high);
  }

  function element(tag, attributes, ...children) {
    const made = Object.assign(document.createElement(tag), attributes);
    made.append(...children);
    return made;
  }

  // --- the view, shared by all panels

  function setView(low, high) {
    const [first, last] = page.range;
    const width = Math.max(high - low, (last - first) * FEWEST);
    low = Math.min(Math.max(low, first), last - width);
    view = width >= last - first ? page.range.slice() : [low, low + width];
    for (const panel of panels) panel.chart.setScale("x", { min: view[0], max: view[1] });
    // The charts move in a microtask of their own; the cursor goes to its step after that.
    queueMicrotask(() => point(cursor, null));
  }
  function zoom(factor) {
    const [low, high] = view;
    const at = cursor !== null && cursor > low && cursor < high ? cursor : (low + high) / 2;
    setView(at - (at - low) * factor, at + (high - at) * factor);
  }
  function pan(share) {
    const by = (view[1] - view[0]) * share;
    setView(view[0] + by, view[1] + by);
  }
  const actions = {
    in: () => zoom(0.5),
    out: () => zoom(2),
    left: () => pan(-0.3),
    right: () => pan(0.3),
    reset: () => setView(...page.range),
  };

  // --- the cursor, shared by all panels

  function point(x, from) {
    cursor = x;
    for (const panel of panels) {
      const at = x === null ? -10 : panel.chart.valToPos(x, "x");
      if (panel !== from) panel.chart.setCursor({ left: at, top: x === null ? -10 : 5 });
    }
    if (!wanted) {
      wanted = true;
      requestAnimationFrame(() => { wanted = false; readOut(); });
    }
  }

  function readOut() {
    where.textContent = cursor === null ? HINT : place(cursor);
    where.classList.toggle("hint", cursor === null);
    for (const panel of panels) {
      panel.spec.series.forEach((series, i) => {
        const [value, elsewhere] = panel.readouts[i];
        value.textContent = elsewhere.textContent = "";
        if (cursor === null || !series.x.length) return;
        const at = nearest(series.x, cursor);
        value.textContent = series.y[at] === null ? series.strange.get(series.x[at]) ?? "nan" : shown(series.y[at]);
        // A series that is logged less often says where its value is from.
        if (stepOf(series.x[at]) !== stepOf(cursor)) elsewhere.textContent = `at ${whole(series.steps?.[at] ?? stepOf(series.x[at]))}`;
      });
    }
  }
  // Records of one step lie beside each other, within less than half a step.
  const stepOf = x => Math.floor(x);

  function place(x) {
    if (!page.byRecord) return `step ${whole(stepOf(x))}`;
    const series = panels.flatMap(panel => panel.spec.series).find(one => one.x.length);
    const at = series ? nearest(series.x, x) : -1;
    return `record ${whole(x)}` + (at >= 0 ? `, step ${whole(series.steps[at])}` : "");
  }

  // The next place of a panel's own values, for the arrow keys.
  function move(panel, by) {
    const xs = panel.chart.data[0];
    const at = cursor === null ? xs.findIndex(x => x >= view[0]) : nearest(xs, cursor) + by;
    goTo(xs[Math.min(Math.max(at, 0), xs.length - 1)]);
  }
  function goTo(x) {
    const width = view[1] - view[0];
    if (x < view[0] || x > view[1]) setView(x - width / 2, x + width / 2);
    point(x, null);
  }

  // --- one panel

  class Panel {
    constructor(section, spec) {
      this.section = section;
      this.spec = spec;
      this.plot = section.querySelector(".plot");
      this.log = spec.log === true;
      this.first = spec === page.panels[0];
      this.hiddenSeries = new Set();
      for (const series of spec.series) {
        series.strange = new Map();
        for (const [kind, xs] of Object.entries(series.marks ?? {})) for (const x of xs) series.strange.set(x, kind);
      }
      this.legend();
      this.toggle = section.querySelector(".scale");
      if (this.toggle) {
        this.toggle.hidden = false;
        this.toggle.onclick = () => this.setLog(!this.log);
      }
      this.draw();
    }

    legend() {
      this.readouts = [];
      this.spec.series.forEach((series, i) => {
        const value = element("b"), elsewhere = element("small"), line = element("i");
        line.style.background = `var(--${series.colour})`;
        const button = element("button", { type: "button", title: "show or hide" }, line, element("span", {}, series.label), value, elsewhere);
        button.setAttribute("aria-pressed", "true");
        button.onclick = () => {
          const show = this.hiddenSeries.delete(i) || !this.hiddenSeries.add(i);
          button.setAttribute("aria-pressed", String(show));
          this.chart.setSeries(i + 1, { show });
        };
        this.readouts.push([value, elsewhere]);
        this.section.querySelector(".legend").append(button);
        this.strangeKey(series);
      });
    }

    // What the marks at the edge of the chart stand for.
    strangeKey(series) {
      const { nan = [], inf = [], "-inf": below = [] } = series.marks ?? {};
      const name = this.spec.series.length > 1 ? `${series.label} ` : "";
      for (const [sign, words, xs] of [["×", "nan", nan], ["▲", "infinite", inf], ["▼", "-infinite", below]]) {
        if (!xs.length) continue;
        const mark = element("b", { className: "sign" }, sign);
        mark.style.color = `var(--${series.colour})`;
        this.section.querySelector(".legend").append(element("span", { className: "strange" }, mark, `${name}${words}`));
      }
    }

    setLog(on) {
      this.log = on;
      this.draw();
    }

    // A logarithmic axis has no place for 0 and below: they are marked at the lower edge.
    // A linear one may end where the rest would be flattened: beyond, the curve keeps to its edge.
    drawable(series) {
      if (this.log) return series.y.map(y => (y !== null && y > 0 ? y : null));
      return this.spec.cap === null ? series.y : series.y.map(y => (y !== null && y > this.spec.cap ? this.spec.cap : y));
    }

    // Where each stretch beyond that edge begins.
    beyond(series) {
      if (this.log || this.spec.cap === null) return [];
      const above = j => series.y[j] !== null && series.y[j] > this.spec.cap;
      return series.x.filter((x, j) => above(j) && !(j > 0 && above(j - 1)));
    }

    draw() {
      this.chart?.destroy();
      this.toggle?.setAttribute("aria-pressed", String(this.log));
      this.section.dataset.scale = this.log ? "log" : "linear";
      const data = uPlot.join(this.spec.series.map(series => [series.x, this.drawable(series)]));
      this.chart = new uPlot(this.options(), data, this.plot);
      this.onMouse(this.chart.over);
      this.onTouch(this.chart.over);
    }

    options() {
      const narrow = root.clientWidth < 600;
      const text = "12px system-ui, sans-serif";
      const axis = { stroke: () => colour("quiet"), font: text, ticks: { show: false }, grid: { stroke: () => colour("grid"), width: 1 } };
      return {
        width: this.plot.clientWidth,
        height: this.plot.clientHeight,
        padding: [12, 22, 0, 0],
        legend: { show: false },
        scales: {
          x: { time: false, range: () => view },
          y: { distr: this.log ? 3 : 1, range: (chart, low, high) => this.range(low, high) },
        },
        axes: [
          { ...axis, size: 28, gap: 4, ...(this.first ? { label: page.byRecord ? "record (the steps fall back)" : "step", labelSize: 18, labelFont: text } : {}), space: narrow ? 70 : 90, values: (chart, at) => at.map(x => (Number.isInteger(x) ? whole(x) : "")) },
          { ...axis, size: (chart, values) => this.gutter(chart, values, narrow ? 50 : 62), gap: 6, space: 34, ...(this.log ? { splits: logTicks, filter: (chart, at) => at } : {}), values: (chart, at) => at.map(y => (y === null ? "" : shown(y))) },
        ],
        series: [{}, ...this.spec.series.map((series, i) => ({
          show: !this.hiddenSeries.has(i),
          stroke: () => colour(series.colour),
          // A training loss mostly hides under the validation loss: it is drawn broader.
          width: series.x.length > 800 ? 1 : series.colour === "training" ? 3 : 1.5,
          paths: series.stairs ? uPlot.paths.stepped({ align: 1 }) : undefined,
          // One evaluation has no line to be seen by.
          points: series.x.length < 4 ? { show: true, size: 9 } : { size: 4, ...(series.stairs ? { show: false } : {}) },
        }))],
        cursor: {
          y: false,
          points: { size: 7, width: 1 },
          drag: { x: true, y: false, setScale: false },
          // The nearest value of each series: they are not logged at the same steps.
          dataIdx: (chart, i, at) => this.nearestDrawn(chart, i, at),
          bind: { dblclick: () => () => { actions.reset(); return null; } },
        },
        hooks: {
          setSelect: [chart => this.selected(chart)],
          drawClear: [chart => this.under(chart)],
          draw: [chart => this.over(chart)],
        },
      };
    }

    // Wide enough for the longest number, and the same for all panels, as they share the other axis.
    gutter(chart, values, least) {
      chart.ctx.font = `${12 * uPlot.pxRatio}px system-ui, sans-serif`;
      const widths = (values ?? []).map(words => chart.ctx.measureText(words ?? "").width / uPlot.pxRatio);
      const needed = Math.ceil(Math.max(least, ...widths.map(width => width + 12)));
      if (needed > gutter) {
        gutter = needed;
        queueMicrotask(() => { for (const panel of panels) if (panel.chart !== chart) panel.chart.redraw(false, true); });
      }
      return gutter;
    }

    range(low, high) {
      const { bounds, threshold } = this.spec;
      if (bounds) {
        const margin = 0.04 * (bounds[1] - bounds[0]);
        return [bounds[0] - margin, bounds[1] + margin];
      }
      if (low === null || high === null) return this.log ? [0.1, 10] : [0, 1];
      if (threshold !== null) high = Math.max(high, 1.15 * threshold);
      // Room above the curve for the words beside the lines, so that they hide no peak.
      const tags = this.first ? page.lines.filter(one => one.tag).length : 0;
      const room = Math.min((20 * Math.min(tags, 4)) / Math.max(this.plot.clientHeight - 40, 1), 0.4);
      const more = room / (1 - room);
      if (this.log) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15 * (high / low) ** more];
      const margin = 0.06 * (high - low) || 0.1 * Math.abs(high) || 1;
      return [low - margin, high + margin + more * (high - low)];
    }

    nearestDrawn(chart, i, at) {
      if (i === 0) return at;
      const ys = chart.data[i];
      for (let by = 0; by < ys.length; by++) {
        if (ys[at - by] !== undefined) return at - by;
        if (ys[at + by] !== undefined) return at + by;
      }
      return at;
    }

    selected(chart) {
      const { left, width } = chart.select;
      if (width < 4) return;
      chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      setView(chart.posToVal(left, "x"), chart.posToVal(left + width, "x"));
    }

    // Not uPlot's own hook: that also speaks when the scale moves under a cursor at rest.
    onMouse(over) {
      over.addEventListener("mousemove", event => {
        const xs = this.chart.data[0];
        const left = event.clientX - over.getBoundingClientRect().left;
        if (xs.length) point(xs[nearest(xs, this.chart.posToVal(left, "x"))], this);
      });
      over.addEventListener("mouseleave", () => point(null, this));
    }

    // A finger that moves sideways chooses a stretch; up and down scrolls the page.
    onTouch(over) {
      let start = null;
      const at = event => Math.min(Math.max(event.clientX - over.getBoundingClientRect().left, 0), over.clientWidth);
      over.addEventListener("pointerdown", event => { start = event.pointerType === "touch" ? at(event) : null; });
      over.addEventListener("pointermove", event => {
        if (start === null) return;
        const now = at(event);
        this.chart.setSelect({ left: Math.min(start, now), top: 0, width: Math.abs(now - start), height: over.clientHeight }, false);
      });
      over.addEventListener("pointerup", event => {
        if (start === null) return;
        if (Math.abs(at(event) - start) > 12) this.selected(this.chart);
        else this.chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        start = null;
      });
      over.addEventListener("pointercancel", () => {
        start = null;
        this.chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      });
    }

    // Beneath the curves: where it alarms, and the steps that matter.
    under(chart) {
      const { ctx, bbox } = chart;
      ctx.save();
      ctx.beginPath();
      ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
      ctx.clip();
      const unit = uPlot.pxRatio, shade = colour(`${this.spec.tone}-shade`), solid = colour(this.spec.tone);
      for (const [from, to] of this.spec.shaded) {
        if (to < view[0] || from > view[1]) continue;
        const left = chart.valToPos(from, "x", true);
        const width = Math.max(chart.valToPos(to, "x", true) - left, 2 * unit);
        ctx.fillStyle = shade;
        ctx.fillRect(left, bbox.top, width, bbox.height);
        // Its begin is marked: one record of a hundred thousand would not be seen.
        ctx.fillStyle = solid;
        ctx.fillRect(left - unit, bbox.top, 3 * unit, 8 * unit);
      }
      // The stretches of the verdict's event.
      if (this.first) {
        ctx.fillStyle = colour("event");
        ctx.globalAlpha = 0.07;
        for (const [from, to] of page.event) {
          if (to < view[0] || from > view[1]) continue;
          const left = chart.valToPos(from, "x", true);
          ctx.fillRect(left, bbox.top, Math.max(chart.valToPos(to, "x", true) - left, 2 * unit), bbox.height);
        }
        ctx.globalAlpha = 1;
      }
      // Under the curve: a line at a spike would hide it.
      ctx.lineWidth = 1.5 * unit;
      const bottom = bbox.top + bbox.height;
      const line = (x0, y0, x1, y1) => { ctx.beginPath(); ctx.moveTo(x0, y0); ctx.lineTo(x1, y1); ctx.stroke(); };
      for (const one of page.lines) {
        if (one.x < view[0] || one.x > view[1] || !this.has(one)) continue;
        const x = chart.valToPos(one.x, "x", true);
        ctx.strokeStyle = colour(one.kind);
        ctx.setLineDash({ onset: [2 * unit, 3 * unit], failure: [], event: [] }[one.kind] ?? [6 * unit, 4 * unit]);
        line(x, bbox.top, x, bottom);
      }
      ctx.restore();
    }

    // Above them: the threshold, words beside the lines, and what has no place on the scale.
    over(chart) {
      const { ctx, bbox } = chart;
      const unit = uPlot.pxRatio, right = bbox.left + bbox.width, bottom = bbox.top + bbox.height;
      const line = (x0, y0, x1, y1) => { ctx.beginPath(); ctx.moveTo(x0, y0); ctx.lineTo(x1, y1); ctx.stroke(); };
      ctx.save();
      ctx.lineWidth = 1.5 * unit;
      if (this.spec.threshold !== null) {
        const y = chart.valToPos(this.spec.threshold, "y", true);
        ctx.strokeStyle = colour(this.spec.tone);
        ctx.setLineDash([5 * unit, 4 * unit]);
        if (y >= bbox.top && y <= bottom) line(bbox.left, y, right, y);
      }
      ctx.setLineDash([]);
      if (this.first) this.tags(chart, ctx, unit);
      this.marks(chart, ctx, unit, line);
      ctx.restore();
    }

    // Words beside the lines, in rows so that none hides another.
    tags(chart, ctx, unit) {
      const { bbox } = chart;
      const size = 12 * unit, pad = 4 * unit, rows = [];
      ctx.font = `600 ${size}px system-ui, sans-serif`;
      ctx.textBaseline = "top";
      ctx.textAlign = "left";
      for (const one of page.lines.slice().sort((a, b) => a.x - b.x)) {
        if (!one.tag || one.x < view[0] || one.x > view[1]) continue;
        const [tag, more] = one.tag.split(/(?= \()/);
        // On a narrow chart without what stands in brackets, which the list below it has.
        const rest = bbox.width < 480 * unit ? "" : more ?? "";
        const words = `${tag}, step ${whole(one.step)}${rest}`, width = ctx.measureText(words).width + 2 * pad;
        const x = chart.valToPos(one.x, "x", true), right = bbox.left + bbox.width;
        const beside = x + width + pad > right ? x - width - 2 * unit : x + 2 * unit;
        const left = Math.max(bbox.left, Math.min(beside, right - width));
        let row = 0;
        while (rows[row]?.some(([from, to]) => left < to && left + width > from)) row++;
        (rows[row] ??= []).push([left, left + width]);
        const top = bbox.top + 2 * pad + row * (size + 2 * pad);
        ctx.fillStyle = colour("paper");
        ctx.globalAlpha = 0.85;
        ctx.fillRect(left, top - pad / 2, width, size + pad);
        ctx.globalAlpha = 1;
        ctx.fillStyle = colour(one.kind);
        ctx.fillText(words, left + pad, top);
      }
    }

    has(one) {
      if (one.kind === "published-alarm") return this.spec.name === "r_metric";
      if (one.kind === "event" && this.spec.name === "score_calibrated") return true;
      return one.kind === "onset" || one.kind === "failure" || this.first;
    }

    marks(chart, ctx, unit, line) {
      const { bbox } = chart;
      const size = 4 * unit, top = bbox.top, bottom = bbox.top + bbox.height;
      this.spec.series.forEach((series, i) => {
        if (!chart.series[i + 1].show) return;
        ctx.strokeStyle = ctx.fillStyle = colour(series.colour);
        const at = (xs, draw) => xs.forEach(x => {
          if (x >= view[0] && x <= view[1]) draw(chart.valToPos(x, "x", true));
        });
        const triangle = (y, to) => x => {
          ctx.beginPath();
          ctx.moveTo(x - size, y); ctx.lineTo(x + size, y); ctx.lineTo(x, to);
          ctx.fill();
        };
        const { nan = [], inf = [], "-inf": below = [] } = series.marks ?? {};
        at(nan, x => { line(x - size, top - size, x + size, top + size); line(x - size, top + size, x + size, top - size); });
        at([...inf, ...this.beyond(series)], triangle(top + size, top - size));
        at(below, triangle(bottom - size, bottom + size));
        if (this.log) at(series.x.filter((x, j) => series.y[j] !== null && series.y[j] <= 0), triangle(bottom - size, bottom));
      });
    }
  }

  // --- the page

  const panels = [];
  for (const spec of page.panels) {
    panels.push(new Panel(root.querySelector(`[data-panel="${CSS.escape(spec.name)}"]`), spec));
  }

  const key = root.querySelector(".key");
  const keyed = page.lines.filter(line => line.kind !== "published-alarm");
  for (const line of keyed) {
    const mark = element("i", { className: line.kind });
    mark.style.borderColor = `var(--${line.kind})`;
    const button = element("button", { type: "button", title: "zoom to it" }, mark, `${line.label}, step ${whole(line.step)}`);
    button.onclick = () => zoomTo(line.x);
    key.append(element("li", {}, button));
  }
  key.hidden = !keyed.length;
  root.querySelector(".toolbar").hidden = !panels.length;

  // A tenth of the run around a place; of an alarm less, so that it is seen among its neighbours.
  function zoomTo(x, length = Infinity) {
    const all = page.range[1] - page.range[0];
    const reach = Math.min(all / 20, Math.max(2 * length, 40 * all / page.records));
    setView(x - reach, x + reach);
    point(x, null);
  }

  root.querySelectorAll("[data-do]").forEach(button => { button.onclick = actions[button.dataset.do]; });
  document.querySelectorAll("[data-record]").forEach(link => {
    link.addEventListener("click", () => zoomTo(Number(page.byRecord ? link.dataset.record : link.dataset.step), Number(link.dataset.length)));
  });

  root.addEventListener("keydown", event => {
    const panel = panels.find(one => one.plot === event.target);
    if (!panel || event.ctrlKey || event.metaKey || event.altKey) return;
    const pressed = {
      ArrowLeft: () => (event.shiftKey ? actions.left() : move(panel, -1)),
      ArrowRight: () => (event.shiftKey ? actions.right() : move(panel, 1)),
      "+": actions.in, "=": actions.in, "-": actions.out, 0: actions.reset, Escape: actions.reset,
      l: () => panel.toggle && panel.setLog(!panel.log),
    }[event.key];
    if (!pressed) return;
    event.preventDefault();
    pressed();
  });

  new ResizeObserver(() => {
    for (const panel of panels) {
      const width = panel.plot.clientWidth, height = panel.plot.clientHeight;
      if (width && (width !== panel.chart.width || height !== panel.chart.height)) panel.chart.setSize({ width, height });
    }
  }).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => panels.forEach(panel => panel.chart.redraw(false)));

  // For tests, and for who looks under the hood.
  window.rmetricPage = { page, panels, view: () => view.slice(), point: x => point(x, null) };
})();
