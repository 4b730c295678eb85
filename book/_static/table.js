// A table of class "searchable" gets a box that filters its rows and headers that sort them.

function filterRows(rows, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
  }
}

function sortRows(table, rows, column) {
  const headers = [...table.tHead.rows[0].cells];
  const descending = headers[column].getAttribute("aria-sort") === "ascending";
  headers.forEach((header) => header.removeAttribute("aria-sort"));
  headers[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
  const text = (row) => row.cells[column].textContent.trim();
  const order = (a, b) => text(a).localeCompare(text(b), undefined, { numeric: true });
  rows.sort((a, b) => (descending ? order(b, a) : order(a, b)));
  table.tBodies[0].append(...rows);
}

function makeSearchable(table) {
  const rows = [...table.tBodies[0].rows];
  const box = document.createElement("input");
  box.type = "search";
  box.className = "table-filter";
  box.placeholder = `Filter ${rows.length} rows`;
  box.setAttribute("aria-label", "Filter the rows of the table");
  box.addEventListener("input", () => filterRows(rows, box.value));
  (table.closest(".pst-scrollable-table-container") ?? table).before(box);

  [...table.tHead.rows[0].cells].forEach((header, column) => {
    header.tabIndex = 0;
    const sort = () => sortRows(table, rows, column);
    header.addEventListener("click", sort);
    header.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        sort();
      }
    });
  });
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("table.searchable").forEach(makeSearchable);
});
