// Sort the tables in elements of the class "sortable" by the column whose button is pressed.
"use strict";
(() => {
  const number = (text) => {
    const plain = text.replace(/,/g, "").trim();
    return plain === "" || Number.isNaN(Number(plain)) ? null : Number(plain);
  };
  const compare = (one, other) => {
    const [a, b] = [number(one), number(other)];
    if (a !== null && b !== null) return a - b;
    return one.localeCompare(other, "en", { numeric: true });
  };
  const sort = (table, column, heads) => {
    const head = heads[column];
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const each of heads) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [row.cells[column].textContent, row]);
    rows.sort(([one], [other]) => {
      // What is not known comes last, whichever way.
      if (one === "-" || other === "-") return (one === "-") - (other === "-");
      return down ? -compare(one, other) : compare(one, other);
    });
    body.append(...rows.map(([, row]) => row));
  };
  for (const table of document.querySelectorAll(".sortable table")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) =>
      head.querySelector("button").addEventListener("click", () => sort(table, column, heads)),
    );
  }
})();
