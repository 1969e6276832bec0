// The timeline: a row per stage on a canvas. Only what is in view is drawn, and what shares a pixel is drawn once, so that 100,000
// actions stay smooth. Times are seconds from the call's begin. Several timelines share one View and so show the same span.

class View {
  constructor(length) { this.length = length; this.t0 = 0; this.t1 = length; this.critical = false; this.drawers = []; this.pending = false; }
  set(t0, t1) {
    const span = Math.min(Math.max(t1 - t0, this.length * 1e-5), this.length);
    this.t0 = Math.min(Math.max(t0, 0), this.length - span);
    this.t1 = this.t0 + span;
    this.redraw();
  }
  zoom(factor, at = (this.t0 + this.t1) / 2) { this.set(at - (at - this.t0) * factor, at + (this.t1 - at) * factor); }
  pan(share) { const by = (this.t1 - this.t0) * share; this.set(this.t0 + by, this.t1 + by); }
  // Frames something with room around it, so that what led to it is in view.
  frame(start, end) { const room = Math.max((end - start) * 2, this.length / 60); this.set(start - room, end + room); }
  get whole() { return this.t1 - this.t0 > this.length * 0.9999; }
  redraw() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => { this.pending = false; this.drawers.forEach((draw) => draw()); });
  }
}

// First index whose value is above `limit`, in an ascending array.
function above(values, limit) {
  let low = 0, high = values.length;
  while (low < high) { const middle = (low + high) >> 1; if (values[middle] > limit) high = middle; else low = middle + 1; }
  return low;
}

const FONT = "12px system-ui, 'DejaVu Sans', sans-serif";
let lastScroll = -1e9;
addEventListener("scroll", () => { lastScroll = performance.now(); }, { passive: true });

class Timeline {
  // `call`: see rrfp/report/page.py, `pack`. `marks`: stage -> mark, `edges`: those that a finding names. `loud`: causes of idle time
  // that one is about. `tip(lines, x, y)` shows a tooltip or, without lines, hides it.
  constructor(canvas, call, view, { marks, edges, loud, tip }) {
    Object.assign(this, { canvas, call, view, marks, edges, loud, tip, hovered: null, band: null });
    this.rows = call.stages.map((stage) => ({ stage, rank: call.rank_of[stage], items: [] }));
    const row = new Map(this.rows.map((each) => [each.stage, each]));
    const { actions, waits } = call;
    this.index = new Map();
    actions.stage.forEach((stage, i) => { row.get(stage).items.push(i); this.index.set(stage + actions.kind[i] + actions.microbatch[i], i); });
    const waiting = new Map();
    waits.rank.forEach((rank, i) => { if (!waiting.has(rank)) waiting.set(rank, []); waiting.get(rank).push(i); });
    for (const each of this.rows) {
      each.items.sort((a, b) => actions.start[a] - actions.start[b]);
      each.ends = each.items.map((i) => actions.end[i]);
      each.waits = (waiting.get(each.rank) || []).sort((a, b) => waits.start[a] - waits.start[b]);
      each.waitEnds = each.waits.map((i) => waits.end[i]);
    }
    this.top = 22;
    this.pitch = Math.max(2, Math.min(26, 620 / this.rows.length));
    canvas.style.height = this.top + this.pitch * this.rows.length + 12 + "px";
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Timeline of ${this.rows.length} stages and ${actions.start.length} actions over ${time(call.seconds)}; the tables below hold its figures`);
    view.drawers.push(() => this.draw());
    new ResizeObserver(() => this.draw()).observe(canvas);
    this.listen();
  }

  get left() { return this.canvas.clientWidth > 600 ? 80 : 38; }
  x(t) { return this.left + (t - this.view.t0) / (this.view.t1 - this.view.t0) * (this.canvas.clientWidth - this.left); }
  t(x) { return this.view.t0 + (x - this.left) / (this.canvas.clientWidth - this.left) * (this.view.t1 - this.view.t0); }

  draw() {
    const { canvas, view } = this, width = canvas.clientWidth, height = canvas.clientHeight;
    if (!width) return;
    const ratio = window.devicePixelRatio || 1, pen = canvas.getContext("2d"), ink = colour("ink"), quiet = colour("quiet");
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    pen.scale(ratio, ratio);
    pen.font = FONT;
    pen.textBaseline = "middle";
    this.axis(pen, height, quiet);
    const bar = Math.max(1, this.pitch - (this.pitch > 8 ? 4 : this.pitch > 3 ? 1 : 0)), low = Math.max(1, bar * 0.34);
    this.drawn = 0;
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, width - this.left, height);
    pen.clip();
    this.rows.forEach((row, at) => this.row(pen, row, this.top + at * this.pitch, bar, low));
    this.outline(pen, bar, ink);
    if (this.band) {
      const [a, b] = this.band;
      pen.fillStyle = colour("accent");
      pen.globalAlpha = 0.22;
      pen.fillRect(Math.min(a, b), this.top, Math.abs(b - a), height);
      pen.globalAlpha = 1;
    }
    pen.restore();
    this.labels(pen, bar, ink);
    if (!view.whole) { // where in the call this view is
      const across = width - this.left;
      pen.fillStyle = colour("rule");
      pen.fillRect(this.left, height - 5, across, 4);
      pen.fillStyle = quiet;
      pen.fillRect(this.left + view.t0 / view.length * across, height - 5, Math.max(4, (view.t1 - view.t0) / view.length * across), 4);
    }
    canvas.dataset.view = `${view.t0} ${view.t1}`;
    canvas.dataset.drawn = this.drawn;
  }

  // One stage. Rectangles are drawn by colour, not by time: changing the colour is what costs.
  row(pen, row, y, bar, low) {
    const { view, left, call: { actions, waits } } = this, width = this.canvas.clientWidth, scale = (width - left) / (view.t1 - view.t0);
    const boxes = new Map(), labels = [], box = (style, alpha, x, top, across, high) => {
      const key = style + alpha;
      if (!boxes.has(key)) boxes.set(key, { style, alpha, list: [] });
      boxes.get(key).list.push(x, top, across, high);
    };
    const visible = (items, ends, { start, end }, draw) => {
      let reached = -1;
      for (let k = above(ends, view.t0); k < items.length; k++) {
        const i = items[k], from = left + (start[i] - view.t0) * scale, to = left + (end[i] - view.t0) * scale;
        if (from > width) break;
        if (to - reached < 0.7 && to - from < 2) continue; // shares its pixel with one that is drawn
        if (draw(i, from, to) !== false) reached = Math.max(from + 1, to);
      }
    };
    visible(row.waits, row.waitEnds, waits, (i, from, to) => {
      const high = this.loud.has(waits.cause[i]) ? bar * 0.8 : low;
      box(causeColour(waits.cause[i]), view.critical ? 0.4 : 1, from, y + (bar - high) / 2, Math.max(to - from, 0.6), high);
    });
    for (const critical of view.critical ? [0, 1] : [-1]) {
      visible(row.items, row.ends, actions, (i, from, to) => {
        if (critical >= 0 && critical !== actions.critical[i]) return false;
        this.drawn++;
        const across = Math.max(to - from, 1), wide = to - from > 4 ? to - from - 0.5 : across;
        box(kindColour(actions.kind[i]), critical ? 1 : 0.25, from, y, wide, bar);
        if (across > 8 && actions.padded[i] > 0) {
          const pad = Math.min(wide, actions.padded[i] * scale);
          box("#fff", 0.33, from + wide - pad, y, pad, bar);
        }
        if (critical === 1) box(colour("critical"), 1, from, y + bar - 1, wide, Math.min(3, this.pitch - bar + 1));
        if (critical && bar >= 12 && across > 6.5 * String(actions.microbatch[i]).length + 2) labels.push(actions.microbatch[i], (Math.max(from, left) + Math.min(to, width)) / 2);
        return true;
      });
    }
    for (const { style, alpha, list } of boxes.values()) {
      pen.fillStyle = style;
      pen.globalAlpha = alpha;
      for (let k = 0; k < list.length; k += 4) pen.fillRect(list[k], list[k + 1], list[k + 2], list[k + 3]);
    }
    pen.fillStyle = "#fff";
    pen.textAlign = "center";
    pen.globalAlpha = 1;
    pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    for (let k = 0; k < labels.length; k += 2) pen.fillText(labels[k] ?? "", labels[k + 1], y + bar / 2 + 0.5);
  }

  axis(pen, height, quiet) {
    const { view } = this, width = this.canvas.clientWidth, rough = (view.t1 - view.t0) / Math.max(2, (width - this.left) / 110);
    const power = 10 ** Math.floor(Math.log10(rough)), step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
    pen.fillStyle = quiet;
    pen.strokeStyle = colour("rule");
    pen.lineWidth = 1;
    pen.textAlign = "left";
    for (let n = Math.ceil(view.t0 / step); n * step <= view.t1; n++) {
      const x = Math.round(this.x(n * step)) + 0.5, label = time(n * step, step, view.t1);
      pen.beginPath();
      pen.moveTo(x, 4);
      pen.lineTo(x, height - 8);
      pen.stroke();
      if (x + pen.measureText(label).width + 4 < width) pen.fillText(label, x + 3, 10);
    }
  }

  labels(pen, bar, ink) {
    if (this.pitch < 4) return;
    pen.font = FONT;
    const every = Math.ceil(13 / this.pitch), words = this.left > 40 ? "stage " : "";
    pen.textAlign = "left";
    this.rows.forEach((row, at) => {
      const mark = this.marks.get(row.stage);
      if (at % every && !mark) return;
      pen.fillStyle = mark && mark.includes(NAMED) ? colour("alarm") : ink;
      pen.fillText((mark ? mark + " " : "") + words + row.stage, 0, this.top + at * this.pitch + bar / 2 + 0.5);
    });
    for (const edge of this.edges) {
      const [from, to] = edge.split(">").map((stage) => this.rows.findIndex((row) => row.stage === +stage)), x = this.left - 7;
      if (from < 0 || to < 0) continue;
      const [y0, y1] = [from, to].map((at) => this.top + at * this.pitch + bar / 2), down = Math.sign(y1 - y0);
      pen.fillStyle = pen.strokeStyle = colour("alarm");
      pen.lineWidth = 2;
      pen.beginPath();
      pen.moveTo(x, y0);
      pen.lineTo(x, y1 - 4 * down);
      pen.stroke();
      pen.beginPath();
      pen.moveTo(x, y1);
      pen.lineTo(x - 4, y1 - 7 * down);
      pen.lineTo(x + 4, y1 - 7 * down);
      pen.fill();
    }
  }

  // The hovered action or wait, and a line from the action that let it start.
  outline(pen, bar, ink) {
    const hit = this.hovered;
    if (!hit) return;
    const y = this.top + hit.row * this.pitch, { actions } = this.call, spans = hit.wait ? this.call.waits : actions;
    pen.strokeStyle = ink;
    pen.lineWidth = 2;
    pen.strokeRect(this.x(spans.start[hit.i]), y, Math.max(2, this.x(spans.end[hit.i]) - this.x(spans.start[hit.i])), bar);
    const name = /(\d+)([A-Z_]+)(\d+)/.exec((hit.wait ? spans.culprit[hit.i] : spans.reason[hit.i]) || "");
    const source = name && this.index.get(name[1] + name[2] + name[3]);
    if (source === undefined || source === null) return;
    const from = this.rows.findIndex((row) => row.stage === actions.stage[source]);
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.moveTo(this.x(actions.end[source]), this.top + from * this.pitch + bar / 2);
    pen.lineTo(this.x(hit.wait ? spans.end[hit.i] : spans.start[hit.i]), y + bar / 2);
    pen.stroke();
    pen.strokeRect(this.x(actions.start[source]), this.top + from * this.pitch, Math.max(2, this.x(actions.end[source]) - this.x(actions.start[source])), bar);
  }

  // What is at a point: {row, i, wait} or null. Actions come before waits, and 2 pixels beside a thin one count.
  at(x, y) {
    const number = Math.floor((y - this.top) / this.pitch), row = this.rows[number];
    if (!row || x < this.left) return null;
    const slack = 2 * (this.view.t1 - this.view.t0) / this.canvas.clientWidth, t = this.t(x), find = (ends, items, starts) => {
      const exact = items[above(ends, t)], near = items[above(ends, t - slack)];
      return [exact, near].find((i) => i !== undefined && starts[i] <= t + (i === exact ? 0 : slack));
    };
    const action = find(row.ends, row.items, this.call.actions.start);
    if (action !== undefined) return { row: number, i: action, wait: false };
    const wait = find(row.waitEnds, row.waits, this.call.waits.start);
    return wait === undefined ? null : { row: number, i: wait, wait: true };
  }

  hover(x, y, clientX, clientY) {
    const hit = this.at(x, y), same = hit && this.hovered && hit.i === this.hovered.i && hit.wait === this.hovered.wait && hit.row === this.hovered.row;
    if (!same && (hit || this.hovered)) { this.hovered = hit; this.draw(); }
    this.tip(hit && (hit.wait ? waitLines(this.call, hit.i) : actionLines(this.call, hit.i)), clientX, clientY);
  }

  listen() {
    const { canvas, view } = this, here = (event) => [event.offsetX, event.offsetY];
    let down = null;
    canvas.addEventListener("wheel", (event) => {
      // A page scroll that happens to reach the timeline goes on being a page scroll, and so does zooming out beyond the whole.
      if (performance.now() - lastScroll < 250) return;
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
      if (!sideways && event.deltaY > 0 && view.whole) return;
      event.preventDefault();
      const by = event.deltaMode ? 30 : 1;
      if (sideways) view.pan((event.deltaX || event.deltaY) * by / canvas.clientWidth);
      else view.zoom(Math.exp(Math.max(-200, Math.min(200, event.deltaY * by)) / 400), this.t(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      const [x] = here(event);
      down = { x, last: x, pan: event.shiftKey || event.pointerType === "touch" };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = here(event);
      if (!down) return this.hover(x, y, event.clientX, event.clientY);
      if (down.pan) { view.pan((down.last - x) / (canvas.clientWidth - this.left)); down.last = x; return undefined; }
      this.band = [down.x, x];
      return this.draw();
    });
    canvas.addEventListener("pointerup", (event) => {
      const [x, y] = here(event);
      if (this.band && Math.abs(x - down.x) > 4) view.set(this.t(Math.min(down.x, x)), this.t(Math.max(down.x, x)));
      this.band = down = null;
      view.redraw();
      this.hover(x, y, event.clientX, event.clientY); // a tap shows what a mouse shows when it hovers
    });
    canvas.addEventListener("pointercancel", () => { this.band = down = null; view.redraw(); });
    canvas.addEventListener("pointerleave", () => { if (!down) this.hover(-1, -1); });
    canvas.addEventListener("dblclick", () => view.set(0, view.length));
    canvas.addEventListener("keydown", (event) => {
      const keys = {
        ArrowLeft: () => view.pan(-0.2), ArrowRight: () => view.pan(0.2), "+": () => view.zoom(0.6), "=": () => view.zoom(0.6), "-": () => view.zoom(1 / 0.6),
        0: () => view.set(0, view.length), Home: () => view.set(0, view.t1 - view.t0), End: () => view.set(view.length - (view.t1 - view.t0), view.length),
        c: () => document.getElementById("toggle").click(),
      };
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key]();
    });
  }
}
