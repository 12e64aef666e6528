// Tables: one that renders only its visible rows, and short ones.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./view.js";
import { Empty, Failure, Loading, Panel } from "./parts.js";

const ROW = 38;
const OVERSCAN = 8;
const collator = new Intl.Collator(undefined, { numeric: true });

/** Compares values for sorting: numbers in texts by their value, missing values last. */
export function compare(a, b) {
  if (a == null || b == null) return (a == null) - (b == null);
  return typeof a === "number" && typeof b === "number" ? a - b : collator.compare(String(a), String(b));
}

/**
 * `columns` are `{id, title, value(record), cell(record), width, kind}`; `value` sorts. `kind: "wide"` columns are
 * hidden on phones. `href(record)` makes the first column a link.
 */
export function Table({ label, records, columns, keyOf, href, sort: initial, empty }) {
  const [sort, setSort] = useState(initial ?? { id: columns[0].id, down: false });
  const [view, setView] = useState({ top: 0, height: 800 });
  const body = useRef();
  const sorted = useMemo(() => {
    const column = columns.find((entry) => entry.id === sort.id) ?? columns[0];
    const keyed = records.map((record) => [column.value(record), record]);
    keyed.sort((a, b) => compare(a[0], b[0]));
    if (sort.down) keyed.reverse();
    return keyed.map((entry) => entry[1]);
  }, [records, sort, columns]);

  useLayoutEffect(() => {
    const element = body.current;
    const measure = () => setView({ top: element.scrollTop, height: element.clientHeight });
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (body.current.scrollTop > sorted.length * ROW) body.current.scrollTop = 0;
  }, [sorted.length]);

  const first = Math.max(0, Math.floor(view.top / ROW) - OVERSCAN);
  const last = Math.min(sorted.length, Math.ceil((view.top + view.height) / ROW) + OVERSCAN);
  const grid = { gridTemplateColumns: columns.map((column) => column.width ?? "minmax(0, 1fr)").join(" ") };
  const phone = columns.filter((column) => !column.kind?.includes("wide"));
  const style = {
    "--columns": grid.gridTemplateColumns,
    "--phone-columns": phone.map((column) => column.phone ?? "minmax(0, 1fr)").join(" "),
  };
  const head = (column) => {
    const active = sort.id === column.id;
    const direction = active ? (sort.down ? "descending" : "ascending") : "none";
    return html`
      <div role="columnheader" key=${column.id} class=${column.kind ?? ""} aria-sort=${direction}>
        <button type="button" onClick=${() => setSort({ id: column.id, down: active && !sort.down })}>
          ${column.title}
          <span class="order" aria-hidden="true">${active ? (sort.down ? "↓" : "↑") : ""}</span>
        </button>
      </div>
    `;
  };
  const row = (record, index) => html`
    <div role="row" class="row" key=${keyOf(record)} aria-rowindex=${index + 2} style=${{ top: `${index * ROW}px` }}>
      ${columns.map((column, at) => {
        const content = column.cell ? column.cell(record) : column.value(record);
        return html`
          <div role="cell" key=${column.id} class=${column.kind ?? ""}>
            ${
              at === 0 && href
                ? html`
                    <a class="row-link" href=${href(record)}>${content}</a>
                  `
                : content
            }
          </div>
        `;
      })}
    </div>
  `;
  return html`
    <div class="vtable" role="table" aria-label=${label} aria-rowcount=${sorted.length + 1} style=${style}>
      <div role="rowgroup"><div role="row" class="head" aria-rowindex="1">${columns.map(head)}</div></div>
      <div
        class="rows"
        role="rowgroup"
        tabindex="0"
        aria-label=${`${label}: rows`}
        ref=${body}
        onScroll=${(event) => setView({ top: event.currentTarget.scrollTop, height: event.currentTarget.clientHeight })}
      >
        ${
          sorted.length === 0
            ? html`
                <div role="row"><div role="cell" class="empty">${empty}</div></div>
              `
            : null
        }
        <div class="canvas" role="presentation" style=${{ height: `${sorted.length * ROW}px` }}>
          ${sorted.slice(first, last).map((record, index) => row(record, first + index))}
        </div>
      </div>
    </div>
  `;
}

/**
 * A short table. `columns` are titles, or `[title, class]`; an empty title is a column of actions. `row(record)` returns the
 * row, or `empty` is shown if there are no records.
 */
export function ShortTable({ columns, records, row, empty }) {
  if (records.length === 0)
    return html`
      <${Empty}>${empty}<//>
    `;
  const head = (column) => {
    const [title, kind = ""] = [column].flat();
    return title
      ? html`
          <th key=${title} class=${kind}>${title}</th>
        `
      : html`
          <td key="actions"></td>
        `;
  };
  return html`
    <div class="scroll">
      <table>
        <thead><tr>${columns.map(head)}</tr></thead>
        <tbody>${records.map(row)}</tbody>
      </table>
    </div>
  `;
}

/** A panel with a short table of the records that `live`, the result of `useLive`, has. */
export const TablePanel = ({ title, actions, live: { value, error, reload }, ...table }) => html`
  <${Panel} title=${title} actions=${actions}>
    <${Failure} error=${error} retry=${reload} />
    ${
      value
        ? html`
            <${ShortTable} records=${value} ...${table} />
          `
        : error
          ? null
          : html`
              <${Loading} />
            `
    }
  <//>
`;
