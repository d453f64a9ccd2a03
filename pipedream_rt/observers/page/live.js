// Live: the server sends the panels that have changed, and the names of all in their order.
(() => {
  const state = document.getElementById("connection");
  const main = document.getElementById("panels");
  const source = new EventSource("events" + location.search);
  source.onopen = () => { state.textContent = "live"; };
  source.onerror = () => { state.textContent = "not connected; trying again"; };
  source.addEventListener("panels", (message) => {
    const news = JSON.parse(message.data);
    for (const [name, panel] of Object.entries(news.changed)) {
      let section = document.getElementById(name);
      if (!section) {
        section = document.createElement("section");
        section.id = name;
      }
      section.className = panel.wide ? "all" : "";
      section.innerHTML = panel.html;
      main.append(section);
    }
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
