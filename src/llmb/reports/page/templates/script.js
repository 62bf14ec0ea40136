"use strict";
(() => {
  const button = (text, act) => {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = text;
    made.addEventListener("click", act);
    return made;
  };
  const save = (name, type, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };
  const csv = (table) => [...table.rows].map((row) => [...row.cells].map((cell) => {
    const shown = cell.textContent;
    const formula = /^\s*[=+\-@\uff1d\uff0b\uff0d\uff20]./s.test(shown);
    const text = formula && !/^[-+]?[\d.,]+(e[-+]?\d+)?\s*%?$/i.test(shown) ? `'${shown}` : shown;
    return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }).join(",")).join("\n") + "\n";
  const picture = (figure) => {
    const source = figure.querySelector("svg");
    const copy = source.cloneNode(true);
    const style = getComputedStyle(document.documentElement);
    const text = new XMLSerializer().serializeToString(copy)
      .replace(/var\((--\w+)\)/g, (_, name) => style.getPropertyValue(name).trim());
    const font = "<style>text{font-family:sans-serif}*{stroke-linejoin:round}</style>";
    const paper = style.getPropertyValue("--paper").trim();
    return text.replace(/>/, `>${font}<rect width="100%" height="100%" fill="${paper}"/>`);
  };

  const root = document.documentElement;
  document.getElementById("tools").append(button("Light or dark", () => {
    const set = root.dataset.theme;
    const dark = set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  }));
  for (const figure of document.querySelectorAll("figure")) {
    const details = figure.querySelector("details");
    details.append(
      button("Save data as CSV", () => save(`${figure.id}.csv`, "text/csv", csv(figure.querySelector("table")))), " ",
      button("Save plot as SVG", () => save(`${figure.id}.svg`, "image/svg+xml", picture(figure))));
  }

  const number = (text) => {
    const found = text.trim().replaceAll(",", "");
    return found !== "" && Number.isFinite(Number(found)) ? Number(found) : null;
  };
  const order = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (x !== null && y !== null) return x - y;
    if (x !== null || y !== null) return x === null ? 1 : -1;
    return a < b ? -1 : a > b ? 1 : 0;
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((head, place) => {
      const text = head.textContent;
      head.textContent = "";
      head.append(button(text, () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        const keyed = [...body.rows].map((row) => [row.cells[place].textContent, row]);
        keyed.sort((a, b) => (up ? 1 : -1) * order(a[0], b[0]));
        body.append(...keyed.map((pair) => pair[1]));
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
      }));
    });
    const label = document.createElement("label");
    const input = document.createElement("input");
    const count = document.createElement("span");
    input.type = "search";
    count.setAttribute("role", "status");
    label.append("Show runs with ", input, " ");
    document.getElementById("filter").append(label, count,
      " ", button("Save runs as CSV", () => save("runs.csv", "text/csv", csv(table))));
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of body.rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += row.hidden ? 0 : 1;
      }
      count.textContent = words.length ? `${shown} of ${body.rows.length}` : "";
    });
  }
  const opened = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target) for (let up = target; up; up = up.parentElement) if (up.tagName === "DETAILS") up.open = true;
  };
  addEventListener("hashchange", opened);
  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll(".recipe > details, .verdicts details")) part.open = true;
  });
  opened();
})();
