/* Sets the chosen theme before the first paint. A classic script: modules run too late for that. */
(() => {
  const chosen = localStorage.getItem("gracetune-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
