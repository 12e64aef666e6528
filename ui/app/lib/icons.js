// Icons: strokes in a box of 24 units.
import { html } from "./view.js";

const PATHS = {
  overview: "M4 4h7v7H4zM13 4h7v4h-7zM13 11h7v9h-7zM4 14h7v6H4z",
  instances: "M4 5h16v11H4zM9 20h6M12 16v4",
  networks: "M12 3v6M5 15v-3h14v3M12 9v3M3 15h4v5H3zM10 15h4v5h-4zM17 15h4v5h-4z",
  artifacts: "M12 3l8 4.5v9L12 21l-8-4.5v-9zM4 7.5l8 4.5 8-4.5M12 12v9",
  nodes: "M4 4h16v6H4zM4 14h16v6H4zM8 7h.01M8 17h.01",
  namespaces: "M3 6h6l2 2h10v11H3z",
  issuers: "M12 3l7 3v5c0 5-3 8-7 10-4-2-7-5-7-10V6zM9 12l2 2 4-4",
  operations: "M20 12a8 8 0 1 1-2.5-5.8M20 3v4h-4",
  events: "M4 6h16M4 12h16M4 18h10",
  menu: "M4 6h16M4 12h16M4 18h16",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 13l4 4L19 7",
  close: "M6 6l12 12M18 6L6 18",
  edit: "M4 20h4L19 9l-4-4L4 16z",
};

export function Icon({ name }) {
  return html`
    <svg class="svg-icon" viewBox="0 0 24 24" width="16" height="16" aria-hidden="true"><path d=${PATHS[name]} /></svg>
  `;
}
