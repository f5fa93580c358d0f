// Loads the console. If the server goes away in between, says so and begins again as soon as it answers.
(async () => {
  try {
    await import("./main.js");
  } catch (error) {
    const place = document.querySelector("#app");
    place.replaceChildren(Object.assign(document.createElement("p"), { className: "starting", textContent: "The server does not answer. Trying again…" }));
    place.firstChild.setAttribute("role", "alert");
    console.warn(error);
    while (true) {
      await new Promise((resolve) => setTimeout(resolve, 1000));
      try {
        if ((await fetch("./", { cache: "no-store" })).ok) return location.reload();
      } catch {
        // still away
      }
    }
  }
})();
