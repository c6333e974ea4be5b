// Draws each chart from the JSON next to it in the colours of the current scheme, and again when the scheme changes.
// The legend is a row of buttons that show and hide lines. Every function is available from the keyboard.
const isTouch = matchMedia("(pointer: coarse)").matches;
const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const hidden = new WeakMap();  // chart -> names of hidden lines
const signs = {"triangle-down": "▼", "x": "✕", "x-thin-open": "×", "circle": "●", "circle-open": "○", "square": "■",
  "diamond-open": "◇"};

function figureOf(chart) {
  const style = getComputedStyle(document.documentElement);
  const valueOf = (_, name) => style.getPropertyValue(name).trim();
  return JSON.parse(chart.nextElementSibling.textContent.replace(/var\((--[a-z-]+)\)/g, valueOf));
}

function draw(chart) {
  const figure = figureOf(chart);
  const off = hidden.get(chart);
  for (const trace of figure.data) if (off.has(trace.name)) trace.visible = false;
  figure.layout.showlegend = false;
  figure.layout.uirevision = "same";  // keeps the zoom when the scheme changes
  if (isTouch) figure.layout.dragmode = false;  // a finger on a chart scrolls the page
  paint(chart, figure.data);
  return Plotly.react(chart, figure.data, figure.layout, {responsive: true, displayModeBar: false});
}

function drawAll() { document.querySelectorAll(".chart").forEach(draw); }

function button(text, label, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", act);
  return made;
}

function zoom(chart, factor) {
  const range = chart._fullLayout.xaxis.range.map(Number);
  const middle = (range[0] + range[1]) / 2, half = (range[1] - range[0]) / 2 * factor;
  Plotly.relayout(chart, {"xaxis.range": [middle - half, middle + half]});
}

function move(chart, share) {
  const range = chart._fullLayout.xaxis.range.map(Number), by = share * (range[1] - range[0]);
  Plotly.relayout(chart, {"xaxis.range": [range[0] + by, range[1] + by]});
}

function reset(chart) {
  const {xaxis, yaxis} = figureOf(chart).layout;
  const whole = (name, axis) => axis.range ? {[name + ".range"]: axis.range} : {[name + ".autorange"]: axis.autorange || true};
  Plotly.relayout(chart, {...whole("xaxis", xaxis), ...whole("yaxis", yaxis)});
}

// Give each button the colour and the symbol of its line.
function paint(chart, traces) {
  for (const item of chart.parentElement.querySelectorAll("[data-name]")) {
    const trace = traces.find(one => one.name === item.dataset.name);
    const isMark = trace.mode === "markers";
    item.style.setProperty("--own", trace.fillcolor && trace.stackgroup ? trace.fillcolor
      : (isMark || !trace.line ? trace.marker.color : trace.line.color));
    item.dataset.sign = isMark ? signs[trace.marker.symbol] || "●" : trace.stackgroup || trace.type === "bar" ? "■" : "━";
  }
}

function addTools(chart) {
  const name = chart.getAttribute("aria-label");
  const tools = document.createElement("div");
  tools.className = "tools";
  const legend = document.createElement("div");
  legend.className = "legend";
  legend.setAttribute("role", "group");
  legend.setAttribute("aria-label", `Show in: ${name}`);
  const named = figureOf(chart).data.filter(trace => trace.name && trace.showlegend !== false);
  for (const trace of named) {
    const item = button(trace.name, "", () => {
      const off = hidden.get(chart), isShown = off.has(trace.name);
      isShown ? off.delete(trace.name) : off.add(trace.name);
      item.setAttribute("aria-pressed", String(isShown));
      draw(chart);
    });
    item.dataset.name = trace.name;
    item.setAttribute("aria-pressed", "true");
    legend.append(item);
  }
  const view = document.createElement("div");
  view.className = "view";
  view.setAttribute("role", "group");
  view.setAttribute("aria-label", `View of: ${name}`);
  view.append(button("+", "Zoom in", () => zoom(chart, 0.5)), button("−", "Zoom out", () => zoom(chart, 2)),
    button("‹", "Move left", () => move(chart, -0.25)), button("›", "Move right", () => move(chart, 0.25)),
    button("Reset", "Reset the zoom", () => reset(chart)));
  tools.append(legend, view);
  chart.before(tools);
}

for (const chart of document.querySelectorAll(".chart")) {
  hidden.set(chart, new Set());
  addTools(chart);
}
drawAll();
systemIsDark.addEventListener("change", drawAll);
document.addEventListener("scheme", drawAll);
