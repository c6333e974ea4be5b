// Draws each chart from the JSON beside it, with the colours of the scheme in force, and again when the scheme changes.
const isTouch = matchMedia("(pointer: coarse)").matches;

function draw() {
  const style = getComputedStyle(document.documentElement);
  const valueOf = (_, name) => style.getPropertyValue(name).trim();
  for (const chart of document.querySelectorAll(".chart")) {
    const figure = JSON.parse(chart.nextElementSibling.textContent.replace(/var\((--[a-z-]+)\)/g, valueOf));
    if (isTouch) figure.layout.dragmode = false;  // a finger on a chart scrolls the page
    Plotly.react(chart, figure.data, figure.layout, {responsive: true, displayModeBar: false});
  }
}

draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
