// The colour scheme follows the system until the reader chooses light or dark. Printing uses light. The choice is kept in
// localStorage, which not every browser allows for local files.
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
    try { localStorage.setItem("plimsoll-scheme", scheme); } catch { /* no storage: the choice holds for this page only */ }
    setScheme(scheme);
    say();
  });
  let before;
  addEventListener("beforeprint", () => { before = root.dataset.theme; setScheme("light"); });
  addEventListener("afterprint", () => setScheme(before));
});
