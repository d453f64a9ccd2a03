// Live: the server sends the panels that have changed, and the names of all in their order.
(() => {
  const state = document.getElementById("connection");
  const main = document.getElementById("panels");
  const source = new EventSource("events" + location.search);
  source.onopen = () => { state.textContent = "live"; };
  source.onerror = () => { state.textContent = "not connected; trying again"; };
  // A timeline that somebody points at or has zoomed stays as it is meanwhile.
  const isLookedAt = (section) => section.querySelector(".timeline") &&
    (section.matches(":hover") || section.querySelector(".zoomed[data-width]:not([data-width='100'])"));
  const held = {};
  const show = (name, panel) => {
    let section = document.getElementById(name);
    if (!section) {
      section = document.createElement("section");
      section.id = name;
      main.append(section);
    }
    if (isLookedAt(section)) {
      held[name] = panel;
      return;
    }
    delete held[name];
    section.className = panel.wide ? "all" : "";
    section.innerHTML = panel.html;
  };
  setInterval(() => Object.entries(held).forEach(([name, panel]) => show(name, panel)), 1000);
  source.addEventListener("panels", (message) => {
    const news = JSON.parse(message.data);
    Object.entries(news.changed).forEach(([name, panel]) => show(name, panel));
    for (const section of [...main.children]) {
      if (!news.names.includes(section.id)) section.remove();
    }
    news.names.forEach((name, i) => {
      const section = document.getElementById(name);
      if (main.children[i] !== section) main.insertBefore(section, main.children[i]);
    });
    document.title = news.title;
    document.querySelector("h1").textContent = news.title;
    state.textContent = "live";
  });
})();
