// The theme: that of the system unless the user chose one.
const KEY = "muster.theme";

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

export function applyTheme() {
  const theme = stored();
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

export function isDark() {
  const theme = stored();
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function toggleTheme() {
  try {
    localStorage.setItem(KEY, isDark() ? "light" : "dark");
  } catch {
    /* storage is disabled */
  }
  applyTheme();
}
