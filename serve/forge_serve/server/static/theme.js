// Applies the chosen theme before the page is painted, so this is no module.

{
  const theme = localStorage.getItem("forge-jax.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
