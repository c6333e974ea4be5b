// Light or dark as the reader's system has it, until the reader chooses; printed in light. What was chosen is kept where
// the browser lets a page keep something (not every browser does for a file).
const root = document.documentElement;

function remembered() {
  try { return localStorage.getItem("plimsoll-scheme"); } catch { return null; }
}

function setScheme(scheme) {
  if (scheme) root.dataset.theme = scheme; else delete root.dataset.theme;
  document.dispatchEvent(new Event("scheme"));
}

const chosen = remembered();
if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;

addEventListener("DOMContentLoaded", () => {
  const toggle = document.querySelector(".scheme");
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => root.dataset.theme ? root.dataset.theme === "dark" : systemDark.matches;
  const say = () => toggle.setAttribute("aria-pressed", String(isDark()));
  toggle.hidden = false;
  say();
  systemDark.addEventListener("change", say);
  toggle.addEventListener("click", () => {
    const scheme = isDark() ? "light" : "dark";
    try { localStorage.setItem("plimsoll-scheme", scheme); } catch { /* it is for this page only */ }
    setScheme(scheme);
    say();
  });
  let before;
  addEventListener("beforeprint", () => { before = root.dataset.theme; setScheme("light"); });
  addEventListener("afterprint", () => setScheme(before));
});
